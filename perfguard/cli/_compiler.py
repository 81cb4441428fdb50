"""Keeps PyTorch's compiler out of a command that compiles nothing.

Importing ``torch._dynamo`` takes as long as importing torch, and loads sympy. A prediction needs neither. Yet every optimizer
imports the compiler, to say what it may not look into. Torchvision imports it, to ask later whether there is one. PyTorch's
kernels for meta tensors import sympy and the module of symbolic shapes, to check shapes that are plain integers.

Here the import system gives a stand-in for each of these modules. It answers PyTorch's few trivial questions. Any other question,
and any question of other code, imports the real module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_DYNAMO, _SYMBOLIC, _SYMPY = "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"
_PACKAGES = (_DYNAMO, _SYMPY)
_ASKING = ("torch", "torchvision")
_Answers = Mapping[str, Any]


class _NoExpression:
    """In place of ``sympy.Basic``: until sympy is imported, nothing is an instance of it."""


def _same(value: bool) -> bool:
    return value


ON_PLAIN_VALUES: Mapping[str, Callable[..., Any]] = {
    "expect_true": _same,
    "free_unbacked_symbols": lambda _: set(),
    "guard_int": _same,
    "guard_or_false": _same,
    "guard_or_true": _same,
    "guard_size_oblivious": _same,
    "guarding_hint_or_throw": _same,
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "statically_known_true": _same,
    "sym_and": lambda *values: all(values),
    "sym_eq": lambda one, other: _listed(one) == _listed(other),
    "sym_or": lambda *values: any(values),
}
"""What functions of the module of symbolic shapes return for integers and booleans, for sequences of them, and for tensors of
plain shapes."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, sys.modules["torch"].Tensor):
        value = value.shape
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else type(value) in (bool, int)


def _listed(value: Any) -> Any:
    return list(map(_listed, value)) if isinstance(value, (tuple, list)) else value


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Inside, meta tensors and optimizers need no compiler. The real modules are imported when anything else is asked of them.

    Nothing of this is left afterwards. It is for a process with one thread.
    """
    marked: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        marked.append(function)
        return function

    def is_compile_supported(*arguments: Any) -> Any:
        return finder.real(f"{_DYNAMO}.utils").is_compile_supported(*arguments)

    def symbolic(name: str) -> Callable[..., Any]:
        def answer(*values: Any) -> Any:
            plain = all(map(_is_plain, values))
            return ON_PLAIN_VALUES[name](*values) if plain else getattr(finder.real(_SYMBOLIC), name)(*values)

        return answer

    finder = _Deferring(
        {
            _DYNAMO: {"disable": disable, "graph_break": lambda: None},
            f"{_DYNAMO}.utils": {"is_compile_supported": is_compile_supported},
            _SYMBOLIC: {name: symbolic(name) for name in ON_PLAIN_VALUES},
            _SYMPY: {"Basic": _NoExpression},
        }
    )
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in (_DYNAMO, _SYMBOLIC, _SYMPY):
            finder.give_up(name)
        for function in marked:  # `torch._disable_dynamo` keeps what `disable` returned
            with suppress(AttributeError):
                del function.__dynamo_disable  # type: ignore[attr-defined]


class _Deferred(ModuleType):
    """Stands for a module until something else is asked of it than PyTorch's questions with known ``answers``."""

    def __init__(self, name: str, answers: _Answers, finder: _Deferring) -> None:
        super().__init__(name)
        vars(self).update(_answers=answers, _finder=finder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # asked by the import system and by `inspect`, of every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        answers, finder = vars(self)["_answers"], vars(self)["_finder"]
        asking = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return answers[name] if asking in _ASKING and name in answers else getattr(finder.real(self.__name__), name)


class _Deferring(MetaPathFinder, Loader):
    """Gives the import system a :class:`_Deferred` for each module of ``answers`` that is not imported yet."""

    def __init__(self, answers: Mapping[str, _Answers]) -> None:
        self._answers = dict(answers)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._answers:
            return ModuleSpec(name, self, is_package=name in _PACKAGES)
        package = next((one for one in _PACKAGES if one in self._answers and name.startswith(f"{one}.")), None)
        if package is None:
            return None
        self.real(package)  # the submodule may come with it
        if name in sys.modules:
            return ModuleSpec(name, self, loader_state=sys.modules[name].__spec__)
        return PathFinder.find_spec(name, sys.modules[name.rpartition(".")[0]].__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == _SYMBOLIC:
            importlib.import_module("torch.fx.experimental._config")  # its users expect it to have come with it
        answers = self._answers.get(spec.name)
        return sys.modules[spec.name] if answers is None else _Deferred(spec.name, answers, self)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:  # it ran before
            module.__spec__ = spec.loader_state

    def real(self, name: str) -> ModuleType:
        """The module itself."""
        self.give_up(name)
        return importlib.import_module(name)

    def give_up(self, name: str) -> None:
        """Stand for ``name`` no longer, nor for what is inside of it or around it."""
        top = _DYNAMO if name.startswith(_DYNAMO) else name
        for one in [one for one in self._answers if one.startswith(top)]:
            del self._answers[one]
            if isinstance(sys.modules.get(one), _Deferred):
                deferred = sys.modules.pop(one)
                package, _, attribute = one.rpartition(".")
                if vars(sys.modules.get(package, deferred)).get(attribute) is deferred:
                    delattr(sys.modules[package], attribute)

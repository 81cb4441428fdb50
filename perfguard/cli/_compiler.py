"""Keeps PyTorch's compiler out of a command that compiles nothing.

Importing ``torch._dynamo`` takes as long as importing torch, and loads sympy. A prediction needs none of it, and yet it is imported
by every optimizer (to say what the compiler may not look into) and by torchvision (to ask, later, whether there is a compiler).
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

_DYNAMO = "torch._dynamo"


class _Deferred(ModuleType):
    """Stands for a module that is imported when something else is asked of it than its ``answers``."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system and by `inspect`, of every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_imported(self.__name__), name)


class _SubmodulesOfDynamo(MetaPathFinder, Loader):
    """Imports the package itself before the first of its submodules is looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_DYNAMO}.") or not isinstance(sys.modules.get(_DYNAMO), _Deferred):
            return None
        _imported(_DYNAMO)
        if name in sys.modules:
            return ModuleSpec(name, self)
        return PathFinder.find_spec(name, sys.modules[name.rpartition(".")[0]].__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It ran when the package was imported."""


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Inside, optimizers are made and stepped without ``torch._dynamo``; whatever else asks for it gets it, then.

    Nothing of it is left afterwards. It is for a process with one thread.
    """
    if _DYNAMO in sys.modules:
        yield
        return
    marked: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        marked.append(function)
        return function

    def is_compile_supported(*arguments: Any) -> Any:
        return _imported(f"{_DYNAMO}.utils").is_compile_supported(*arguments)

    finder = _SubmodulesOfDynamo()
    answers = {"__path__": [], "disable": disable, "graph_break": lambda: None}
    sys.modules[_DYNAMO] = _Deferred(_DYNAMO, answers)
    sys.modules[f"{_DYNAMO}.utils"] = _Deferred(f"{_DYNAMO}.utils", {"is_compile_supported": is_compile_supported})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _remove_deferred()
        for function in marked:  # `torch._disable_dynamo` keeps what `disable` returned
            with suppress(AttributeError):
                del function.__dynamo_disable  # type: ignore[attr-defined]


def _imported(name: str) -> ModuleType:
    _remove_deferred()
    return importlib.import_module(name)


def _remove_deferred() -> None:
    for name in (_DYNAMO, f"{_DYNAMO}.utils"):
        if isinstance(sys.modules.get(name), _Deferred):
            del sys.modules[name]

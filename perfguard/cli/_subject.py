"""The network of a command: an ONNX file, or what a function of the user's file builds from hyperparameters.

The words are checked before anything is imported that takes long, so that a slip is answered at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from perfguard.exceptions import BuildError, ConfigurationError
from perfguard.workload import Build, Mode, Precision, Tf32, Workload, build_workload, is_missing_parameter

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph, TraceCache


class Subject(NamedTuple):
    """Input of a command: an ONNX file or the workload that a function builds."""

    network: str | Workload
    steps: int | None
    options: Mapping[str, Any]
    params: ReadParams

    def graph_on(self, device: Device, *, traces: TraceCache | None = None) -> OpGraph:
        """Return the operators of the network as ``device`` runs them.

        Args:
            device: what it runs on.
            traces: earlier traces of such networks. Then the step itself may not run, and no name is refused.

        Raises:
            ConfigurationError: if a hyperparameter was given that neither ``build`` nor the step reads.
        """
        from perfguard._predict import graph_of

        if traces is not None and isinstance(self.network, Workload):
            return traces.trace(self.network, target=device)
        graph = graph_of(self.network, device, **self.options)
        self.params.refuse_unread()
        return graph


class ReadParams(dict[str, Any]):
    """Hyperparameters that note which of them are read."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self._read: set[str] = set()
        """Names that were asked for, whether they are there or not."""

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._read.add(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().setdefault(name, default)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:  # whoever copies it, or unpacks it with **, may read all of it
        self._read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self._read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        self._read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        self._read.update(super().keys())
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def unread(self) -> list[str]:
        """Names that nothing has read."""
        return [name for name in dict.keys(self) if name not in self._read]

    def refuse_unread(self) -> None:
        """Raise for a name that nothing has read.

        Raises:
            ConfigurationError: with the nearest name that was read.
        """
        unread = self.unread()
        if not unread:
            return
        name, reads = unread[0], sorted(self._read)
        word = "--batch-size" if name == "batch_size" else f"--set {name}"
        known = f"It reads: {', '.join(reads)}." if reads else "It reads none."
        raise ConfigurationError(f"{word} has no effect: build never reads params[{name!r}]{did_you_mean(name, reads)}. {known}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion in brackets, the nearest of ``known``. Empty: none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The words that name a network and how it is run."""
    command.add_argument("source", metavar="FILE.py:BUILD|FILE.onnx", help="function build(params) -> Workload, or an ONNX file")
    command.add_argument("--batch-size", type=int, help="batch size of an ONNX file; build gets it as params['batch_size']")
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another hyperparameter; repeatable")
    command.add_argument("--dim", action="append", default=[], metavar="NAME=8", help="another size of an ONNX file; repeatable")
    command.add_argument("--mode", choices=get_args(Mode), help="replaces the workload's own mode; an ONNX file has only infer")
    command.add_argument(
        "--precision", type=_precision, choices=get_args(Precision), help="replaces the precision of the workload or the file"
    )
    command.add_argument(
        "--tf32",
        choices=get_args(Tf32),
        help="TF32 for fp32: default as in PyTorch (not in matrix products), on, or off; replaces the workload's own",
    )
    command.add_argument("--steps", type=int, help="steps of the whole trial, to predict its time")


def _precision(text: str) -> str:
    if text == "tf32":
        raise argparse.ArgumentTypeError("TF32 is a way to compute fp32: give --precision fp32 --tf32 on.")
    return text


def is_onnx(arguments: argparse.Namespace) -> bool:
    """Whether the network is an ONNX file."""
    return bool(arguments.source.lower().endswith(".onnx"))


def check_subject(arguments: argparse.Namespace) -> None:
    """Check the words of :func:`add_arguments`, without importing torch.

    Raises:
        ConfigurationError: for a file that is not there, or a word that cannot be right.
    """
    for word, value in (("--batch-size", arguments.batch_size), ("--steps", arguments.steps)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{word} must be at least 1, but got {value}.")
    if is_onnx(arguments):
        if arguments.set:
            raise ConfigurationError("--set is for FILE.py:BUILD; an ONNX file takes --batch-size and --dim.")
        if arguments.mode == "train":
            raise ConfigurationError("--mode train is for FILE.py:BUILD: an ONNX file has only the forward pass.")
        dict(map(_dimension, arguments.dim))
        _check_file(arguments.source)
        return
    if arguments.dim:
        raise ConfigurationError("--dim is for ONNX files; give hyperparameters with --set.")
    dict(map(parameter, arguments.set))
    path, _ = _path_and_name(arguments.source)
    _check_file(path)


def subject_of(
    arguments: argparse.Namespace, *, build: Build | None = None, settings: Mapping[str, Any] | None = None
) -> Subject:
    """Return the network or workload that a command's words name. Call :func:`check_subject` before.

    Args:
        arguments: the words.
        build: the function of the user's file. None: it is imported.
        settings: further hyperparameters, or sizes of an ONNX file.

    Raises:
        PerfGuardError: for a file or a function that cannot be right.
    """
    settings = dict(settings or {})
    if arguments.batch_size is not None:
        settings = {"batch_size": arguments.batch_size, **settings}
    if is_onnx(arguments):
        options = {
            "mode": arguments.mode,
            "precision": arguments.precision,
            "tf32": arguments.tf32,
            "batch_size": settings.pop("batch_size", None),
            "dims": dict(map(_dimension, arguments.dim)) | settings,
        }
        return Subject(arguments.source, arguments.steps, options, ReadParams({}))
    params = ReadParams(dict(map(parameter, arguments.set)) | settings)
    workload = _workload(build or load_build(arguments.source), params)
    changes = {name: value for name in ("mode", "precision", "tf32", "steps") if (value := getattr(arguments, name)) is not None}
    workload = dataclasses.replace(workload, **changes)
    return Subject(workload, workload.steps, {}, params)


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        raise ConfigurationError(f"There is no file {path!r}.")


def _dimension(text: str) -> tuple[str, int | tuple[int, ...]]:
    """Parse "batch=8" or "input=8x3x224x224"."""
    name, separator, value = text.rpartition("=")
    parts = value.lower().split("x")
    if not separator or not name or not all(part.isdecimal() for part in parts):
        raise ConfigurationError(f"--dim must look like NAME=8 or INPUT=8x3x224x224, but got {text!r}.")
    sizes = tuple(map(int, parts))
    return name, sizes[0] if len(sizes) == 1 else sizes


def _workload(build: Build, params: ReadParams) -> Workload:
    try:
        return build_workload(build, params)
    except KeyError as error:
        if not is_missing_parameter(error, params):
            raise
        name = error.args[0]
        near = difflib.get_close_matches(name, params.unread(), n=1)
        instead = f" instead of --set {near[0]}, which build never reads" if near else ""
        raise ConfigurationError(f"build needs the hyperparameter {name!r}: add --set {name}=VALUE{instead}.") from error


def _path_and_name(source: str) -> tuple[str, str]:
    path, separator, name = source.rpartition(":")
    if not separator or Path(path).suffix != ".py":
        raise ConfigurationError(
            f"Expected FILE.py:BUILD, for instance examples/models.py:resnet, or FILE.onnx, but got {source!r}."
        )
    return path, name


def load_build(source: str) -> Build:
    """Import the file of ``source``, and return its function.

    Raises:
        BuildError: if the file cannot be imported.
        ConfigurationError: if it has no such function.
    """
    path_text, name = _path_and_name(source)
    path = Path(path_text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BuildError(f"{path_text} cannot be imported: {type(error).__name__}: {error}") from error
    build = getattr(module, name, None)
    if not callable(build):
        own = sorted(key for key, value in vars(module).items() if _is_own_function(value, module.__name__))
        raise ConfigurationError(
            f"{path_text} has no function {name!r}{did_you_mean(name, own)}. Its functions: {', '.join(own) or 'none'}."
        )
    return build  # type: ignore[no-any-return]


def _is_own_function(value: Any, module_name: str) -> bool:
    return callable(value) and not isinstance(value, type) and getattr(value, "__module__", None) == module_name


def parameter(text: str) -> tuple[str, Any]:
    """Parse "width=32" of --set: a name, and a literal of Python or a word.

    Raises:
        ConfigurationError: if it has another form.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigurationError(f"--set must look like NAME=VALUE, but got {text!r}.")
    return name, literal(value)


def literal(text: str) -> Any:
    """A literal of Python, or else the text itself, for instance a plain word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

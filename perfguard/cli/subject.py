"""The subject of a command: a training script, an ONNX file, or the workload that a function of the user's file builds.

The words are checked before anything is imported that takes long, so that a slip is answered at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import importlib.util
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from perfguard.cli.script import capture_script
from perfguard.exceptions import BuildError, ConfigurationError, WorkloadError
from perfguard.verdict import NOT_SEALED
from perfguard.workload import (
    Build,
    Mode,
    Precision,
    Tf32,
    WatchedParams,
    Workload,
    build_workload,
    did_you_mean,
    is_missing_parameter,
)

if TYPE_CHECKING:
    from perfguard.cli.guards import Forecaster
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.predictor import Estimate, Prediction
    from perfguard.workload import HostMemory


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that name a network and how it is run."""
    parser.epilog = f"A script's own words follow --: {parser.prog} train.py -- --batch-size 64"
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "source",
        nargs="?",
        metavar="FILE.py|FILE.py:BUILD|FILE.onnx",
        help="training script, function build(params) -> Workload, or an ONNX file",
    )
    subject.add_argument("-m", dest="module", metavar="PACKAGE.MODULE", help="a script that is a module, as for python -m")
    parser.add_argument(
        "--batch-size", type=whole_number, metavar="N", help="batch of an ONNX file; build gets it as params['batch_size']"
    )
    parser.add_argument(
        "--set", type=parameter, action="append", default=[], metavar="NAME=VALUE", help="another hyperparameter; repeatable"
    )
    parser.add_argument(
        "--dim", type=dimension, action="append", default=[], metavar="NAME=8", help="another size of an ONNX file; repeatable"
    )
    parser.add_argument("--mode", choices=get_args(Mode), help="replaces the workload's own mode; an ONNX file has only infer")
    parser.add_argument(
        "--precision", type=_precision, choices=get_args(Precision), help="replaces the precision of the workload or the file"
    )
    parser.add_argument(
        "--tf32",
        choices=get_args(Tf32),
        help="TF32 for fp32: default as in PyTorch (not in matrix products), on, or off; replaces the workload's own",
    )
    parser.add_argument(
        "--world-size",
        type=whole_number,
        metavar="N",
        help="processes that torchrun would start; the first is dry-run",
    )
    add_network_argument(parser)
    parser.add_argument(
        "--dry-run-network",
        action="store_true",
        help="leave the network open in the dry run of a script, for data that are read from far",
    )
    parser.add_argument("--steps", type=whole_number, metavar="N", help="steps of the whole trial, to predict its time")


def add_records_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words for where the records of trials are."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="STUDY|LOG",
        help="the storage of an Optuna study (file or URL), or a measurement log (default: PERFGUARD_LOG, else your own log)",
    )
    parser.add_argument("--study", metavar="NAME", help="the study's name, if there are several")


def add_network_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--network``."""
    parser.add_argument(
        "--network", type=float, metavar="GB/S", help="between nodes, in one direction, divided by the GPUs of a node"
    )


def in_network(device: Device, arguments: argparse.Namespace) -> Device:
    """Return ``device`` in nodes that the network of ``--network`` joins."""
    return device if arguments.network is None else device.with_network(1e9 * arguments.network)


def whole_number(text: str) -> int:
    """Parse "32", or "32.0" as a table writes it."""
    value = _literal(text)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, but got {text!r}")
    return number


def chance(text: str) -> float:
    """Parse "0.05" or "5%"."""
    number = text.strip().removesuffix("%")
    try:
        return float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a chance such as 0.05 or 5%, but got {text!r}") from None


def parameter(text: str) -> tuple[str, Any]:
    """Parse "width=32" of --set: a name, and a literal of Python or a plain word."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"must look like NAME=VALUE, but got {text!r}")
    return name, whole_number(value) if name == "batch_size" else _literal(value)  # as --batch-size reads it


def dimension(text: str) -> tuple[str, int | tuple[int, ...]]:
    """Parse "batch=8" or "input=8x3x224x224" of --dim."""
    name, separator, value = text.rpartition("=")
    parts = value.lower().split("x")
    if not separator or not name or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must look like NAME=8 or INPUT=8x3x224x224, but got {text!r}")
    sizes = tuple(map(int, parts))
    return name, sizes[0] if len(sizes) == 1 else sizes


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _precision(text: str) -> str:
    if text == "tf32":
        raise argparse.ArgumentTypeError("TF32 is a way to compute fp32: give --precision fp32 --tf32 on.")
    return text


def is_onnx(arguments: argparse.Namespace) -> bool:
    """Whether the network is an ONNX file."""
    return bool(arguments.source.lower().endswith(".onnx"))


def is_script(arguments: argparse.Namespace) -> bool:
    """Whether it is a training script, which is dry-run."""
    return bool(arguments.module or Path(arguments.source).suffix == ".py")


def check_subject(arguments: argparse.Namespace) -> None:
    """Check the words of :func:`add_subject_arguments` together, without importing torch."""
    if arguments.module:
        arguments.source = f"-m {arguments.module}"
    if is_script(arguments):
        path = arguments.source
        for name in ("batch_size", "set", "dim", "mode", "precision", "tf32"):
            if getattr(arguments, name):
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} is not for scripts. The script's own words follow --: {path} -- --batch-size 64."
                )
    elif arguments.world_size or arguments.dry_run_network:
        option = "--world-size" if arguments.world_size else "--dry-run-network"
        raise ConfigurationError(f"{option} is for a script, such as train.py, but got {arguments.source!r}.")
    elif arguments.words:
        raise ConfigurationError(f"-- is for a script, such as train.py, but got {arguments.source!r}.")
    elif is_onnx(arguments):
        path = arguments.source
        if arguments.set:
            raise ConfigurationError("--set is for FILE.py:BUILD; an ONNX file takes --batch-size and --dim.")
        if arguments.mode == "train":
            raise ConfigurationError("--mode train is for FILE.py:BUILD: an ONNX file has only the forward pass.")
    else:
        path, separator, _ = arguments.source.rpartition(":")
        if arguments.dim:
            raise ConfigurationError("--dim is for ONNX files; give hyperparameters with --set.")
        if not separator or Path(path).suffix != ".py":
            raise ConfigurationError(
                "Expected FILE.py:BUILD, for instance examples/models.py:resnet, a script FILE.py, or FILE.onnx, but got "
                f"{arguments.source!r}."
            )
    if arguments.module:
        package = arguments.module.partition(".")[0]
        if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:  # to find what is in it would import it
            raise ConfigurationError(f"There is no module or package {package!r}.")
    elif not Path(path).is_file():
        raise ConfigurationError(f"There is no file {path!r}.")


def check_page(option: str, path: str) -> None:
    """Refuse the name of a page that a browser would not take for one."""
    if Path(path).suffix != ".html":
        raise ConfigurationError(f"{option} writes a page, so its name ends in .html, but got {path!r}.")


class Work(NamedTuple):
    """What a subject runs on one device."""

    graph: OpGraph
    """One step of training, or one batch of inference."""
    steps: int | None
    """Steps of the whole trial. None: unknown."""
    notes: Sequence[str] = ()
    """What the prediction takes for granted, a sentence each."""
    steps_per_epoch: int | None = None
    """None: unknown."""
    phases: Mapping[str, OpGraph] = MappingProxyType({})
    """Other phases, of which only the memory counts: those of a :class:`perfguard.workload.CapturedTrial`."""
    host_memory: HostMemory | None = None
    """What a script holds in the memory of the host. None: it is none."""
    dry_run_s: Mapping[str, float] = MappingProxyType({})
    """Seconds of the dry run of a script, by part (:mod:`perfguard.capture.stopwatch`)."""

    def predict(self, forecaster: Forecaster) -> tuple[Prediction, dict[str, Estimate]]:
        """Return the prediction that a trial would get, and the peak memory of each phase, largest first."""
        step = forecaster.predict(self.graph, steps=self.steps)
        found = {"a training step": step} | {name: forecaster.predict(phase) for name, phase in self.phases.items()}
        order = sorted(found, key=lambda name: -found[name].peak_memory.median)
        return step.with_memory_of(found[order[0]], phase=order[0]), {name: found[name].peak_memory for name in order}


def subject_of(arguments: argparse.Namespace) -> Callable[[Device], Work]:
    """Return what the script, file or workload that a command's words name runs, as a function of the device.

    Call :func:`check_subject` before.
    """
    from perfguard.predictor import graph_of

    if is_script(arguments):
        return functools.partial(_work_of_script, arguments)
    if is_onnx(arguments):
        options = {name: getattr(arguments, name) for name in ("mode", "precision", "tf32", "batch_size")}
        options["dims"] = dict(arguments.dim)
        return lambda device: Work(graph_of(arguments.source, device, **options), arguments.steps)
    batch = {} if arguments.batch_size is None else {"batch_size": arguments.batch_size}
    params = WatchedParams(dict(arguments.set) | batch)
    workload = _built(load_build(arguments.source), params)
    changes = {name: value for name in ("mode", "precision", "tf32", "steps") if (value := getattr(arguments, name)) is not None}
    workload = dataclasses.replace(workload, **changes)

    def work_on(device: Device) -> Work:
        graph = graph_of(workload, device)
        _refuse_unread(params)  # now, because the loss may read some
        return Work(graph, workload.steps, _notes(workload), workload.steps_per_epoch)

    return work_on


def _work_of_script(arguments: argparse.Namespace, device: Device) -> Work:
    seen = capture_script(
        arguments.source,
        arguments.words,
        device,
        world_size=arguments.world_size,
        network=arguments.dry_run_network,
    )
    notes = [f"The dry run did not come to the script's end: {seen.unseen}."] if seen.unseen else []
    steps = arguments.steps or seen.steps
    notes += [NOT_SEALED] if seen.source.endswith("not sealed") else []
    notes += ["The number of steps is unknown, so there is no time of the trial. Give --steps."] if steps is None else []
    return Work(seen.graph, steps, notes, seen.steps_per_epoch, seen.phases, seen.host_memory, seen.seconds)


def _notes(workload: Workload) -> list[str]:
    notes = []
    if workload.mode == "train" and workload.optimizer is None and workload.step is None:
        notes.append(
            "The workload names no optimizer. Plain SGD is assumed, which keeps no state; AdamW keeps twice the parameters."
        )
    return notes


def load_build(source: str) -> Build:
    """Import the file of "FILE.py:BUILD", and return its function."""
    path, _, name = source.rpartition(":")
    module_name = Path(path).stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BuildError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    build = getattr(module, name, None)
    if not callable(build):
        own = [
            key
            for key, value in sorted(vars(module).items())
            if callable(value) and not isinstance(value, type) and getattr(value, "__module__", None) == module_name
        ]
        raise ConfigurationError(
            f"{path} has no function {name!r}{did_you_mean(name, own, cutoff=0.6)}. Its functions: {', '.join(own) or 'none'}."
        )
    return build  # type: ignore[no-any-return]


def _built(build: Build, params: WatchedParams) -> Workload:
    try:
        return build_workload(build, params)
    except KeyError as error:
        if not is_missing_parameter(error, params):
            raise
        name = error.args[0]
        near = difflib.get_close_matches(name, _unread(params), n=1)
        instead = f" instead of --set {near[0]}, which build never reads" if near else ""
        raise ConfigurationError(f"build needs the hyperparameter {name!r}: add --set {name}=VALUE{instead}.") from error
    except WorkloadError as error:
        # A word where a number is meant is wrong usage, and not a step that cannot be predicted: a script must not go on.
        words = [f"--set {name}={value}" for name, value in params.used.items() if isinstance(value, str)]
        if words and (type(error) is WorkloadError or isinstance(error.__cause__, (TypeError, ValueError))):
            raise ConfigurationError(f"{error} Is {' and '.join(words)} right?") from error
        raise


def _refuse_unread(params: WatchedParams) -> None:
    """Raise for a name that nothing has read, so that a typo cannot give the answer for another network."""
    reads = sorted(params.used.keys() | params.missing)
    for name in _unread(params):
        word = "--batch-size" if name == "batch_size" else f"--set {name}"
        known = f"It reads: {', '.join(reads)}." if reads else "It reads none."
        near = did_you_mean(name, reads, cutoff=0.6)
        raise ConfigurationError(f"{word} has no effect: build never reads params[{name!r}]{near}. {known}")


def _unread(params: WatchedParams) -> list[str]:
    return [name for name in params.given if name not in params.used]

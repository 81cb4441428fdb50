"""``perfguard check``: whether a workload fits its limits, for scripts and CI."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from perfguard.budget import Budget, Limit
from perfguard.cli._budget import budget_of, estimate_as_json, options_named
from perfguard.cli._matrix import combinations, words_of
from perfguard.cli._subject import Subject, check_subject, is_onnx, load_build, parameter, subject_of
from perfguard.cli._subject import add_arguments as add_subject_arguments
from perfguard.devices import Device, resolve_device
from perfguard.exceptions import ConfigurationError, PerfGuardError, TableError
from perfguard.predictor import Prediction, load_predictor
from perfguard.verdict import DEFAULT_RISK, Verdict, check_risk

if TYPE_CHECKING:
    from perfguard.workload import Build

Result = Literal["fits", "does not fit", "cannot tell"]
EXIT_STATUS: Mapping[Result, int] = {"fits": 0, "does not fit": 1, "cannot tell": 3}
WRONG_USAGE = 2


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of one workload on one device."""

    result: Result
    reason: str
    device: Device
    settings: Mapping[str, Any]
    """Values of the matrix. Empty: there is none."""
    limits: tuple[Limit, ...] = ()
    """Empty: nothing was predicted."""
    prediction: Prediction | None = field(default=None, repr=False)

    @property
    def line(self) -> str:
        """The result as one line for people."""
        where = words_of(self.settings) or self.device.name
        return " ".join(f"{self.result}: {where}: {self.reason}".split())

    def as_json(self) -> dict[str, Any]:
        """The result as data, in bytes, seconds and dollars."""
        prediction = self.prediction
        return {
            "result": self.result,
            "exit_status": EXIT_STATUS[self.result],
            "reason": self.reason,
            "gpu": self.device.id,
            "settings": dict(self.settings),
            "p_exceeded": max((limit.p_violation for limit in self.limits), default=None),
            "limits": [_limit_as_json(limit) for limit in self.limits],
            "predictor": None if prediction is None else prediction.predictor,
            "trained_on_device": None if prediction is None else prediction.trained_on_device,
            "unmodelled": [] if prediction is None else list(prediction.unmodelled),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard check`` takes."""
    parser.description = "Exit status: 0 it fits, 1 it does not, 3 cannot tell, 2 wrong usage."
    add_subject_arguments(parser)
    parser.add_argument("--gpu", default="auto", help='a name from `perfguard gpus`, "auto" or "cpu" (default: auto)')
    parser.add_argument("--max-memory", metavar="38GiB|0.9", help="peak memory, or a share of the device's (default: all of it)")
    parser.add_argument("--max-step-time", metavar="250ms", help="time of one step, or of one batch of inference")
    parser.add_argument("--max-trial-time", metavar="2h", help="time of all steps; needs --steps or Workload(steps=...)")
    parser.add_argument("--max-cost", metavar="$2", help="cost of all steps; needs their number and --price-per-hour")
    parser.add_argument("--price-per-hour", metavar="2.5", help="dollars of an hour on the device, for --max-cost")
    parser.add_argument(
        "--risk",
        type=float,
        default=DEFAULT_RISK,
        help=f"largest accepted chance to exceed a limit; does not fit from 1 - RISK on (default: {DEFAULT_RISK})",
    )
    parser.add_argument(
        "--matrix",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUES",
        help='check every combination, for instance "batch_size=16..512:x2" "gpu=a100,h100"',
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def check(arguments: argparse.Namespace) -> int:
    """Predict, compare with the limits, print the result, and return the exit status.

    The status of a matrix is 1 if one of its combinations does not fit, else 3 if one cannot be told, else 0.
    """
    try:
        check_subject(arguments)
        budget, risk = budget_of(arguments), check_risk(arguments.risk)
        results = list(_checked(arguments, _cells(arguments, budget), budget, risk))
    except (ConfigurationError, TableError) as error:
        print(f"perfguard: {error}", file=sys.stderr)
        return WRONG_USAGE
    except Exception as error:  # Python's own exit status would be that of what does not fit
        reason, status = _reason(error), EXIT_STATUS["cannot tell"]
        print(f"perfguard: cannot tell: {reason}", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"result": "cannot tell", "exit_status": status, "reason": reason}, indent=2))
        return status
    found = {checked.result for checked in results}
    status = next(EXIT_STATUS[result] for result in ("does not fit", "cannot tell", "fits") if result in found)
    if arguments.json:
        data = [checked.as_json() for checked in results]
        print(json.dumps({"exit_status": status, "results": data} if arguments.matrix else data[0], indent=2))
    else:
        for checked in results:
            print(checked.line)
    return status


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}"


def _cells(arguments: argparse.Namespace, budget: Budget) -> list[tuple[dict[str, Any], Device]]:
    """The settings and the device of each combination of the matrix."""
    cells = []
    given = {name for name, _ in map(parameter, arguments.set)} | ({"batch_size"} if arguments.batch_size is not None else set())
    given |= {"gpu"} if arguments.gpu != "auto" else set()
    devices: dict[str, Device] = {}
    for settings in combinations(arguments.matrix) if arguments.matrix else [{}]:
        twice = given.intersection(settings)
        if twice:
            raise ConfigurationError(f"{min(twice)!r} is in --matrix and given beside it. Leave one of the two out.")
        gpu = str(settings.get("gpu", arguments.gpu))
        if gpu not in devices:
            devices[gpu] = resolve_device(gpu)
            with options_named():
                budget.check_device(devices[gpu])
        cells.append((settings, devices[gpu]))
    return cells


def _checked(
    arguments: argparse.Namespace, cells: list[tuple[dict[str, Any], Device]], budget: Budget, risk: float
) -> Iterator[Checked]:
    """The result of each of ``cells``, with a progress bar on a terminal."""
    from perfguard.cli._judging import SubjectJudge
    from perfguard.graph import TraceCache

    build = None if is_onnx(arguments) else load_build(arguments.source)
    predictor, traces = load_predictor(), TraceCache()
    knows_names = False
    for settings, device in _with_progress(cells):
        make_subject = functools.partial(_subject, arguments, build, settings, needs_steps=_needs_steps(budget))
        judge = SubjectJudge(device, budget, risk=risk, predictor=predictor)
        try:
            # A reused trace reads nothing. All cells have the same names, so the first trace shows which are read.
            verdict = judge.judge(make_subject, traces if knows_names else None)
            knows_names = knows_names or not _is_bound(verdict)
            yield _as_checked(verdict, risk, device, settings)
        except ConfigurationError:
            raise
        except Exception as error:  # whatever it is: an exit status of 1 would mean that it does not fit
            yield Checked("cannot tell", _reason(error), device, settings)


def _with_progress(cells: list[tuple[dict[str, Any], Device]]) -> Iterable[tuple[dict[str, Any], Device]]:
    if len(cells) == 1 or not sys.stderr.isatty():
        return cells
    from rich.console import Console
    from rich.progress import track

    return track(cells, "checking", console=Console(stderr=True), transient=True)


def _subject(arguments: argparse.Namespace, build: Build | None, settings: Mapping[str, Any], *, needs_steps: str) -> Subject:
    hyperparameters = {name: value for name, value in settings.items() if name != "gpu"}
    subject = subject_of(arguments, build=build, settings=hyperparameters)
    if needs_steps and subject.steps is None:
        raise ConfigurationError(
            f"{needs_steps} needs the number of steps of a trial. Give --steps, or Workload(..., steps=...)."
        )
    return subject


def _needs_steps(budget: Budget) -> str:
    """The option that limits the whole trial. Empty: none does."""
    if budget.trial_time_s is not None:
        return "--max-trial-time"
    return "" if budget.cost is None else "--max-cost"


def _as_checked(verdict: Verdict, risk: float, device: Device, settings: Mapping[str, Any]) -> Checked:
    prediction, limits = verdict.prediction, verdict.limits
    if verdict.action == "launch":
        return Checked("fits", "; ".join(limit.sentence for limit in limits), device, settings, limits, prediction)
    if _is_bound(verdict):
        return Checked("does not fit", verdict.reason, device, settings, limits, prediction)
    worst = max(limits, key=lambda limit: limit.p_violation)
    result: Result = "does not fit" if worst.p_violation >= 1 - risk else "cannot tell"
    reason = f"{worst.sentence}, exceeded with a chance of {worst.p_violation:.1%}"
    return Checked(result, reason, device, settings, limits, prediction)


def _is_bound(verdict: Verdict) -> bool:
    """Whether the least memory alone gave the verdict; then the workload may not have been traced."""
    from perfguard.physics import NAME

    return verdict.prediction is not None and verdict.prediction.predictor == NAME


def _limit_as_json(limit: Limit) -> dict[str, Any]:
    found: dict[str, Any] = {"quantity": limit.quantity, "limit": limit.limit}
    return found | (estimate_as_json(limit.estimate) or {}) | {"p_exceeded": limit.p_violation}

"""``perfguard check``: whether a workload fits its limits, as an exit status for scripts and CI."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from perfguard import explain
from perfguard.budget import Budget
from perfguard.cli.guards import add_log_argument, guard_for, notes_of
from perfguard.cli.predict import alias_notes, estimate_as_json, print_tables
from perfguard.cli.subject import add_subject_arguments, chance, check_subject, in_network, is_script, subject_of
from perfguard.devices import resolve_device
from perfguard.exceptions import ConfigurationError, PerfGuardError, TooLargeError
from perfguard.risk_budget import SMALL_CHANCE
from perfguard.verdict import check_chance

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.verdict import Verdict

Result = Literal["fits", "does not fit", "cannot tell"]


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard check`` takes."""
    parser.description = "Exit status: 0 it fits, 1 it does not, 3 cannot tell, 2 wrong usage."
    add_subject_arguments(parser)
    parser.add_argument("--gpu", default="auto", help='a name from `perfguard gpus`, "auto" or "cpu" (default: auto)')
    parser.add_argument("--max-memory", metavar="38GiB|0.9", help="peak memory, or a share of the device's (default: all of it)")
    parser.add_argument(
        "--max-host-memory", metavar="64GiB|0.9", help="memory of the host, or a share of this machine's; a script's"
    )
    parser.add_argument("--max-step-time", metavar="250ms", help="time of one step, or of one batch of inference")
    parser.add_argument(
        "--max-trial-time", metavar="2h", help="time of all steps; needs --steps, Workload(steps=...) or a script"
    )
    parser.add_argument("--max-cost", metavar="$2", help="cost of all steps; needs their number and --price-per-hour")
    parser.add_argument("--price-per-hour", metavar="2.50", help="price of an hour on the device, for --max-cost")
    parser.add_argument(
        "--risk",
        type=chance,
        metavar="0.05|5%",
        default=SMALL_CHANCE,
        help=f"largest accepted chance to exceed a limit; does not fit from 1 - risk on (default: {SMALL_CHANCE})",
    )
    add_log_argument(parser)
    parser.add_argument("--explain", action="store_true", help="show how each number came to be, stage by stage")
    parser.add_argument("--json", action="store_true", help="print JSON")


def check(arguments: argparse.Namespace) -> int:
    """Predict, compare with the limits, print the result, and return the exit status: 0, 1 or 3."""
    check_subject(arguments)
    risk = check_chance(arguments.risk, what="--risk")
    if arguments.max_cost is not None and arguments.price_per_hour is None:
        raise ConfigurationError("--max-cost needs the price of an hour on the device: give --price-per-hour.")
    budget = budget_of(
        memory_budget=arguments.max_memory,
        host_memory_budget=arguments.max_host_memory,
        step_time_budget=arguments.max_step_time,
        time_budget=arguments.max_trial_time,
        cost_budget=arguments.max_cost,
        price_per_hour=arguments.price_per_hour,
    )
    device = in_network(resolve_device(arguments.gpu), arguments)
    budget.check_device(device)
    document: dict[str, Any] = {}
    verdict: Verdict | None = None
    try:
        verdict, known = _judged(arguments, device, budget, risk)
        result, reason = result_of(verdict, risk)
        if result == "fits" and known.get("steps") is None and _limit_of_trial(budget) is not None:
            result = "cannot tell"
            reason = f"{reason}. {known['notes'][-1]}"
        document = {"gpu": device.id} | known | _numbers_of(verdict)
        document["notes"] = [*alias_notes(arguments.gpu, device), *known.get("notes", ())]
        if arguments.explain:
            document["account"] = explain.as_json(verdict.predicted)
    except ConfigurationError:
        raise
    except Exception as error:  # Python's own exit status would be 1, which means that it does not fit
        result = "cannot tell"
        reason = str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}"
    status = {"fits": 0, "does not fit": 1, "cannot tell": 3}[result]
    if arguments.json:
        print(json.dumps({"result": result, "exit_status": status, "reason": reason} | document, indent=2))
    else:
        print(" ".join(f"{result}: {device.name}: {reason}".split()))
        for note in document.get("notes", ()):
            print(note, file=sys.stderr)
        if arguments.explain and verdict is not None:
            print_tables(explain.tables_of(verdict.predicted, limits={limit.quantity: limit.limit for limit in verdict.limits}))
    return status


def budget_of(**budgets: Any) -> Budget:
    """Return the budget that the texts of ``--max-memory`` and the other options of its kind give."""
    for name in ("memory_budget", "host_memory_budget"):
        with suppress(TypeError, ValueError):  # it has a unit, or is not given
            budgets[name] = float(budgets.get(name) or "none")
    try:
        return Budget.parse(**budgets)
    except ConfigurationError as error:
        message = str(error)
        for name, option in (  # the names of the budgets in Python, and the options that set them here
            ("step_time_budget", "--max-step-time"), ("time_budget", "--max-trial-time"),
            ("host_memory_budget", "--max-host-memory"), ("memory_budget", "--max-memory"),
            ("cost_budget", "--max-cost"), ("price_per_hour", "--price-per-hour"),
        ):  # fmt: skip
            message = message.replace(name, option)
        raise ConfigurationError(message) from error


def _judged(arguments: argparse.Namespace, device: Device, budget: Budget, risk: float) -> tuple[Verdict, dict[str, Any]]:
    """The guard's verdict, without a risk budget, and what is known of what was judged."""
    from perfguard.physics import LeastMemory

    guard = guard_for(device, log=arguments.log)
    limits = functools.partial(budget.limits, device=device)
    guard.budget = budget
    if arguments.max_host_memory is not None and not is_script(arguments):
        raise ConfigurationError("--max-host-memory is for a script, such as train.py: only a dry run shows what the host holds.")
    try:
        work = subject_of(arguments)(device)
    except TooLargeError as error:  # a workload that is too large to be built is a verdict, too
        least = LeastMemory.behind(error, device)
        return guard.judge(least, limits, threshold=risk), {}
    limit = _limit_of_trial(budget)
    if limit is not None and work.steps is None and not is_script(arguments):
        raise ConfigurationError(f"{limit} needs the number of steps of a trial. Give --steps, or Workload(..., steps=...).")
    limits = functools.partial(limits, host_memory=work.host_memory)
    verdict = guard.judge(work.graph, limits, threshold=risk, steps=work.steps, phases=work.phases)
    return verdict, {
        "notes": [*notes_of(guard, device), *work.notes],
        "steps": work.steps,
        "steps_per_epoch": work.steps_per_epoch,
    }


def _limit_of_trial(budget: Budget) -> str | None:
    """The option that limits the whole trial, which needs its steps. None: none does."""
    return "--max-trial-time" if "time" in budget.most else "--max-cost" if "cost" in budget.most else None


def result_of(verdict: Verdict, risk: float) -> tuple[Result, str]:
    """Return the result, and why."""
    if verdict.action == "launch":
        phase = [f"most memory is needed by {verdict.phase}"] if verdict.phase else []
        return "fits", "; ".join([limit.sentence for limit in verdict.limits] + phase)
    if verdict.bound or verdict.p_violation >= 1 - risk:
        return "does not fit", verdict.reason
    return "cannot tell", verdict.reason


def _numbers_of(verdict: Verdict) -> dict[str, Any]:
    """The verdict's numbers, in bytes, seconds and dollars."""
    prediction = verdict.prediction
    limits = [
        {"quantity": limit.quantity, "limit": limit.limit}
        | (estimate_as_json(limit.estimate) or {})
        | {"p_exceeded": limit.p_violation}
        for limit in verdict.limits
    ]
    return {
        "phase": verdict.phase,
        "p_exceeded": max((limit.p_violation for limit in verdict.limits), default=None),
        "limits": limits,
        "predictor": None if prediction is None else prediction.predictor,
        "trained_on_device": None if prediction is None else prediction.trained_on_device,
        "unmodelled": [] if prediction is None else [gap.sentence for gap in prediction.unmodelled],
        "unmodelled_codes": [] if prediction is None else [gap.code for gap in prediction.unmodelled],
    }

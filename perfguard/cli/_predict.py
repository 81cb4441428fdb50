"""``perfguard predict``: what one workload costs on a device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfguard.budget import NOUNS, Limit
from perfguard.cli._budget import budget_of, estimate_as_json
from perfguard.cli._explain import as_json, operator_times_s, print_account, print_details
from perfguard.cli._subject import Subject, check_subject, is_onnx, subject_of
from perfguard.cli._subject import add_arguments as add_subject_arguments
from perfguard.devices import Device, mig_instance, mig_profile, mps_share, resolve_device, smallest_profile
from perfguard.exceptions import ConfigurationError
from perfguard.predictor import TARGETS, Prediction, Predictor, load_predictor
from perfguard.quantities import format_bytes, format_dollars, format_joules, format_seconds, parse_dollars

if TYPE_CHECKING:
    from rich.table import Table

    from perfguard.graph import OpGraph
    from perfguard.measure import Measurement

MIG_QUANTILE = 0.95
"""A MIG instance fits if this quantile of the peak memory does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard predict`` takes."""
    add_subject_arguments(parser)
    parser.add_argument("--gpu", default="auto", help='a name from `perfguard gpus`, "auto" or "cpu" (default: auto)')
    parser.add_argument("--mig", metavar="auto|PROFILE", help="predict for the smallest MIG profile that fits, or for this one")
    parser.add_argument("--mps", type=float, metavar="SHARE", help="predict with a share of the multiprocessors, between 0 and 1")
    parser.add_argument("--max-memory", metavar="38GiB|0.9", help="a budget to compare with and to draw")
    parser.add_argument("--max-step-time", metavar="250ms", help="a budget to compare with and to draw")
    parser.add_argument("--price-per-hour", metavar="2.5", help="dollars of an hour on the device: adds the cost of all steps")
    parser.add_argument("--explain", action="store_true", help="show bytes and time by module and operator")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the memory over the time of the step")
    parser.add_argument("--measure", action="store_true", help="also run an ONNX file on the CPU, with ONNX Runtime")
    parser.add_argument("--json", action="store_true", help="print JSON")


def show_prediction(arguments: argparse.Namespace) -> None:
    """Build or read, predict and print.

    Raises:
        PerfGuardError: for a file, a function, a parameter or a GPU that cannot be right.
    """
    check_subject(arguments)
    budget = budget_of(arguments)
    price = None if arguments.price_per_hour is None else parse_dollars(arguments.price_per_hour, what="--price-per-hour")
    whole = resolve_device(arguments.gpu)
    device = _part_of(whole, arguments)
    budget.check_device(device)
    if arguments.measure and (whole.kind != "cpu" or not is_onnx(arguments)):
        raise ConfigurationError(
            "--measure runs an ONNX file on this machine's CPU: give FILE.onnx and --gpu cpu. "
            "Modules are measured where they run, see perfguard.measure.Run."
        )
    subject = subject_of(arguments)
    predictor = load_predictor()
    graph = subject.graph_on(device)
    prediction = predictor.predict(graph, device, steps=subject.steps)
    mig = None
    if arguments.mig == "auto":
        mig = _smallest_instance(whole, graph, prediction, predictor)
    measured = _measured(subject) if arguments.measure else None
    limits = [limit for limit in budget.limits(prediction, device) if getattr(arguments, f"max_{limit.quantity}") is not None]
    op_time_s = operator_times_s(predictor, prediction, graph, device)
    if arguments.json:
        extra: dict[str, Any] = {} if mig is None else {"mig": mig}
        if measured is not None:
            extra["measured"] = {"step_time_s": measured.step_time_s, "peak_memory_bytes": measured.peak_memory_bytes}
        if limits:
            found = [{"quantity": one.quantity, "limit": one.limit, "p_exceeded": one.p_violation} for one in limits]
            extra["limits"] = found
        if arguments.explain:
            extra["explain"] = as_json(prediction, op_time_s, graph, device)
        print(json.dumps(_as_json(prediction, device, graph, arguments.batch_size, price) | extra, indent=2))
    else:
        _print(prediction, device, graph, arguments.batch_size, mig, measured, limits, price)
        if arguments.explain:
            from rich.console import Console

            print_details(Console(), prediction, op_time_s, graph, device)
    if arguments.plot:
        from perfguard.cli._timeline import draw_timeline

        draw_timeline(arguments.plot, graph, device, prediction, op_time_s, limits)
        print(f"memory over the step: {arguments.plot}", file=sys.stderr)


def _measured(subject: Subject) -> Measurement:
    from perfguard.onnx import measure_onnx

    assert isinstance(subject.network, str)
    return measure_onnx(subject.network, batch_size=subject.options["batch_size"], dims=subject.options["dims"])


def _part_of(device: Device, arguments: argparse.Namespace) -> Device:
    """The requested MIG instance or MPS share."""
    if arguments.mps is not None:
        if arguments.mig is not None:
            raise ConfigurationError("--mig and --mps exclude each other.")
        return mps_share(device, arguments.mps)
    if arguments.mig in (None, "auto"):
        return device
    return mig_instance(device, mig_profile(device, arguments.mig))


def _smallest_instance(device: Device, graph: OpGraph, prediction: Prediction, predictor: Predictor) -> dict[str, Any]:
    """The smallest MIG profile that holds the network, and how fast it runs there."""
    needed = prediction.peak_memory.quantile(MIG_QUANTILE)
    profile = smallest_profile(device, needed)
    if profile is None:
        return {"profile": None, "needed_bytes": needed}
    there = predictor.predict(graph, mig_instance(device, profile)).step_time
    return {
        "profile": profile.name,
        "needed_bytes": needed,
        "memory_bytes": profile.memory_bytes,
        "instances": profile.num_instances,
        "step_time_s": estimate_as_json(there),
    }


def _as_json(
    prediction: Prediction, device: Device, graph: OpGraph, batch_size: int | None, price_per_hour: float | None
) -> dict[str, Any]:
    from perfguard._predict import most_energy

    return {
        "gpu": device.id,
        "predictor": prediction.predictor,
        "trained_on_device": prediction.trained_on_device,
        "trained_quantities": prediction.trained_quantities,
        "peak_memory_bytes": estimate_as_json(prediction.peak_memory),
        "step_time_s": estimate_as_json(prediction.step_time),
        "total_time_s": estimate_as_json(prediction.total_time),
        "cost": estimate_as_json(None if price_per_hour is None else prediction.cost(price_per_hour)),
        "price_per_hour": price_per_hour,
        "capacity_bytes": device.memory_bytes,
        "p_oom": prediction.p_oom(device.memory_bytes),
        "throughput_per_s": None if batch_size is None else batch_size / prediction.step_time.median,
        "gpu_util": prediction.gpu_util,
        "sm_active": prediction.sm_active,
        "energy_j": estimate_as_json(prediction.energy),
        "most_energy_j": estimate_as_json(most_energy(prediction, device)),
        "flops": graph.flops,
        "memory_parts_bytes": dict(prediction.memory_parts_bytes),
        "time_parts_s": dict(prediction.time_parts_s),
        "time_by_kind_s": dict(prediction.time_by_kind_s),
        "unmodelled": list(prediction.unmodelled),
    }


def _print(
    prediction: Prediction,
    device: Device,
    graph: OpGraph,
    batch_size: int | None,
    mig: Mapping[str, Any] | None,
    measured: Measurement | None,
    limits: Sequence[Limit],
    price_per_hour: float | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    memory_low, memory_high = prediction.peak_memory.interval()
    time_low, time_high = prediction.step_time.interval()
    capacity = format_bytes(device.memory_bytes)
    table = Table(title=f"{device.name} ({device.id}), {capacity}", show_header=False)
    table.add_row(
        "peak memory",
        f"{format_bytes(prediction.peak_memory.median)}  (90%: {format_bytes(memory_low)} to {format_bytes(memory_high)})",
    )
    table.add_row("P(out of memory)", f"{prediction.p_oom(device.memory_bytes):.1%}")
    table.add_row(
        "step time" if graph.mode == "train" else "latency",
        f"{format_seconds(prediction.step_time.median)}  (90%: {format_seconds(time_low)} to {format_seconds(time_high)})",
    )
    if measured is not None and measured.step_time_s is not None:
        runs = f"median of {measured.num_steps - 1} runs, ONNX Runtime on {device.num_sms} threads"
        table.add_row("latency, measured", f"{format_seconds(measured.step_time_s)}  ({runs})")
    if prediction.total_time is not None:
        table.add_row("trial time", format_seconds(prediction.total_time.median))
        cost = None if price_per_hour is None else prediction.cost(price_per_hour)
        if cost is not None:
            low, high = map(format_dollars, cost.interval())
            table.add_row("trial cost", f"{format_dollars(cost.median)}  (90%: {low} to {high})")
    if batch_size is not None:
        table.add_row("throughput", f"{batch_size / prediction.step_time.median:,.0f} samples/s")
    _add_utilisation(table, prediction, device)
    for limit in limits:
        table.add_row(f"P({NOUNS[limit.quantity]} over {limit.format(limit.limit)})", f"{limit.p_violation:.1%}")
    if mig is not None:
        table.add_row("smallest MIG profile", _in_words(mig))
    table.add_row("work", f"{graph.flops / 1e9:,.1f} GFLOP in {len(graph.ops)} operators")
    console.print(table)
    print_account(console, prediction)
    if not prediction.trained_on_device:
        missing = [target for target in TARGETS if target not in (prediction.trained_quantities or ())]
        the = f"the {missing[0]} of " if len(missing) == 1 else ""  # the other quantity was measured
        untrained = f"{prediction.predictor} was not trained on {the}such steps on {device.name}."
        console.print(f"[yellow]{untrained} Read {'its' if the else 'the'} interval and not the median.[/]")
    for text in prediction.unmodelled:
        console.print(f"[yellow]not modelled: {text}[/]")


def _add_utilisation(table: Table, prediction: Prediction, device: Device) -> None:
    from perfguard._predict import most_energy

    for title, share in (("GPU busy", prediction.gpu_util), ("multiprocessors active", prediction.sm_active)):
        if share is not None:
            table.add_row(title, f"{share:.0%}")
    energy = most_energy(prediction, device)
    if energy is not None:
        most = "" if prediction.energy is not None else f"at most, at the power limit of {device.tdp_w:.0f} W: "
        table.add_row("energy", f"{most}{format_joules(energy.median)}")


def _in_words(mig: Mapping[str, Any]) -> str:
    needed = format_bytes(mig["needed_bytes"])
    if mig["profile"] is None:
        return f"none: {needed} are needed (95% quantile)"
    latency = format_seconds(mig["step_time_s"]["median"])
    return (
        f"{mig['profile']} ({format_bytes(mig['memory_bytes'])} for {needed}, the 95% quantile); "
        f"{latency} there, {mig['instances']} of them on one GPU"
    )

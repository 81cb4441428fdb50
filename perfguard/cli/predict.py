"""``perfguard predict`` and ``dry-run``: what a workload or a script costs on a device, with an account of memory and time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfguard import explain
from perfguard.budget import needed_on_host
from perfguard.cli.guards import add_log_argument, forecaster_for, notes_of
from perfguard.cli.subject import add_subject_arguments, check_page, check_subject, in_network, subject_of
from perfguard.devices import Device, catalog, mig_instance, resolve_device, smallest_profile
from perfguard.exceptions import ConfigurationError
from perfguard.predictor import DEFAULT_PREDICTOR, TARGETS, Estimate, OperatorTimes, Prediction, Predictor, load_predictor
from perfguard.quantities import format_bytes, format_dollars, format_joules, format_seconds, parse_dollars
from perfguard.unmodelled import notes_of_unmodelled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console
    from rich.table import Table

    from perfguard.cli.subject import Work
    from perfguard.graph import OpGraph
    from perfguard.graph.kernels import Target
    from perfguard.quantities import Quantity

    OperatorSeconds = npt.NDArray[np.float64]


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard predict`` takes."""
    add_subject_arguments(parser)
    parser.add_argument(
        "--gpu",
        default="auto",
        metavar="a100|a100,t4|all",
        help='names from `perfguard gpus`, of which several are ordered by speed, "auto" or "cpu" (default: auto)',
    )
    parser.add_argument("--mig", action="store_true", help="find the smallest MIG profile that fits")
    parser.add_argument("--price-per-hour", metavar="2.50", help="price of an hour on the device; with --steps, predict the cost")
    parser.add_argument(
        "--predictor",
        default=DEFAULT_PREDICTOR,
        metavar="NAME",
        help=f"another installed predictor, for comparison (default: {DEFAULT_PREDICTOR})",
    )
    add_log_argument(parser)
    parser.add_argument(
        "--explain", action="store_true", help="show how each number came to be, and bytes and time by module and operator"
    )
    parser.add_argument("--plot", metavar="FILE.html", help="draw the memory over the time of the step")
    parser.add_argument("--slurm", action="store_true", help="print the #SBATCH lines that reserve what is predicted")
    parser.add_argument("--json", action="store_true", help="print JSON")


def predict(arguments: argparse.Namespace) -> None:
    """Build, read or dry-run, predict and print."""
    check_subject(arguments)
    price = None if arguments.price_per_hour is None else parse_dollars(arguments.price_per_hour, what="--price-per-hour")
    if arguments.plot:
        check_page("--plot", arguments.plot)
    _check_slurm(arguments)
    devices = [in_network(device, arguments) for device in _devices(arguments.gpu)]
    work_on = subject_of(arguments)
    predictor = load_predictor(arguments.predictor)
    if len(devices) > 1:
        _rank(arguments, devices, work_on, predictor, price)
        return
    (device,) = devices
    forecaster = forecaster_for(device, log=arguments.log, predictor=predictor)
    work = work_on(device)
    graph = work.graph
    prediction, phases = work.predict(forecaster)
    op_time_s = operator_times_s(predictor, prediction, graph, device)

    document = _as_json(prediction, device, graph, arguments.batch_size, price)
    document |= {"steps": work.steps, "steps_per_epoch": work.steps_per_epoch}
    if work.phases:
        document["peak_memory_by_phase_bytes"] = {name: estimate_as_json(peak) for name, peak in phases.items()}
    predicted = _quantities_of(prediction)
    if work.host_memory is not None:
        predicted["host_memory"] = needed_on_host(work.host_memory, prediction, device)
        document["host_memory_bytes"] = estimate_as_json(predicted["host_memory"])
    document["notes"] = [
        *alias_notes(arguments.gpu, device),
        *notes_of(forecaster, device),
        *work.notes,
        *_hopeless_notes(graph, device),
    ]
    if arguments.mig:
        document["mig"] = _smallest_instance(device, graph, prediction, predictor)
    peak_graph = work.phases.get(next(iter(phases)), graph)
    if arguments.explain:
        document["explain"] = explanation(prediction, op_time_s, graph, peak_graph, device)
        document["account"] = explain.as_json(predicted)
        if work.dry_run_s:
            document["dry_run_s"] = dict(work.dry_run_s)
    if arguments.slurm:
        _print_slurm(document["notes"], prediction, device, predicted.get("host_memory"), arguments.world_size or 1)
    elif arguments.json:
        print(json.dumps(document, indent=2))
    else:
        _print(document, prediction, device, graph, peak_graph)
    if arguments.explain and not arguments.json:
        print_tables(explain.tables_of(predicted))
    if arguments.plot:
        draw_timeline(arguments.plot, graph, device, prediction, op_time_s)
        print(f"memory over the step: {arguments.plot}", file=sys.stderr)


add_dry_run_arguments = add_predict_arguments
dry_run = predict  # by the name that a script suggests


def _devices(names: str) -> list[Device]:
    if names.strip().lower() == "all":
        return list(catalog().values())
    devices = [resolve_device(name.strip()) for name in names.split(",") if name.strip()]
    if not devices:
        raise ConfigurationError("--gpu must be 'all' or names with commas between them, for instance a100,t4.")
    return list({device.id: device for device in devices}.values())


def _rank(
    arguments: argparse.Namespace,
    devices: Sequence[Device],
    work_on: Callable[[Device], Work],
    predictor: Predictor,
    price: float | None,
) -> None:
    """Predict on every device, and print those that fit with a chance of 95% first, then by time."""
    from perfguard.graph.kernels import target_of

    if arguments.explain or arguments.plot or arguments.mig or arguments.slurm:
        raise ConfigurationError("--explain, --plot, --mig and --slurm are for one GPU.")
    works: dict[Target, Work] = {}
    rows = []
    for device in devices:
        target = target_of(device)  # cards of one kind run the same operators
        if target not in works:
            works[target] = work_on(device)
        forecaster = forecaster_for(device, log=arguments.log, predictor=predictor)
        prediction = works[target].predict(forecaster)[0]
        graph = works[target].graph
        rows.append(_as_json(prediction, device, graph, arguments.batch_size, price))
        rows[-1]["fits"] = rows[-1]["p_oom"] <= 0.05
    rows.sort(key=lambda row: (not row["fits"], row["step_time_s"]["median"]))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    from perfguard.cli.gpus import wide_console

    console = wide_console(140)
    table = Table(title="fastest first; those that may not fit last")
    for heading in ("gpu", "time", "90%", "samples/s", "peak memory", "fits"):
        table.add_column(heading, justify="left" if heading == "gpu" else "right", no_wrap=True)
    for row in rows:
        time = {name: format_seconds(seconds) for name, seconds in row["step_time_s"].items()}
        table.add_row(
            row["gpu"] + ("" if row["trained_on_device"] else " *"),
            time["median"],
            f"{time['low']} to {time['high']}",
            "-" if row["throughput_per_s"] is None else f"{row['throughput_per_s']:,.0f}",
            format_bytes(row["peak_memory_bytes"]["median"]),
            "yes" if row["fits"] else f"no ({row['p_oom']:.0%} out of memory)",
        )
    console.print(table)
    if not all(row["trained_on_device"] for row in rows):
        console.print("* not trained on such steps on this GPU: read the interval and not the time", highlight=False)


def _check_slurm(arguments: argparse.Namespace) -> None:
    if arguments.slurm and (arguments.json or arguments.explain):
        raise ConfigurationError("--slurm prints the lines of a batch script alone: leave out --json and --explain.")
    if arguments.slurm and arguments.network:
        raise ConfigurationError(
            "--slurm writes the lines for one node: leave out --network, or ask for the processes of one node."
        )


def _print_slurm(
    notes: Iterable[str], prediction: Prediction, device: Device, host_memory: Estimate | None, processes: int
) -> None:
    from perfguard.cli.slurm import slurm_lines

    for line in slurm_lines(prediction, device, host_memory=host_memory, processes=processes):
        print(line)
    missing = []
    if prediction.total_time is None:
        missing.append("No --time: the steps of the trial are not known. Give --steps.")
    if host_memory is None:
        missing.append("No --mem: only the dry run of a script shows what it holds in the memory of the host.")
    for note in (*missing, *notes, *notes_of_unmodelled(prediction.unmodelled)):
        print(f"perfguard: {note}", file=sys.stderr)


def print_tables(tables: Iterable[Table]) -> None:
    """Print ``tables``, wide where the output is a file."""
    from perfguard.cli.gpus import wide_console

    console = wide_console(120)
    for table in tables:
        console.print(table)


def _quantities_of(prediction: Prediction) -> dict[Quantity, Estimate]:
    """Return the estimates of ``prediction`` that are known, by quantity."""
    known: dict[Quantity, Estimate | None] = {
        "memory": prediction.peak_memory,
        "time": prediction.total_time,
        "step_time": prediction.step_time,
        "energy": prediction.energy,
    }
    return {quantity: estimate for quantity, estimate in known.items() if estimate is not None}


def alias_notes(name: str, device: Device) -> list[str]:
    """Return a sentence on the card that a short name means, if other cards go by it too: "a100" fits four."""
    from perfguard.devices.catalog import alias_of, catalog, is_short_for

    if alias_of(name) is None:
        return []
    others = [id_ for id_, other in catalog().items() if is_short_for(name, other) and id_ != device.id]
    return others and [f"{name} is taken for {device.name} ({device.id}). Other cards of this name: {', '.join(others)}."]


def estimate_as_json(value: Estimate | None) -> dict[str, float] | None:
    """Return the median and the 90% interval."""
    if value is None:
        return None
    low, high = value.interval()
    return {"median": value.median, "low": low, "high": high}


def _hopeless_notes(graph: OpGraph, device: Device) -> list[str]:
    """Return a sentence on a step that is hopeless on ``device``: a guard's verdict then has another number."""
    from perfguard.physics import HOPELESS, LeastMemory

    least = LeastMemory.of(graph, device)
    if least.num_bytes <= HOPELESS * device.memory_bytes:
        return []
    return [f"The step cannot fit: it needs {least}. A guard prunes it by this bound alone, and predicts from it."]


def _smallest_instance(device: Device, graph: OpGraph, prediction: Prediction, predictor: Predictor) -> dict[str, Any]:
    """The smallest MIG profile whose memory holds the 95% quantile of the peak, and how fast the network runs there."""
    needed = prediction.peak_memory.quantile(0.95)
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
    prediction: Prediction, device: Device, graph: OpGraph, batch_size: int | None, price: float | None
) -> dict[str, Any]:
    from perfguard.predictor import most_energy

    return {
        "gpu": device.id,
        "predictor": prediction.predictor,
        "trained_on_device": prediction.trained_on_device,
        "trained_quantities": prediction.trained_quantities,
        "peak_memory_bytes": estimate_as_json(prediction.peak_memory),
        "step_time_s": estimate_as_json(prediction.step_time),
        "total_time_s": estimate_as_json(prediction.total_time),
        "cost": estimate_as_json(None if price is None else prediction.cost(price)),
        "price_per_hour": price,
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
        "unmodelled": [gap.sentence for gap in prediction.unmodelled],
        "unmodelled_codes": [gap.code for gap in prediction.unmodelled],
    }


def _print(document: Mapping[str, Any], prediction: Prediction, device: Device, graph: OpGraph, peak_graph: OpGraph) -> None:
    """Print ``document`` for people: what it predicts, then where the memory and the time are."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{device.name} ({device.id}), {format_bytes(device.memory_bytes)}", show_header=False)
    for rows in (_memory_rows(document), _time_rows(document, graph), _device_rows(document, prediction, device)):
        for name, value in rows:
            table.add_row(name, value)
    table.add_row("work", f"{graph.flops / 1e9:,.1f} GFLOP in {len(graph.ops)} operators")
    console.print(table)
    _print_all_parts(console, prediction)
    notes = [*document["notes"], *notes_of_unmodelled(prediction.unmodelled)]
    if not prediction.trained_on_device:
        notes.append(_untrained_note(prediction, device))
    for note in notes:
        console.print(note, style="yellow", markup=False, highlight=False)
    if "explain" in document:
        _print_explanation(console, document["explain"], peak_graph, device)
    if "dry_run_s" in document:
        _print_parts(console, "time of the dry run", document["dry_run_s"], format_seconds)


def _with_interval(estimate: Mapping[str, float], form: Callable[[float], str]) -> str:
    """Return the median of an estimate and its 90% interval in words."""
    return f"{form(estimate['median'])}  (90%: {form(estimate['low'])} to {form(estimate['high'])})"


def _memory_rows(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of memory: a label, and a value in words."""
    yield "peak memory", _with_interval(document["peak_memory_bytes"], format_bytes)
    for rank, (phase, peak) in enumerate(document.get("peak_memory_by_phase_bytes", {}).items()):
        yield f"  {phase}", format_bytes(peak["median"]) + ("" if rank else ", which decides")
    if "host_memory_bytes" in document:
        yield "host memory", _with_interval(document["host_memory_bytes"], format_bytes)
    yield "P(out of memory)", f"{document['p_oom']:.1%}"


def _time_rows(document: Mapping[str, Any], graph: OpGraph) -> Iterator[tuple[str, str]]:
    """Yield the rows of time, cost and throughput: a label, and a value in words."""
    yield "step time" if graph.mode == "train" else "latency", _with_interval(document["step_time_s"], format_seconds)
    for name in ("steps_per_epoch", "steps"):
        if document[name]:
            yield name.replace("_", " "), f"{document[name]:,}"
    if document["total_time_s"]:
        yield "trial time", format_seconds(document["total_time_s"]["median"])
    if document["cost"]:
        cost = _with_interval(document["cost"], format_dollars)
        yield "trial cost", f"{cost} at {format_dollars(document['price_per_hour'])} an hour"
    if document["throughput_per_s"]:
        yield "throughput", f"{document['throughput_per_s']:,.0f} samples/s"


def _device_rows(document: Mapping[str, Any], prediction: Prediction, device: Device) -> Iterator[tuple[str, str]]:
    """Yield the rows of what the device does: a label, and a value in words."""
    for title, share in (("GPU busy", prediction.gpu_util), ("multiprocessors active", prediction.sm_active)):
        if share is not None:
            yield title, f"{share:.0%}"
    if document["most_energy_j"]:
        most = "" if prediction.energy is not None else f"at most, at the power limit of {device.tdp_w:.0f} W: "
        yield "energy", most + format_joules(document["most_energy_j"]["median"])
    if "mig" in document:
        yield "smallest MIG profile", _mig_in_words(document["mig"])


def _print_all_parts(console: Console, prediction: Prediction) -> None:
    """Print of what the peak memory and the step time consist."""
    if prediction.memory_parts_bytes:
        _print_parts(console, "peak memory", _in_words(prediction.memory_parts_bytes), format_bytes)
    if sum(seconds > 0 for seconds in prediction.time_parts_s.values()) > 1:
        _print_parts(console, "step time", _in_words(prediction.time_parts_s), format_seconds)
    if prediction.time_by_kind_s:
        by_kind = _in_words(prediction.time_by_kind_s)
        _print_parts(console, "step time by kind of operator", by_kind, format_seconds, most=6)


def _untrained_note(prediction: Prediction, device: Device) -> str:
    """Return the advice for a prediction of a device that the predictor was not trained on."""
    missing = [target for target in TARGETS if target not in (prediction.trained_quantities or ())]
    the = f"the {missing[0]} of " if len(missing) == 1 else ""  # the other quantity was measured
    return (
        f"{prediction.predictor} was not trained on {the}such steps on {device.name}. "
        f"Read {'its' if the else 'the'} interval and not the median."
    )


def _mig_in_words(mig: Mapping[str, Any]) -> str:
    needed = format_bytes(mig["needed_bytes"])
    if mig["profile"] is None:
        return f"none: {needed} are needed (95% quantile)"
    return (
        f"{mig['profile']} ({format_bytes(mig['memory_bytes'])} for {needed}, the 95% quantile); "
        f"{format_seconds(mig['step_time_s']['median'])} there, {mig['instances']} of them on one GPU"
    )


def _in_words(parts: Mapping[str, float]) -> dict[str, float]:
    """``parts`` under clearer names than those in the data."""
    clearer = {
        "cache": "allocator's cache", "correction": "learnt correction",
        "start": "before the first launch", "batch_copy": "copy of the batch",
    }  # fmt: skip
    return {clearer.get(name, name.replace("_", " ")): value for name, value in parts.items()}


def _print_parts(
    console: Console, title: str, parts: Mapping[str, float], form: Callable[[float], str], *, most: int = 15
) -> None:
    """Print ``parts`` that are not 0, largest first, with their sum. All but the ``most`` largest are one row."""
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column()
    for _ in range(2):
        table.add_column(justify="right")
    total = sum(parts.values())
    rows = sorted(((name, value) for name, value in parts.items() if abs(value) > 1e-6 * total), key=lambda row: -abs(row[1]))
    if len(rows) > most:
        rows[most:] = [(f"({len(rows) - most} others)", sum(value for _, value in rows[most:]))]
    for name, value in rows:
        table.add_row(name, form(value), f"{value / total:.0%}")
    table.add_section()
    table.add_row("together", form(total), "100%")
    console.print(table)


def operator_times_s(predictor: Predictor, prediction: Prediction, graph: OpGraph, device: Device) -> OperatorSeconds:
    """Return the predicted seconds that each operator adds to the step. Shape: (len(ops),).

    The rest is before the first, and what the device's runs have corrected. If the predictor knows no operators, the seconds are
    in proportion to the roofline.
    """
    if isinstance(predictor, OperatorTimes):
        shares = predictor.op_time_shares(graph, device)
    else:
        from perfguard.graph import roofline_s

        shares = roofline_s(graph, device)
        shares = shares / max(float(shares.sum()), 1e-12)
    return shares * (prediction.step_time.median - prediction.time_parts_s.get("correction", 0.0))


def explanation(
    prediction: Prediction, op_time_s: OperatorSeconds, graph: OpGraph, peak_graph: OpGraph, device: Device
) -> dict[str, Any]:
    """Return the peak memory by module and the step time by operator. Each adds up to the prediction.

    ``least_seconds`` of an operator is its time at the device's peak rates. An operator far above it is slow in the prediction's
    opinion, not by its traffic: the split over operators is less certain than their sum.
    """
    from perfguard.graph import bytes_by_module, cost_by_operator

    by_module: dict[str, float] = {path or "(outside any module)": size for path, size in bytes_by_module(peak_graph).items()}
    by_module["(beside tensors: cache, context, correction)"] = prediction.peak_memory.median - sum(by_module.values())
    least_s = {cost.name: cost.seconds for cost in cost_by_operator(graph, device)}
    operators = [
        cost._asdict() | {"least_seconds": least_s[cost.name]} for cost in cost_by_operator(graph, device, op_time_s=op_time_s)
    ]
    correction_s = prediction.time_parts_s.get("correction", 0.0)
    nothing = {"calls": 0, "flops": 0, "num_bytes": 0, "least_seconds": 0.0}
    corrected = {"name": "(correction by runs and bounds)", "seconds": correction_s} | nothing
    before_s = prediction.step_time.median - correction_s - float(op_time_s.sum())
    before = {"name": "(before the first launch, batch copy)", "seconds": before_s} | nothing
    rest = [corrected, before] if correction_s else [before]
    return {"memory_by_module_bytes": by_module, "operators": [*operators, *rest]}


def _print_explanation(console: Console, explained: Mapping[str, Any], graph: OpGraph, device: Device) -> None:
    from rich.table import Table

    if graph.peak_index >= 0:
        op = graph.ops[graph.peak_index]
        where = f"{op.name}, {op.phase.name.lower()}, {op.module or 'model'}"
        console.print(f"the peak is at operator {graph.peak_index + 1} of {len(graph.ops)}: {where}")
    _print_parts(console, "peak memory by module", explained["memory_by_module_bytes"], format_bytes)

    def together(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"name": name} | {key: sum(row[key] for row in rows) for key in ("calls", "num_bytes", "least_seconds", "seconds")}

    operators = [row for row in explained["operators"] if row["calls"]]
    others = [row for row in explained["operators"] if not row["calls"]]
    shown = operators[:15]
    rest = operators[15:]
    total = together("together", explained["operators"])
    table = Table(title=f"step time by operator on {device.name}")
    table.add_column("operator", overflow="fold")
    for heading in ("calls", "traffic", "at peak rates", "time", "share"):
        table.add_column(heading, justify="right")
    for row in [*shown, *([together(f"({len(rest)} others)", rest)] if rest else []), *others, total]:
        seconds = format_seconds(row["least_seconds"]), format_seconds(row["seconds"])
        if row is total:
            table.add_section()
        share = f"{row['seconds'] / total['seconds']:.0%}"
        table.add_row(row["name"], str(row["calls"]), format_bytes(row["num_bytes"]), *seconds, share)
    console.print(table)
    console.print("The split over operators is less certain than their sum.", highlight=False)


def draw_timeline(path: str, graph: OpGraph, device: Device, prediction: Prediction, op_time_s: OperatorSeconds) -> None:
    """Write an HTML file with the memory over the predicted time of the step: the context, and the tensors by kind."""
    import numpy as np

    from perfguard.graph import timeline
    from perfguard.plots import graph_objects, write_page

    colors = {  # from the bottom to the top
        "context": "#5b5b5b", "parameters": "#4878a8", "buffers": "#9ab4cc", "optimizer_states": "#8a6fb0",
        "gradients": "#d98032", "inputs": "#b8b8b8", "activations": "#5a9a5a", "temporaries": "#c95f5f",
    }  # fmt: skip
    # Runs correct the whole step, and say nothing of an operator: the picture is as long as the step is predicted to be.
    op_time_s = (
        op_time_s * prediction.step_time.median / (prediction.step_time.median - prediction.time_parts_s.get("correction", 0.0))
    )
    start_s = max(prediction.step_time.median - float(op_time_s.sum()), 0.0)
    ends_ms = 1e3 * np.concatenate([[0.0], start_s + np.concatenate([[0.0], np.cumsum(op_time_s)])])
    bands = {"context": np.full(len(graph.ops) + 1, device.context_bytes)} | timeline(graph)
    figure = graph_objects().Figure()
    for name, color in colors.items():
        if name in bands and bands[name].any():
            gib = np.concatenate([bands[name], bands[name][-1:]]) / 2**30
            figure.add_scatter(
                x=ends_ms, y=gib, name=name.replace("_", " "), stackgroup="memory", fillcolor=color,
                line={"width": 0, "color": color, "shape": "hv"}, hovertemplate="%{y:.3f} GiB",
            )  # fmt: skip
    low, high = (end / 2**30 for end in prediction.peak_memory.interval())
    peak = prediction.peak_memory.median
    figure.add_hrect(low, high, fillcolor="black", opacity=0.08, line_width=0)
    lines = [("predicted peak (band: 90%)", peak, "black"), ("capacity", device.memory_bytes, "#b00020")]
    for text, num_bytes, color in lines:
        label = f"{text}, {format_bytes(num_bytes)}"
        figure.add_hline(num_bytes / 2**30, line={"color": color, "dash": "dash"}, annotation_text=label)
    # A capacity far above the curve would press it flat; it is in the title, and in view after a double click.
    top = max(num_bytes for _, num_bytes, _ in lines if num_bytes <= 2.5 * peak)
    of = f"{format_bytes(peak)} of {format_bytes(device.memory_bytes)}, {format_seconds(prediction.step_time.median)}"
    figure.update_layout(
        title=f"One step on {device.name}: {of}",
        xaxis_title="predicted time in the step (ms)",
        yaxis={"title": "memory (GiB)", "range": [0, 1.05 * max(top / 2**30, high)]},
        hovermode="x unified",
        template="plotly_white",
    )
    write_page(figure, path)

"""``perfguard plan``: the ways to run a training script that learn the same, those that fit first, by their speed.

Every way is a dry run of the script, with other words or with another setup of Hugging Face's Trainer. Two ways learn the same
if an optimizer step has as many samples, over all processes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perfguard.cli.check import budget_of, result_of
from perfguard.cli.guards import guard_within
from perfguard.cli.predict import alias_notes, estimate_as_json
from perfguard.cli.script import capture_script
from perfguard.cli.subject import add_network_argument, chance, in_network, whole_number
from perfguard.cli.trainer import Setup, setups
from perfguard.devices import resolve_device
from perfguard.exceptions import ConfigurationError, PerfGuardError, TooLargeError
from perfguard.predictor import SECONDS_PER_HOUR
from perfguard.quantities import format_bytes, format_dollars, format_seconds, parse_dollars
from perfguard.risk_budget import SMALL_CHANCE
from perfguard.unmodelled import notes_of_unmodelled
from perfguard.verdict import chance_in_words, check_chance

if TYPE_CHECKING:
    from perfguard.budget import Budget
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.guard import Guard
    from perfguard.workload import CapturedTrial

_MOST_DRY_RUNS = 64
_RESULTS = ("fits", "cannot tell", "does not fit", "learns otherwise", "left out")
Row = dict[str, Any]
"""What is known of one way on one set of GPUs. The first three results have numbers."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard plan`` takes."""
    parser.description = "Exit status: 0 a way fits, 1 none does, 3 cannot tell, 2 wrong usage."
    parser.epilog = (
        f"{parser.prog} train.py --gpus 8xh100 --try --micro-batch 1,2,4 --accumulate 4,2,1 --checkpointing -- --micro-batch 4. "
        "What follows -- is how you run the script today."
    )
    parser.add_argument("source", metavar="FILE.py", help="training script")
    parser.add_argument(
        "--gpus", default="auto", metavar="8xh100,a100", help="GPUs of one run; with commas, runs to compare (default: auto)"
    )
    add_network_argument(parser)
    parser.add_argument("--max-memory", metavar="38GiB|0.9", help="peak memory of a GPU, or a share of it (default: all of it)")
    parser.add_argument("--price-per-hour", metavar="2.50", help="price of an hour on one GPU; with commas, one for each run")
    parser.add_argument(
        "--samples-per-step",
        type=whole_number,
        metavar="N",
        help="samples of an optimizer step over all GPUs (default: as the script stands)",
    )
    parser.add_argument(
        "--risk",
        type=chance,
        metavar="0.05|5%",
        default=SMALL_CHANCE,
        help=f"largest accepted chance not to fit (default: {SMALL_CHANCE})",
    )
    parser.add_argument(
        "--allow-8bit", action="store_true", help="of a Trainer, try AdamW in 8 bits too; it rounds the optimizer's states"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--try",
        dest="tries",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="--WORD 1,2,4",
        help="last: the script's words with the values to try; one without a value is tried with and without",
    )


class GpuSet(NamedTuple):
    """The GPUs of one run."""

    name: str
    card: str
    device: Device
    ranks: int | None
    """Processes, one on each GPU, as torchrun starts them. None: the script runs without torchrun."""
    price: float | None
    """Of an hour on all GPUs."""

    @property
    def num_gpus(self) -> int:
        return self.ranks or 1


def plan(arguments: argparse.Namespace) -> int:
    """Dry-run each way, predict, print, and return the exit status: 0, 1 or 3, and 130 after Ctrl-C."""
    _check_arguments(arguments)
    words = _ways_in_words(arguments.tries, arguments.words)
    gpu_sets = _gpu_sets(arguments)
    budget = budget_of(memory_budget=arguments.max_memory)
    for gpus in gpu_sets:
        budget.check_device(gpus.device)
    if len(words) * len(gpu_sets) > _MOST_DRY_RUNS:
        raise ConfigurationError(
            f"--try makes {len(words)} combinations on {len(gpu_sets)} sets of GPUs, and at most {_MOST_DRY_RUNS} dry runs are "
            "made. Leave values out, or fix a word after --."
        )
    rows: list[Row] = []
    notes = [note for gpus in gpu_sets for note in alias_notes(gpus.card, gpus.device)]
    try:
        for row in _tried(arguments, gpu_sets, words, budget):
            rows.append(row)  # what is known when Ctrl-C comes
        status = _exit_status(rows)
    except KeyboardInterrupt:
        status = 130
        notes.append("Interrupted: not all ways were tried.")
    _show_progress("")
    if rows and not arguments.tries and all("mfu" in row and "arguments" not in row for row in rows):
        notes.append("The script makes no TrainingArguments, so it has one way. Name words to try: --try --batch-size 1,2,4")
    for gpus in gpu_sets:
        _add_shared([row for row in rows if "mfu" in row and row["gpus"] == gpus.name], gpus.price)
    rows.sort(key=lambda row: (_RESULTS.index(row["result"]), -row.get("samples_per_s", 0)))
    if arguments.json:
        print(json.dumps({"exit_status": status, "ways": rows, "notes": notes}, indent=2))
    else:
        _print(rows, notes, arguments.source)
    return status


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse a script that is not there, and words that contradict each other."""
    if Path(arguments.source).suffix != ".py" or not Path(arguments.source).is_file():
        raise ConfigurationError(f"Expected a training script that exists, such as train.py, but got {arguments.source!r}.")
    check_chance(arguments.risk, what="--risk")
    if not arguments.allow_8bit:
        return
    if arguments.tries:
        raise ConfigurationError("--allow-8bit is for a script of Hugging Face's Trainer, without --try.")
    try:
        import bitsandbytes  # noqa: F401  # before a dry run pretends to have CUDA
    except ImportError as error:
        raise ConfigurationError(f"--allow-8bit needs bitsandbytes: pip install bitsandbytes ({error}).") from error


def _show_progress(text: str) -> None:
    """Replace the line of progress in a terminal by ``text``."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def _exit_status(rows: Sequence[Row]) -> int:
    """Return 0 if a way fits, 1 if none does, and 3 if that is not known."""
    results = {row["result"] for row in rows} - {"learns otherwise"}
    if "fits" in results:
        return 0
    return 1 if results == {"does not fit"} else 3


def _gpu_sets(arguments: argparse.Namespace) -> list[GpuSet]:
    names = arguments.gpus
    prices = arguments.price_per_hour
    found = []
    listed = list(dict.fromkeys(name.strip().lower() for name in names.split(",") if name.strip()))
    each = [] if prices is None else [parse_dollars(price, what="--price-per-hour") for price in prices.split(",")]
    if len(each) not in (0, 1, len(listed)):
        raise ConfigurationError(
            f"--price-per-hour has {len(each)} prices for {len(listed)} sets of GPUs. Give one, or one each."
        )
    for number, name in enumerate(listed):
        count, card = re.fullmatch(r"(?:([1-9]\d*)x)?(.*)", name).groups()  # type: ignore[union-attr]
        ranks = None if count is None else int(count)
        price = (each * len(listed))[number] * (ranks or 1) if each else None
        found.append(GpuSet(name, card, in_network(resolve_device(card), arguments), ranks, price))
    if not found:
        raise ConfigurationError("--gpus must name GPUs, for instance 8xh100 or 8xh100,4xa100-80gb.")
    return found


def _ways_in_words(tries: Sequence[str], fixed: Sequence[str]) -> list[list[str]]:
    """The words of each run of the script: those ``fixed``, and each combination of those to try.

    "--micro-batch 1,2", "--micro-batch=1,2", and what a shell makes of "--micro-batch {1,2}" and "--micro-batch={1,2}".
    """
    values: dict[str, list[str]] = {}
    name = ""
    for word in tries:
        if re.match(r"-+[^\W\d]|[\w.]+=", word):
            name, equals, given = word.partition("=")
            name += equals
            if re.fullmatch("--(gpus|network|max-memory|price-per-hour|samples-per-step|risk|allow-8bit|json)=?", name):
                raise ConfigurationError(f"{name} follows --try, and is then a word of the script's. Put --try last.")
        elif not name:
            raise ConfigurationError(
                f"--try takes words with the values to try, for instance --batch-size 1,2, but got {word!r}."
            )
        else:
            given = word
        values.setdefault(name, []).extend(value for value in given.strip("{}").split(",") if value)
    choices = [
        [[name + value] if name.endswith("=") else [name, value] for value in dict.fromkeys(given)] if given else [[], [name]]
        for name, given in values.items()
    ]
    ways = [[*fixed, *itertools.chain(*way)] for way in itertools.product(*choices)]
    return [[*fixed], *(way for way in ways if way != [*fixed])]


def _tried(
    arguments: argparse.Namespace, gpu_sets: Sequence[GpuSet], words: Sequence[list[str]], budget: Budget
) -> Iterator[Row]:
    """Yield what is known of each way on each set of GPUs. The first whose samples are seen says how many a step has."""
    wanted = total = arguments.samples_per_step
    for gpus in gpu_sets:
        guard = guard_within(budget, gpus.device)
        ways: list[tuple[list[str], Setup | None]] = [(way, None) for way in words]
        row_of: dict[tuple[Any, ...], Row] = {}  # by what it runs
        for number, (way, setup) in enumerate(ways, 1):  # the first run of a Trainer adds others
            name = str(setup) if setup else shlex.join(way[len(arguments.words) :]) or "as it stands"
            _show_progress(f"dry run {number} of {len(ways)} on {gpus.name}: {name}")
            row: Row = {"gpus": gpus.name, "way": name, "words": way}
            asked: list[Setup] = []
            choose = None if arguments.tries else functools.partial(_choose, setup, asked)
            try:
                seen = capture_script(arguments.source, way, gpus.device, world_size=gpus.ranks, spares=not row_of, choose=choose)
                samples = (seen.samples_per_step or 0) * seen.num_ranks
                wanted = wanted or samples
                graphs = seen.graph, *seen.phases.values()
                same = row_of.setdefault((samples, *(graph.content_hash for graph in graphs)), row)
                if same is not row:  # some words say what the script does anyway
                    same["way"] += f" = {name}"
                    continue
                row |= _judged(seen, guard, gpus, wanted, risk=arguments.risk)
            except TooLargeError as error:
                row |= {"result": "does not fit", "reason": str(error)}
            except Exception as error:
                reason = str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}"
                row |= {"result": "left out", "reason": reason}
            if asked:
                row["arguments"] = (setup or asked[0]).arguments(asked[0])
                row["way"] = name if setup else f"{asked[0]} (as it stands)"
            yield row
            if asked and not setup:
                total = total or asked[0].micro_batch * asked[0].accumulation * gpus.num_gpus
                each, rest = divmod(total, gpus.num_gpus)
                others = setups(asked[0], samples=each, world_size=gpus.num_gpus, allows_8bit=arguments.allow_8bit)
                ways += [(way, other) for other in others if other != asked[0] and not rest]


def _choose(chosen: Setup | None, asked: list[Setup], found: Setup) -> Setup:
    asked.append(found)
    return chosen or found


def _judged(seen: CapturedTrial, guard: Guard, gpus: GpuSet, wanted: int, *, risk: float) -> Row:
    """Predict what a process of a way needs, and what all make of it."""
    if seen.num_ranks != gpus.num_gpus:
        right = f"{seen.num_ranks}x{gpus.card}" if seen.num_ranks > 1 else gpus.card
        return {"result": "left out", "reason": f"the script trains on {seen.num_ranks} GPUs: give --gpus {right}"}
    samples, tokens = ((size or 0) * seen.num_ranks for size in (seen.samples_per_step, seen.tokens_per_step))
    if not samples:
        reason = "the samples of a step are not seen: no DataLoader gives them, and no model reads a batch as it comes"
        return {"result": "left out", "reason": reason}
    if samples != wanted:
        return {"result": "learns otherwise", "samples_per_step": samples}
    graph = seen.graph
    device = gpus.device
    limits = functools.partial(guard.budget.limits, device=device)
    verdict = guard.judge(graph, limits, threshold=risk, phases=seen.phases)
    result, reason = result_of(verdict, risk)
    prediction = verdict.prediction
    assert prediction is not None
    step_s = prediction.step_time.median
    notes = notes_of_unmodelled(prediction.unmodelled)
    if any("batch_norm" in op.name for op in graph.ops):
        notes.append("Batch normalization sees one micro-batch at a time, so another micro-batch learns something else.")
    if not prediction.trained_on_device:
        notes.append(f"{prediction.predictor} was not trained on such steps on {device.name}. Read the intervals.")
    return {
        "result": result,
        "reason": reason,
        "peak_memory_bytes": estimate_as_json(prediction.peak_memory),
        "p_exceeded": verdict.p_violation,
        "step_time_s": estimate_as_json(prediction.step_time),
        "samples_per_step": samples,
        "tokens_per_step": tokens or None,
        "samples_per_s": samples / step_s,
        "tokens_per_s": tokens / step_s or None,
        "mfu": graph.flops / (step_s * _peak_flops(graph, device)),
        "flops": graph.flops,
        "steps": seen.steps,
        "notes": notes,
    }


def _add_shared(rows: Sequence[Row], price: float | None) -> None:
    """Add to the ways on some GPUs what follows from all of them: the model's FLOPs, and the steps of the run with its cost."""
    for row in rows:
        # What checkpointing computes again is no work of the model (Chowdhery et al. 2022, appendix B).
        row["mfu"] *= min(other["flops"] for other in rows) / row["flops"]
        row["steps"] = next((other["steps"] for other in rows if other["steps"]), None)  # all make as many
        if price is not None:
            cost = price * row["step_time_s"]["median"] / SECONDS_PER_HOUR
            tokens = row["tokens_per_step"]
            name, number = ("million_tokens", tokens / 1e6) if tokens else ("1000_samples", row["samples_per_step"] / 1e3)
            row[f"cost_of_{name}"] = cost / number
            row["cost"] = row["steps"] and row["steps"] * cost


def _peak_flops(graph: OpGraph, device: Device) -> float:
    """FLOP/s of the device in the precision of most of the arithmetic."""
    from perfguard.graph.roofline import kinds_in_tf32

    if graph.precision != "fp32":
        return device.flops_per_s(graph.precision.removeprefix("amp-"))
    in_tf32 = sum(op.flops for op in graph.ops if op.kind in kinds_in_tf32(graph))
    return device.flops_per_s("tf32" if 2 * in_tf32 > graph.flops else "fp32")


def _print(rows: Sequence[Row], notes: Sequence[str], source: str) -> None:
    """Print a table of what was predicted, how to run the fastest that fits, and why others are not in the table."""
    from rich.table import Table

    from perfguard.cli.gpus import wide_console

    console = wide_console(190)
    shown = [row for row in rows if "mfu" in row]
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("GPUs", "gpus" if len({row["gpus"] for row in rows}) > 1 else "", str),
        ("way", "way", str),
        ("memory of a GPU", "peak_memory_bytes", functools.partial(_in_words, format_bytes)),
        ("chance to fit", "p_exceeded", lambda chance: chance_in_words(1 - chance)),
        ("step time", "step_time_s", functools.partial(_in_words, format_seconds)),
        ("samples/s", "samples_per_s", "{:,.4g}".format),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("MFU", "mfu", "{:.1%}".format),
        ("1,000 samples", "cost_of_1000_samples", format_dollars),
        ("million tokens", "cost_of_million_tokens", format_dollars),
        ("the run", "cost", format_dollars),
    ]
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in shown)]
    table = Table(title=f"{shown[0]['samples_per_step']:,} samples in an optimizer step of all GPUs" if shown else None)
    for heading, name, _ in columns:
        table.add_column(heading, justify="left" if name in ("gpus", "way") else "right", overflow="fold")
    for row, after in itertools.zip_longest(shown, shown[1:]):
        cells = ["-" if row.get(name) is None else form(row[name]) for _, name, form in columns]
        table.add_row(*cells, end_section=after is not None and row["result"] == "fits" != after["result"])
    if shown:
        console.print(table)
    if shown and shown[0]["result"] == "fits":
        print("fastest that fits:", _call(shown[0], source))
    others = [row for row in rows if row["result"] == "learns otherwise"]
    if others:
        sizes = ", ".join(f"{size:,}" for size in sorted({row["samples_per_step"] for row in others}))
        print(f"left out: {len(others)} with another number of samples in a step ({sizes})")
    for row in rows:
        if "mfu" not in row and row not in others:
            print(f"{row['result']}: {row['gpus']}, {row['way']}: {row['reason']}")
    for note in dict.fromkeys([*notes, *(note for row in shown for note in row["notes"])]):
        console.print(note, style="yellow", markup=False, highlight=False)


def _in_words(form: Callable[[float], str], estimate: Mapping[str, float]) -> str:
    return f"{form(estimate['median'])} ({form(estimate['low'])} to {form(estimate['high'])})"


def _call(row: Row, source: str) -> str:
    """How to run a way."""
    ranks = row["gpus"].rpartition("x")[0]
    program = ["torchrun", "--nproc-per-node", ranks] if ranks.isdecimal() else ["python"]
    changes = ", ".join(f"{name}={value!r}" for name, value in row.get("arguments", {}).items())
    return shlex.join([*program, source, *row["words"]]) + (f" with TrainingArguments({changes})" if changes else "")

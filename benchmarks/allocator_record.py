"""Where do our liveness and our allocator replay part from what CUDA's allocator really did? Operator by operator.

    python benchmarks/allocator_record.py [--configurations 100] [--space vision,text,mlp,nas] [--out record.md]

Each configuration of the collector's order runs three steps on the GPU; the third is recorded: PyTorch's own history of every
allocation (`torch.cuda.memory._record_memory_history`), and at the end of each operator how many of them there were. Our trace of
the same step says which bytes should be alive then. Both lists of operators are aligned by their names, and wherever the
difference between them changes, they part: the table sums that by operator. cuDNN's benchmark mode is off, as the aim says.

Needs a CUDA GPU. The comparing half needs none.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import difflib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.progress import track
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from perfguard import OpGraph, trace
from perfguard.devices import Device, resolve_device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import replay_allocator
from perfguard_research.collect.loop import planned
from perfguard_research.collect.run import Card, make_step
from perfguard_research.collect.spaces import Draft, drafts, without_missing_packages
from perfguard_research.tables import MeasuredRow

MIB = 2**20
_NOTABLE = 0.01
"""Of the peak: a change of the difference that is worth a line."""
_MEMORY_SHARE = 0.05, 0.6


class Mark(NamedTuple):
    """The end of one operator in the recorded step."""

    name: str
    num_allocations: int
    """Since the step began."""
    num_frees: int


class MeasuredOp(NamedTuple):
    """What the history tells of one operator; all in bytes."""

    name: str
    live: int
    """Requested by tensors that are alive when it ends."""
    extra: int
    """Most that it had beside that while it ran: its workspaces."""
    reserved: int
    """In segments when it ends."""


class Parting(NamedTuple):
    """An operator after which the difference between the record and the trace is another than before it."""

    name: str
    change: int
    """Bytes; above zero: the record has more."""


class Comparison(NamedTuple):
    """One configuration. Shares are |ours / measured - 1|."""

    aligned: float
    """Share of the recorded operators that the trace has too, in the same order."""
    live: float
    """Median over the aligned operators."""
    peak: float
    """Of the largest live bytes, without workspaces."""
    reserved: float
    workspace: int
    """Largest bytes that an operator had beside its outputs."""
    partings: tuple[Parting, ...]
    extras: tuple[Parting, ...]
    """Workspaces by operator."""


def measured_ops(history: Iterable[Mapping[str, Any]], marks: Sequence[Mark], *, live: int, reserved: int) -> list[MeasuredOp]:
    """The history cut at the ends of operators.

    Args:
        history: PyTorch's trace entries of the step, in order; see `torch.cuda.memory._snapshot`.
        marks: the end of each operator.
        live: bytes requested by live tensors when the step began.
        reserved: bytes in segments when the step began.
    """
    entries = iter(history)
    allocations = frees = 0
    found = []
    for mark in marks:
        highest = 0  # after its first allocation: what is freed before that belongs to the operators before it
        while allocations < mark.num_allocations or frees < mark.num_frees:
            entry = next(entries, None)
            if entry is None:
                raise PerfGuardError(f"The history ends before operator {mark.name}: it was recorded with too few entries.")
            action, size = entry["action"], int(entry["size"])
            if action == "alloc":
                allocations, live = allocations + 1, live + size
                highest = max(highest, live)
            elif action == "free_completed":
                frees, live = frees + 1, live - size
            elif action in ("segment_alloc", "segment_map"):
                reserved += size
            elif action in ("segment_free", "segment_unmap"):
                reserved -= size
        found.append(MeasuredOp(mark.name, live, max(highest - live, 0), reserved))
    return found


def compare(graph: OpGraph, measured: Sequence[MeasuredOp], *, reserved: int) -> Comparison:
    """Our trace against the record of the same step; ``reserved`` is the most that the allocator held."""
    ours = [op.name for op in graph.ops]
    matcher = difflib.SequenceMatcher(a=ours, b=[op.name for op in measured], autojunk=False)
    pairs = [(a + k, b + k) for a, b, size in matcher.get_matching_blocks() for k in range(size)]
    live = graph.live_bytes
    differences = [measured[b].live - int(live[a + 1]) for a, b in pairs]
    peak = max(op.live for op in measured)
    partings = [
        Parting(measured[b].name, after - before)
        for (_, b), before, after in zip(pairs, [0, *differences], differences, strict=False)
        if abs(after - before) > _NOTABLE * peak
    ]
    extras = [Parting(op.name, op.extra) for op in measured if op.extra > _NOTABLE * peak]
    return Comparison(
        aligned=len(pairs) / len(measured),
        live=statistics.median(abs(live[a + 1] / measured[b].live - 1) for a, b in pairs) if pairs else float("nan"),
        peak=abs(int(live.max()) / peak - 1),
        reserved=abs(replay_allocator(graph).reserved_bytes / reserved - 1),
        workspace=max(op.extra for op in measured),
        partings=tuple(partings),
        extras=tuple(extras),
    )


class _Marks(TorchDispatchMode):
    """Notes the end of every operator that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[Mark] = []
        self._start = _counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            allocations, frees = _counts()
            name = func._schema.name.rpartition("::")[2]
            self.marks.append(Mark(name, allocations - self._start[0], frees - self._start[1]))
        return out


def _counts() -> tuple[int, int]:
    figures = torch.cuda.memory_stats_as_nested_dict(0)["allocation"]["all"]
    return int(figures["allocated"]), int(figures["freed"])


def record(row: MeasuredRow, card: Card) -> tuple[list[MeasuredOp], int]:
    """The third step of ``row`` as the allocator saw it, and the most that it reserved."""
    card.start_afresh(row)
    torch.cuda.reset_peak_memory_stats()
    step = make_step(row, card.torch_device)
    step()
    step()
    card.synchronize()
    stats = torch.cuda.memory_stats()
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    try:
        with _Marks() as noted:
            step()
        card.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    live, reserved = int(stats["requested_bytes.all.current"]), int(stats["reserved_bytes.all.current"])
    return measured_ops(history, noted.marks, live=live, reserved=reserved), torch.cuda.max_memory_reserved()


def drafts_to_compare(number: int, spaces: Sequence[Any], device: Device, seed: int) -> Iterator[Draft]:
    """The collector's configurations, eager and without cuDNN's benchmark mode, that fit with ease."""
    for draft in drafts(spaces, seed=seed, device=device):
        if number and not draft.row.compiled and _MEMORY_SHARE[0] < draft.memory_share < _MEMORY_SHARE[1]:
            row = planned(draft, device, min(device.memory_bytes, 16 * 2**30))
            if not isinstance(row, str):
                number -= 1
                yield draft._replace(row=dataclasses.replace(row, cudnn_benchmark=False))
        if not number:
            return


def as_markdown(title: str, compared: Mapping[str, Sequence[Comparison]]) -> str:
    """Two tables: how far apart, by space; and which operators make it so."""
    lines = [
        f"# {title}",
        "",
        "| space | configurations | aligned | live | peak | reserved | largest workspace |",
        "| --- " * 7 + "|",
    ]
    for space, items in compared.items():
        shares = [statistics.median(getattr(item, name) for item in items) for name in ("aligned", "live", "peak", "reserved")]
        largest = max(item.workspace for item in items) / MIB
        lines.append(f"| {space} | {len(items)} | {' | '.join(f'{share:.2%}' for share in shares)} | {largest:.0f} MiB |")
    lines += ["", "Medians of |ours / measured - 1|. Aims: live 0.5%, reserved 2%.", ""]
    everything = [item for items in compared.values() for item in items]
    for heading, column in (("where they part", "partings"), ("workspaces", "extras")):
        sums: Counter[str] = Counter()
        times: Counter[str] = Counter()
        for item in everything:
            for parting in getattr(item, column):
                sums[parting.name] += parting.change
                times[parting.name] += 1
        lines += [f"| {heading} | times | record has more by, mean |", "| --- | --- | --- |"]
        ordered = sorted(sums, key=lambda name: -abs(sums[name]))
        lines += [f"| `{name}` | {times[name]} | {sums[name] / times[name] / MIB:+.2f} MiB |" for name in ordered[:20]]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Run, compare and print; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configurations", type=int, default=100)
    parser.add_argument("--space", default="vision,text,mlp,nas")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no further configuration after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, or this PyTorch cannot use it: the allocator has nothing to record.", file=sys.stderr)
        return 2
    device = resolve_device("auto")
    card = Card(device)
    spaces, lines = without_missing_packages(arguments.space.split(","))
    print(*lines, sep="\n", file=sys.stderr)
    compared: dict[str, list[Comparison]] = {}
    end = time.monotonic() + 60 * arguments.minutes
    found = drafts_to_compare(arguments.configurations, spaces, device, arguments.seed)
    for draft in track(found, total=arguments.configurations, transient=True):
        if time.monotonic() > end:
            break
        try:
            measured, reserved = record(draft.row, card)
            graph = trace(draft.row.workload(cast(nn.Module, draft.row.make_model())), target=device)
            compared.setdefault(draft.space, []).append(compare(graph, measured, reserved=reserved))
        except (PerfGuardError, RuntimeError) as error:
            print(f"{draft.row.model}: left out: {type(error).__name__}: {error}"[:200], file=sys.stderr)
    text = as_markdown(f"{datetime.date.today()}, {device.name}, torch {torch.__version__}", compared)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

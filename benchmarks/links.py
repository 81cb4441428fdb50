"""The time of collectives, and of steps on many GPUs: the constants of `perfguard/collectives.py`, and their errors.

    python benchmarks/links.py collectives.csv.gz runs.csv.gz vtrain.csv.gz      # without the tables it does nothing

Collectives (microsoft/vidur): fitted on some systems, judged on others. Steps: pairs of published runs that differ in the number of
GPUs alone. From the time on few GPUs, that on many is predicted, with the jitter of the other sources. Of the model, only its
layers are known: the backward pass takes two thirds of the computation, DDP has buckets of 25 MiB, FSDP gathers layer by layer.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _record import parser_of, show

from perfguard.collectives import LINKS, largest_normal, link_times, ring_factor
from perfguard.devices import Device, resolve_device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import Op, OpGraph, Phase
from perfguard_research.csv_rows import read_table
from perfguard_research.networks import Network

Row = Mapping[str, str]
NETWORKS = {"FlagOpen a100": 25e9, "mosaicml a100": 200e9, "mosaicml h100": 400e9}
"""Bytes per second of a node, from FlagPerf's rows and the headings of llm-foundry's benchmarks: 200, 1600 and 3200 Gbit/s."""
SAME = ("source", "model", "config", "gpu", "precision", "layout", "optimizer", "checkpointing", "accumulation", "batch_size", "input")


def show_collectives(rows: Sequence[Row], record: Path | None) -> None:
    """Fit latency and efficiency within nodes, each octave of sizes of each system alike, and the time of a hop between nodes."""
    peaks = {name: resolve_device(f"{name}-sxm-80gb").link_bytes_per_s for name in ("a100", "h100")}
    least: defaultdict[Any, float] = defaultdict(lambda: math.inf)
    found: defaultdict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        size, seconds, ranks, in_node = int(row["bytes"]), float(row["latency_ms"]) / 1e3, row["num_gpus"], row["gpus_per_node"]
        if row["collective"] == "send_recv":
            least[row["system"], in_node] = min(least[row["system"], in_node], seconds)
        elif ranks == in_node:
            at_peak_s = size * ring_factor("allreduce", int(ranks)) / peaks[row["system"][:4]]
            found[row["system"], ranks, size.bit_length()].append((at_peak_s, seconds))

    def error(latency_s: float, efficiency: float, of: str, from_bytes: int = 0) -> float:
        """Mean |log error| of the medians of octaves."""
        groups = [group for key, group in found.items() if of in f"all {key[0][:4]} {key[1]}-GPU" and 2 ** key[2] > from_bytes]
        ratios = (statistics.median((latency_s + best / efficiency) / s for best, s in group) for group in groups)
        return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)

    grid = [*itertools.product(np.arange(10e-6, 81e-6, 1e-6), np.arange(0.4, 1.0, 0.01))]
    lines = []
    for fit, judge in (("all", "all"), ("a100", "h100"), ("h100", "a100"), ("2-GPU", "8-GPU")):
        best = min(grid, key=lambda at: error(*at, fit))
        errors = (f"{math.expm1(error(*best, judge, size)):.1%}" for size in (0, 2**20))
        lines.append([fit, judge, f"{best[0] * 1e6:.0f} µs", f"{best[1]:.2f}", *errors])
    show("links-collectives", ["fitted on", "judged on", "latency", "efficiency", "error", "from 1 MiB on"], lines, record=record)
    hops = [least[system, "1"] - least[system, "2"] for system in {system for system, _ in least}]
    print(f"A hop between nodes takes {statistics.median(hops) * 1e6:.0f} µs, the median of {len(hops)} systems.")


class Pair(NamedTuple):
    """A setting on few GPUs and on many. ``layers`` are the bytes of the gradients of each layer (FSDP) or bucket (DDP)."""

    source: str
    device: Device
    parallel: str
    layers: Sequence[float]
    backward: float  # share of the last backward pass in the computation
    few: int
    many: int
    few_s: float
    many_s: float

    def step_s(self, ranks: int, computed_s: float) -> float:
        """The step on ``ranks`` GPUs, all as fast as each other."""
        ops: list[Op] = []
        shares: list[float] = []
        number, fsdp = len(self.layers), self.parallel.startswith("fsdp")

        def add(name: str, reads: Sequence[int], writes: Sequence[int], share: float, size: float = 0.0) -> None:
            written, read = (size / ranks if "scatter" in name else size), (size if "allreduce" in name else size + size / ranks)
            group = {"ranks": (ranks, min(ranks, 8))} if size else {}
            ops.append(Op(name, "copy", Phase.BACKWARD, 0, int(read), int(written), (*reads,), (*writes,), "", (), "", group))
            shares.append(share)

        for layer, size in enumerate(self.layers):
            if fsdp:
                add("_allgather_base_", [], [layer], 0.0, size / 2)  # parameters in half precision
            add("forward", [layer], [], (1 - self.backward) / number)
        gathered = number if self.parallel == "fsdp-full" else 0
        for layer in reversed(range(number)):
            while gathered > max(layer - 1, 0):  # one layer ahead
                gathered -= 1
                add("_allgather_base_", [], [number + gathered], 0.0, self.layers[gathered] / 2)
            add("backward", [number + layer], [-layer - 1], self.backward / number)
            add("_reduce_scatter_base_" if fsdp else "allreduce_", [-layer - 1], [-layer - 1], 0.0, self.layers[layer])
        graph, times_s = OpGraph(tuple(ops), (), "train", "fp32", "nchw"), np.array(shares) * computed_s
        times = link_times(graph, self.device, times_s, replace(LINKS, jitter=0.0))
        return computed_s + (0.0 if times is None else float(times.waits_s.sum()))

    def predicted_s(self) -> float:
        """The step on many GPUs, by the links alone."""
        low, high = 0.0, self.few_s
        for _ in range(20):  # the computation for which the step on few GPUs takes what was measured
            middle = (low + high) / 2
            low, high = (middle, high) if self.step_s(self.few, middle) < self.few_s else (low, middle)
        return self.step_s(self.many, high)


def pairs_of(runs: Sequence[Row], megatron: Sequence[Row]) -> Iterator[Pair]:
    """Every setting with several numbers of GPUs, and Megatron's data parallelism, which reduces all gradients at the end."""
    settings: defaultdict[Any, dict[int, Row]] = defaultdict(dict)
    for row in runs:
        if row["step_time_ms"] and row["mode"] == "train":
            settings[tuple(row[name] for name in SAME)].setdefault(int(row["num_gpus"]), row)
    for by_number in settings.values():
        few, *others = sorted(by_number)
        row, parallel = by_number[few], by_number[max(by_number)]["parallel"]
        if not others or parallel not in ("ddp", "fsdp-full", "fsdp-grad-op"):
            continue
        micro_steps, config = int(row["accumulation"] or 1), json.loads(row["config"] or "{}")
        network = NETWORKS.get(f"{row['source'].partition('/')[0]} {row['gpu'][:4]}", 0.0) / 8
        backward, layers = (0.75 if row["checkpointing"] == "True" else 2 / 3), [0.0]
        if row["model"] == "mpt":
            width = config["d_model"]
            layers = [4.0 * 12 * width**2] * config["n_layers"] + [4.0 * width * config["vocab_size"]]
        else:
            try:
                with torch.device("meta"):
                    model = Network(name=row["model"], config=config, input=json.loads(row["input"]), family=row["family"]).make()
            except PerfGuardError:
                continue
            gradients = (2 if row["precision"] in ("fp16", "bf16") else 4) * sum(p.numel() for p in model.parameters())
            layers = [gradients / (count := -(-gradients // (25 * 2**20)))] * count
            micro_steps, backward = 1, backward / micro_steps
        for many in others:
            times_s = (float(by_number[number]["step_time_ms"]) / 1e3 / micro_steps for number in (few, many))
            device = resolve_device(row["gpu"]).with_network(network)
            yield Pair(row["source"], device, parallel, layers, backward, few, many, *times_s)
    sizes: defaultdict[Any, dict[int, float]] = defaultdict(dict)
    for row in megatron:
        if row["method"].startswith("tp1-") and row["method"].endswith("-pp1"):
            setting = row["batch"], row["accumulation"], row["config"].partition(", 'global")[0]
            sizes[setting][int(row["gpus"])] = float(row["step_ms"]) / 1e3
    for (*_, config), times in sizes.items():
        of = ast.literal_eval(config + "}")
        gradients = 2.0 * (12 * of["layers"] * of["hidden"] ** 2 + 51200 * of["hidden"])
        if len(times) == 2:
            yield Pair("vTrain, Megatron", resolve_device("a100-80gb"), "ddp", [gradients], 2 / 3, 2, 4, times[2], times[4])


def show_steps(pairs: Sequence[Pair], record: Path | None) -> None:
    """Predict every pair with the jitter of the other sources, and show the errors."""
    found = [(pair, math.log(pair.predicted_s() / pair.few_s), math.log(pair.many_s / pair.few_s)) for pair in pairs]

    def with_jitter(jitter: float, pair: Pair, by_links: float) -> float:
        return by_links + jitter * (largest_normal(pair.many) - largest_normal(pair.few))

    def jitter_without(source: str) -> float:
        """The one with the least median error, other sources alike."""

        def loss(jitter: float) -> float:
            of: defaultdict[str, list[float]] = defaultdict(list)
            for pair, by_links, measured in found:
                of[pair.source].append(abs(measured - with_jitter(jitter, pair, by_links)))
            return statistics.fmean(statistics.median(own) for name, own in of.items() if name != source)

        return min((step / 1000 for step in range(61)), key=loss)

    errors: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
    jitters = {source: jitter_without(source) for source in {"", *(pair.source for pair in pairs)}}
    for pair, by_links, measured in found:
        guesses = 0.0, by_links, with_jitter(jitters[pair.source], pair, by_links)
        row = [math.expm1(measured), *(abs(math.expm1(guess - measured)) for guess in guesses)]
        for name in (f"{pair.source}, {pair.parallel}", f"all, to {'8 or fewer' if pair.many <= 8 else '16 or more'} GPUs", "all"):
            errors[name].append(row)
    lines = []
    for name, own in sorted(errors.items(), key=lambda item: (item[0].startswith("all"), -len(item[0]))):
        slower, *others = ([row[at] for row in own] for at in range(4))
        cells = (f"{statistics.fmean(error):.1%} / {statistics.median(error):.1%}" for error in others)
        lines.append([name, str(len(own)), f"{statistics.median(slower):+.1%}", *cells])
    columns = ["source", "pairs", "slower, median", "error as on few GPUs, mean / median", "with links", "with links and jitter"]
    show("links-steps", columns, lines, record=record)
    print(f"The jitter of all sources is {jitters['']:.3f}.")


def main() -> None:
    """Show both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="*", help="collectives.csv.gz, runs.csv.gz and vtrain.csv.gz, which the repository does not have")
    arguments = parser.parse_args()
    if len(arguments.tables) != 3:
        print("Skipped: the three tables are not given.")
        return
    collectives, runs, megatron = (read_table(path)[1] for path in arguments.tables)
    show_collectives(collectives, arguments.record)
    show_steps([*pairs_of(runs, megatron)], arguments.record)


if __name__ == "__main__":
    main()

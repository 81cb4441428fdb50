"""The time of collectives, and of steps on many GPUs beside few: the constants of `perfguard/collectives.py`, and their errors.

    python benchmarks/links.py COLLECTIVES RUNS      # half an hour; without the tables it does nothing

Collectives (microsoft/vidur): fitted on some systems, judged on others. Steps: published runs that differ in the number of GPUs
alone. Each is dry-run with DDP or FSDP2 and predicted. The jitter is that of the other sources.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _record import parser_of, show
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from perfguard import OpGraph, TensorSpec, Workload, load_predictor, resolve_device
from perfguard.capture.trial import capture
from perfguard.collectives import LINKS, largest_normal, ring_factor
from perfguard.measure.step import step_of
from perfguard_research.csv_rows import read_table
from perfguard_research.tables import MeasuredRow, run_row

sys.path.append(str(Path(__file__).parents[1]))
from tests.perfguard.capture.toy_ranks import language_model, sharded

Row = Mapping[str, str]
NETWORKS = {"FlagOpen a100": 25e9, "mosaicml a100": 200e9, "mosaicml h100": 400e9}
"""Bytes per second of a node of eight: 200 Gbit/s by FlagPerf's rows, 1600 and 3200 by llm-foundry's headings."""
SAME = ("source", "model", "config", "gpu", "precision", "layout", "optimizer", "checkpointing", "accumulation", "batch_size",
        "input")  # fmt: skip


def show_collectives(rows: Sequence[Row], record: Path | None) -> None:
    """Fit latency and efficiency within nodes from 1 MiB on, each octave of sizes of each system alike."""
    octaves: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)
    least: defaultdict[Any, float] = defaultdict(lambda: math.inf)
    for row in rows:
        size, seconds, ranks, in_node = int(row["bytes"]), float(row["latency_ms"]) / 1e3, row["num_gpus"], row["gpus_per_node"]
        if row["collective"] == "send_recv":
            least[row["system"], in_node] = min(least[row["system"], in_node], seconds)
        elif ranks == in_node and size >= 2**20:
            peak = resolve_device(f"{row['system'][:4]}-sxm-80gb").link_bytes_per_s
            key = row["system"], f"{row['system'][:4]}, {ranks} GPUs", size.bit_length()
            octaves[key].append((size * ring_factor("allreduce", int(ranks)) / peak, seconds))
    middle = {key: np.median(np.array(found), axis=0) for key, found in octaves.items()}
    lines = []
    for fit, judge in (("", ""), ("a100", "h100"), ("h100", "a100"), ("2 GPUs", "8 GPUs")):
        fitted, judged = (np.array([row for key, row in middle.items() if of in key[1]]) for of in (fit, judge))
        scaled = np.stack([1 / fitted[:, 1], fitted[:, 0] / fitted[:, 1]], axis=1)  # latency + at_peak / efficiency = seconds
        latency_s, slowness = np.linalg.lstsq(scaled, np.ones(len(scaled)), rcond=None)[0]
        error = np.abs((latency_s + judged[:, 0] * slowness) / judged[:, 1] - 1).mean()
        lines.append([fit or "all", judge or "all", f"{latency_s * 1e6:.0f} µs", f"{1 / slowness:.2f}", f"{error:.1%}"])
    show("links-collectives", ["fitted on", "judged on", "latency", "efficiency", "error from 1 MiB on"], lines, record=record)
    hops = [least[system, "1"] - least[system, "2"] for system in {system for system, _ in least}]
    print(f"A hop between nodes takes {statistics.median(hops) * 1e6:.0f} µs, the median of {len(hops)} systems.")


def graph_of(row: MeasuredRow, parallel: str, ranks: int) -> OpGraph:
    """The dry run of one rank."""

    def objective() -> None:
        dist.init_process_group("nccl", rank=0, world_size=ranks)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = row.tf32 == "on"
        network: Any = row.network
        sizes = network.config
        if network.name == "mpt":
            width, vocabulary, half = sizes["d_model"], sizes["vocab_size"], torch.bfloat16
            model = language_model(width, sizes["n_layers"], heads=sizes["n_heads"], checkpoints=network.checkpointing)
            model[0], model[-1] = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
            policy = MixedPrecisionPolicy(half, torch.float32 if row.precision == "amp-bf16" else half)
            sharded(model.cuda(), "cuda", mp_policy=policy, reshard_after_forward=parallel == "fsdp-full")
            tokens = TensorSpec((row.batch_size, network.input["seq_len"]), "int64")
            loss: Any = lambda out, to: F.cross_entropy(out.flatten(0, 1), to.flatten())  # noqa: E731
            workload = Workload(model, tokens, tokens, loss, torch.optim.AdamW)
        else:
            dtype = torch.float16 if row.precision == "fp16" else torch.float32
            workload = row.workload(nn.parallel.DistributedDataParallel(network.make().cuda().to(dtype)))
        step = step_of(replace(workload, accumulation=1, cudnn_benchmark=False))
        for _ in range(4):
            step()

    return capture(objective, row.device).graph


def settings_of(runs: Sequence[Row]) -> Iterator[tuple[MeasuredRow, str, dict[int, float]]]:
    """What ran on several numbers of GPUs with DDP or FSDP, and the seconds of a step by their number."""
    found: defaultdict[Any, dict[int, Row]] = defaultdict(dict)
    for row in runs:
        if row["step_time_ms"] and row["mode"] == "train":
            found[tuple(row[name] for name in SAME)].setdefault(int(row["num_gpus"]), row)
    for rows in found.values():
        few, parallel = run_row(rows[min(rows)], "run"), rows[max(rows)]["parallel"]
        if len(rows) > 1 and parallel in ("ddp", "fsdp-full", "fsdp-grad-op"):
            yield few, parallel, {ranks: float(row["step_time_ms"]) / 1e3 / few.accumulation for ranks, row in rows.items()}


def show_steps(runs: Sequence[Row], record: Path | None) -> None:
    """Predict each setting on all its numbers of GPUs, and show the errors on many, from the time on few and without it."""
    predictor, graphs, found = load_predictor(), dict[Any, OpGraph](), defaultdict[str, list[tuple[float, ...]]](list)
    for row, parallel, times_s in settings_of(runs):
        key, predicted = (row.network.key, row.batch_size, row.precision, row.tf32, row.gpu, parallel), {}
        device = row.device.with_network(NETWORKS.get(f"{row.source.partition('/')[0]} {row.gpu[:4]}", 0.0) / 8)
        try:
            graphs[key] = graph = graphs.get(key) or graph_of(row, parallel, max(times_s))
        except Exception as error:  # a model that this machine's packages do not have, or that a dry run refuses
            print(f"left out: {row.model} of {row.source}: {error}"[:150])
            continue
        for ranks in times_s:  # the shards stay those of the most GPUs
            group = {"ranks": (ranks, min(ranks, 8))}
            ops = (op._replace(attributes={**op.attributes, **group}) if "ranks" in op.attributes else op for op in graph.ops)
            predicted[ranks] = math.log(predictor.predict(replace(graph, ops=tuple(ops)), device).step_time.median)
        few, *others = sorted(times_s)
        for many in others:
            z, first_s = largest_normal(many) - largest_normal(few), math.log(times_s[few])
            by_model, alone = predicted[many] - predicted[few], predicted[many] - first_s
            found[row.source].append((math.log(times_s[many]) - first_s, by_model - LINKS.jitter * z, z, alone))
    columns = {name: np.array(rows).T for name, rows in found.items()}  # each of shape (4, pairs)
    jitter = {name: float(np.median((slower - links) / z)) for name, (slower, links, z, _) in columns.items()}
    errors: dict[str, Any] = {}  # each of shape (5, pairs), after how much slower the step was measured
    for name, (slower, links, z, alone) in columns.items():
        elsewhere = statistics.median(of for other, of in jitter.items() if other != name)
        guesses = np.stack([0 * z, links, links + elsewhere * z, alone])
        errors[name] = np.vstack([np.expm1(slower), np.abs(np.expm1(guesses - slower))])
    errors["all"] = np.concatenate([*errors.values()], axis=1)
    lines = []
    for name, (slower, *others) in errors.items():
        cells = (f"{error.mean():.1%} / {np.median(error):.1%}" for error in others)
        lines.append([name, str(len(slower)), f"{np.median(slower):+.1%}", *cells])
    head = ["source", "pairs", "slower", "as on few GPUs, mean / median error", "links", "links and jitter", "no measured time"]
    show("links-steps", head, lines, record=record)
    print(f"The jitter is {statistics.median(jitter.values()):.3f}, the median of {len(jitter)} sources.")


def main() -> None:
    """Show both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="that of collectives, and that of runs")
    arguments = parser.parse_args()
    if len(arguments.tables) != 2:
        print("Skipped: the two tables are not given.")
        return
    warnings.simplefilter("ignore")
    collectives, runs = (read_table(path)[1] for path in arguments.tables)
    show_collectives(collectives, arguments.record)
    show_steps(runs, arguments.record)


if __name__ == "__main__":
    main()

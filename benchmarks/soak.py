"""What a long study leaves behind: memory, descriptors, threads, processes and files over thousands of different structures.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --proposals 5000                  # hours
    OMP_NUM_THREADS=1 python benchmarks/soak.py --proposals 1500 --samples FILE   # short; a run that was cut off is not lost

Each proposal is a perceptron of other widths, so no two trials share a graph. The guarded study dry-runs each, judges it, and
trains what fits for two steps. The plain study is Optuna's own: its objective prunes what does not fit by its number of
parameters. So the difference of the two is PerfGuard's. Each study has a process and a temporary folder of its own.

Resident memory is that of the study's process. "Dry runs" is that of its child processes. A decision is the processor time of a
pruned trial, with its dry run, because other work on the machine shows in a clock. Files in /dev/shm are those of all processes
of the machine. With --samples, what was sampled is appended to a file, and a later call with the same file
and the same options reads a study that is complete from there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import optuna
import psutil
import torch
from _record import parser_of, show
from torch import nn

import perfguard_optuna

_STUDIES = ("plain", "guarded")
_BUDGET_BYTES = 6 * 2**20
_BYTES_OF_PARAMETER = 16
"""Of AdamW in float32: the parameter, its gradient and two states."""
_QUANTITIES = {
    "resident_bytes": ("resident memory, MiB", 2**20),
    "children_bytes": ("memory of dry runs, MiB", 2**20),
    "descriptors": ("open descriptors", 1),
    "threads": ("threads", 1),
    "children": ("child processes", 1),
    "temporary_files": ("files in the temporary folder", 1),
    "shared_files": ("files in /dev/shm, of all processes", 1),
    "decision_ms": ("median processor time of a decision, ms", 1),
}

Sample = Mapping[str, float]


class Objective:
    """Trains a perceptron of a structure of its own for two steps.

    Args:
        num_blocks: layers, each with a norm and an activation.
        prunes: whether it prunes itself what does not fit into the budget.
    """

    def __init__(self, num_blocks: int, *, prunes: bool) -> None:
        self._num_blocks = num_blocks
        self._prunes = prunes

    def __call__(self, trial: optuna.Trial) -> float:
        widths = [trial.suggest_int(f"width_{at}", 64, 1024, log=True) for at in range(4)]
        rate = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
        sizes = [16, *(widths[at % 4] for at in range(self._num_blocks))]
        pairs = [*itertools.pairwise(sizes)]
        num_parameters = sum((before + 3) * after for before, after in pairs)
        if self._prunes and _BYTES_OF_PARAMETER * num_parameters > _BUDGET_BYTES:
            raise optuna.TrialPruned
        blocks = [nn.Sequential(nn.Linear(before, after), nn.LayerNorm(after), nn.GELU()) for before, after in pairs]
        model = nn.Sequential(*blocks, nn.Linear(sizes[-1], 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        return 0.0


def samples_of(study_kind: str, num_proposals: int, num_blocks: int, every: int) -> Iterator[Sample]:
    """Run a study in this process, and yield a sample after each ``every`` proposals."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    sampler, process = optuna.samplers.RandomSampler(seed=0), psutil.Process()
    decisions_s: list[float] = []
    found: list[Sample] = []
    before_s = [_processor_s(process)]

    def sample(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        now_s = _processor_s(process)
        if trial.state == optuna.trial.TrialState.PRUNED:
            decisions_s.append(now_s - before_s[0])
        before_s[0] = now_s
        if (trial.number + 1) % every:
            return
        gc.collect()
        children = process.children(recursive=True)
        temporary = Path(tempfile.gettempdir())
        found.append({
            "proposals": trial.number + 1,
            "launched": sum(one.state == optuna.trial.TrialState.COMPLETE for one in study.get_trials(deepcopy=False)),
            "resident_bytes": process.memory_info().rss,
            "children_bytes": sum(_resident_bytes(child) for child in children),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "children": len(children),
            "temporary_files": sum(1 for _ in temporary.rglob("*")),
            "shared_files": sum(1 for _ in Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else 0,
            "decision_ms": 1000 * statistics.median(decisions_s or [0.0]),
        })  # fmt: skip
        decisions_s.clear()
        print(json.dumps(found[-1]), flush=True)

    objective = Objective(num_blocks, prunes=study_kind == "plain")
    if study_kind == "plain":
        plain = optuna.create_study(sampler=sampler)
        plain.optimize(objective, num_proposals, callbacks=[sample])
    else:
        guarded = perfguard_optuna.create_study(sampler=sampler)
        pruner = perfguard_optuna.PerfGuardPruner(gpu="cpu", memory_budget=_BUDGET_BYTES, log=False)
        guarded.optimize(objective, num_proposals, pruner=pruner, count="proposed", callbacks=[sample])
    yield from found


def _processor_s(process: psutil.Process) -> float:
    """Return the processor time of a process and of its children, with those that they have waited for."""
    total_s = 0.0
    for one in (process, *process.children()):
        try:
            total_s += sum(one.cpu_times()[:4])
        except psutil.Error:
            continue
    return total_s


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def run(study_kind: str, arguments: argparse.Namespace) -> list[Sample]:
    """Run a study in a process and a temporary folder of its own, and return its samples."""
    options = ["--proposals", arguments.proposals, "--blocks", arguments.blocks, "--every", arguments.every]
    found: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--study", study_kind, *map(str, options)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": folder}) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found.append(json.loads(line))
                _keep(arguments, study_kind, found[-1])
                resident = found[-1]["resident_bytes"] / 2**20
                print(f"{study_kind}: {found[-1]['proposals']} proposals, {resident:.0f} MiB", file=sys.stderr, flush=True)
    return found


def _keep(arguments: argparse.Namespace, study_kind: str, sample: Sample) -> None:
    if arguments.samples is not None:
        row = {"study": study_kind, "blocks": arguments.blocks, "of": arguments.proposals, **sample}
        with arguments.samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def kept(study_kind: str, arguments: argparse.Namespace) -> list[Sample]:
    """Return the samples of a study that an earlier call has completed. Empty: there is none."""
    if arguments.samples is None or not arguments.samples.exists():
        return []
    rows = [json.loads(line) for line in arguments.samples.read_text(encoding="utf-8").splitlines()]
    wanted = {"study": study_kind, "blocks": arguments.blocks, "of": arguments.proposals}
    found = [row for row in rows if wanted.items() <= row.items()]
    begins = [at for at, row in enumerate(found) if row["proposals"] == found[0]["proposals"]]
    latest = found[begins[-1] :] if begins else []
    return latest if latest and (latest[-1]["proposals"] == arguments.proposals or arguments.report) else []


def rows_of(studies: Mapping[str, Sequence[Sample]], *, settled: int) -> Iterator[list[str]]:
    """Return a row for each quantity: both studies after ``settled`` proposals and at the end, and how much more one grew."""
    ends = {
        kind: (next((one for one in samples if one["proposals"] >= settled), samples[-1]), samples[-1])
        for kind, samples in studies.items()
    }
    for name, (words, unit) in _QUANTITIES.items():
        cells = [f"{one[name] / unit:,.0f}" for kind in _STUDIES for one in ends[kind]]
        plain, guarded = ((last[name] - first[name]) / unit for first, last in (ends[kind] for kind in _STUDIES))
        yield [words, *cells, f"{guarded - plain:+,.1f}"]
    first, last = ends["guarded"]
    trials = max(1, last["proposals"] - first["proposals"])
    grown = {kind: (ends[kind][1]["resident_bytes"] - ends[kind][0]["resident_bytes"]) / 2**10 / trials for kind in _STUDIES}
    yield ["growth of a trial, KiB", "", f"{grown['plain']:,.1f}", "", f"{grown['guarded']:,.1f}",
           f"{grown['guarded'] - grown['plain']:+,.1f}"]  # fmt: skip
    yield ["trials that ran", *(f"{one['launched']:,.0f}" for kind in _STUDIES for one in ends[kind]), ""]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--proposals", type=int, default=5000)
    parser.add_argument("--blocks", type=int, default=24, help="layers of the perceptrons: 40 operators each")
    parser.add_argument("--every", type=int, default=50, help="proposals between two samples")
    parser.add_argument("--settled", type=int, default=300, help="proposals after which memory is to be flat")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="keep the samples there, one a line")
    parser.add_argument("--report", action="store_true", help="run nothing: show what FILE has, of a study that was cut off, too")
    parser.add_argument("--study", choices=_STUDIES, help="run this one here, and print its samples")
    arguments = parser.parse_args()
    if arguments.study is not None:
        for _ in samples_of(arguments.study, arguments.proposals, arguments.blocks, arguments.every):
            pass
        return
    studies = {}
    for kind in _STUDIES:
        studies[kind] = kept(kind, arguments) or ([] if arguments.report else run(kind, arguments))
        if not studies[kind]:
            parser.error(f"There are no samples of the {kind} study.")
    # What is compared must have the same number of proposals.
    last = min(samples[-1]["proposals"] for samples in studies.values())
    studies = {kind: [one for one in samples if one["proposals"] <= last] for kind, samples in studies.items()}
    ends = [f"{kind}, {number:,.0f} proposals" for kind in _STUDIES for number in (arguments.settled, last)]
    columns = ["quantity", *ends, "the guard's growth"]
    show("soak", columns, [*rows_of(studies, settled=arguments.settled)], record=arguments.record)


if __name__ == "__main__":
    main()

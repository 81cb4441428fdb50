"""Follow one trial through PerfGuard: the files and functions that it enters.

    python benchmarks/one_trial.py [--list]

The fourth trial of a study on the CPU, with a network of four layers and `build`, under `sys.setprofile`. A function counts once,
however often it is called. Before the issue "Half the house" it entered 72 files and 665 functions (218e52c, 2026-11-24).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import perfguard_optuna
from perfguard import TensorSpec, Workload
from perfguard_optuna import PerfGuardPruner

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(f"{ROOT}/{folder}/" for folder in ("perfguard", "integrations", "models"))


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10))


def build(params: Any) -> Workload:
    return Workload(
        make_model(params["width"]),
        (32, 64),
        TensorSpec((32,), "int64"),
        nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        steps=5,
    )


def objective(trial: Any) -> float:
    model = make_model(trial.suggest_int("width", 16, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also list the functions of each file")
    arguments = parser.parse_args()
    study = perfguard_optuna.create_study()
    pruner = PerfGuardPruner(gpu="cpu", build=build, log=False)
    study.optimize(objective, 3, pruner=pruner)
    entered: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            entered[frame.f_code] += 1

    sys.setprofile(note)
    study.optimize(objective, 1, pruner=pruner)
    sys.setprofile(None)
    functions = set(entered)  # generators and, before Python 3.12, comprehensions are functions of their own
    files = Counter(code.co_filename for code in functions)
    for file, number in sorted(files.items()):
        print(f"{number:4d}  {Path(file).relative_to(ROOT)}")
        if arguments.list:
            for code in sorted((code for code in functions if code.co_filename == file), key=lambda code: code.co_firstlineno):
                print(f"          {code.co_firstlineno:4d} {code.co_name} ({entered[code]})")
    print(f"{len(files)} files, {len(functions)} functions, {sum(entered[code] for code in functions):,} calls")


if __name__ == "__main__":
    main()

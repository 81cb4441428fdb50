"""How long commands take to start: processor time and peak memory, beside `import torch` in the same run.

    python benchmarks/start_time.py    # best of three runs; a minute on two cores

Each command is a process of its own. Its time is user and system time, which other work on the machine changes less than the time
on the wall. `python -X importtime -m perfguard.cli predict ...` shows what a command imports.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _record import parser_of, show

ROOT = Path(__file__).parent.parent
MODELS = str(ROOT / "examples" / "models.py")
_CLI = ("-m", "perfguard.cli")
_PRUNER = """
import optuna, torch
from perfguard_optuna import PerfGuardPruner
PerfGuardPruner("a100", build=lambda params: None, log="{log}")
"""
_STARTER = """
import os, sys
nowhere = os.open(os.devnull, os.O_WRONLY)
process = os.fork()
if not process:
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
_, _, usage = os.wait4(process, 0)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


class Cost(NamedTuple):
    """What one process took."""

    seconds: float
    """User and system time."""
    peak_bytes: int
    """Largest resident set."""


def cost_of(words: Sequence[str]) -> Cost:
    """Run Python with ``words``, whatever its exit status.

    A bare Python starts it: a process counts the memory that its parent had when it was forked.
    """
    done = subprocess.run([sys.executable, "-S", "-c", _STARTER, *words], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, done.stdout.split())
    return Cost(seconds, int(kilobytes) * 1024)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each command; the least counts (default: 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, tuple[str, ...]] = {
            "python -c pass": ("-c", "pass"),
            "import torch": ("-c", "import torch"),
            "help": (*_CLI, "--help"),
            "wrong argument": (*_CLI, "predict", f"{MODELS}:resnet", "--set", "width"),
            "missing file": (*_CLI, "predict", "missing.py:build"),
            "gpus": (*_CLI, "gpus"),
            "predict": (*_CLI, "predict", f"{MODELS}:resnet", "--gpu", "a100"),
            "import optuna, torch": ("-c", "import optuna, torch"),
            "first pruner": ("-c", _PRUNER.format(log=Path(folder) / "log.db")),
        }
        runs: dict[str, list[Cost]] = {name: [] for name in commands}
        for _ in range(arguments.repeats):
            for name, words in commands.items():
                runs[name].append(cost_of(words))
    best = {name: min(costs) for name, costs in runs.items()}
    torch_s = best["import torch"].seconds
    rows = [
        [name, f"{cost.seconds:.2f} s", f"{cost.seconds / torch_s:.2f}", f"{cost.peak_bytes / 2**20:.0f} MiB"]
        for name, cost in best.items()
    ]
    beyond_s = best["first pruner"].seconds - best["import optuna, torch"].seconds
    rows.append(["first pruner, beyond those imports", f"{beyond_s:.2f} s", f"{beyond_s / torch_s:.2f}", "-"])
    show("starting", ["command", "processor time", "times import torch", "peak memory"], rows, record=arguments.record)


if __name__ == "__main__":
    main()

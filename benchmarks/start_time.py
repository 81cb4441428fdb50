"""How long commands take to start, and what they import: processor time and peak memory, beside `import torch` in the same run.

    python benchmarks/start_time.py                  # the table, best of three runs; a minute on two cores
    python benchmarks/start_time.py --tree predict   # and what `perfguard predict` imports, from 30 ms

Each command is a process of its own. Its time is user and system time, which other work on the machine changes less than the time
on the wall. Seconds of the tree are on the wall, as `python -X importtime` gives them.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _record import parser_of, show
from rich.console import Console
from rich.tree import Tree

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
_TORCHVISION = """
import torch, torchvision
from perfguard import Workload
def build(params):
    model = torchvision.models.resnet50()
    return Workload(model, (32, 3, 224, 224), loss=lambda output: output.mean(), optimizer=torch.optim.SGD)
"""
_IMPORTED = re.compile(r"import time: +\d+ \| +(\d+) \| ( *)(\S+)")
_LEAST_US, _DEEPEST = 30_000, 5


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


def import_tree(words: Sequence[str], title: str) -> Tree:
    """The modules that Python with ``words`` imports, below the module that asks for them first."""
    done = subprocess.run([sys.executable, "-X", "importtime", *words], capture_output=True, text=True, check=False)
    found = [(int(us), len(indent) // 2, name) for us, indent, name in _IMPORTED.findall(done.stderr)]
    tree = Tree(title)
    branches = [tree]
    for us, depth, name in reversed(found):  # a module stands after what it imports
        if us >= _LEAST_US and depth < min(len(branches), _DEEPEST):
            del branches[depth + 1 :]
            branches.append(branches[depth].add(f"{name}  {us / 1e6:.2f} s"))
    return tree


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each command; the least counts (default: 3)")
    parser.add_argument("--tree", action="append", default=[], help="a row, for instance help: show what it imports; repeatable")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "net.py"
        script.write_text(_TORCHVISION)
        commands: dict[str, tuple[str, ...]] = {
            "python -c pass": ("-c", "pass"),
            "import torch": ("-c", "import torch"),
            "help": (*_CLI, "--help"),
            "wrong argument": (*_CLI, "predict", f"{MODELS}:resnet", "--set", "width"),
            "missing file": (*_CLI, "predict", "missing.py:build"),
            "gpus": (*_CLI, "gpus"),
            "predict": (*_CLI, "predict", f"{MODELS}:resnet", "--gpu", "a100"),
            "predict, torchvision": (*_CLI, "predict", f"{script}:build", "--gpu", "a100"),
            "import optuna, torch": ("-c", "import optuna, torch"),
            "first pruner": ("-c", _PRUNER.format(log=Path(folder) / "log.db")),
        }
        if importlib.util.find_spec("torchvision") is None:
            del commands["predict, torchvision"]
        runs: dict[str, list[Cost]] = {name: [] for name in commands}
        for _ in range(arguments.repeats):
            for name, words in commands.items():
                runs[name].append(cost_of(words))
        trees = [import_tree(commands[name], name) for name in arguments.tree]
    best = {name: min(costs) for name, costs in runs.items()}
    torch_s = best["import torch"].seconds
    rows = [
        [name, f"{cost.seconds:.2f} s", f"{cost.seconds / torch_s:.2f}", f"{cost.peak_bytes / 2**20:.0f} MiB"]
        for name, cost in best.items()
    ]
    beyond_s = best["first pruner"].seconds - best["import optuna, torch"].seconds
    rows.append(["first pruner, beyond those imports", f"{beyond_s:.2f} s", f"{beyond_s / torch_s:.2f}", "-"])
    show("starting", ["command", "processor time", "times import torch", "peak memory"], rows, record=arguments.record)
    console = Console()
    for tree in trees:
        console.print(tree)


if __name__ == "__main__":
    main()

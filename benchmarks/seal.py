"""What the seal of a dry run costs, on each of its rungs, beside a fork without one.

    python benchmarks/seal.py

Each rung is entered by children of a process that has imported PyTorch and holds some gigabytes, as the server of dry runs may.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress

import numpy as np
import safetensors.torch  # noqa: F401 - the server has imported it, too
from _record import parser_of, show

from perfguard.capture.seal import RUNGS, remove_scratch, sealed


def seconds_of(enter: Callable[[], object]) -> float:
    """Return the seconds from a fork to the end of a child that does nothing but to enter."""
    began = time.perf_counter()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            enter()
        os._exit(0)
    os.waitpid(child, 0)
    remove_scratch(child)
    return time.perf_counter() - began


def enter_rung() -> None:
    """Enter the strongest rung that the environment allows."""
    with sealed():
        pass


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--tries", type=int, default=20, metavar="N", help="children of each kind (default: 20)")
    parser.add_argument("--gigabytes", type=float, default=2.0, metavar="GB", help="what the process holds (default: 2)")
    arguments: argparse.Namespace = parser.parse_args()
    held = np.ones(int(arguments.gigabytes * 1e9 / 8))
    kinds: dict[str, Callable[[], object]] = {"a fork alone": nullcontext} | dict.fromkeys(RUNGS, enter_rung)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(arguments.tries):
        for name, enter in kinds.items():
            os.environ["PERFGUARD_SEAL"] = name
            times[name].append(1e3 * seconds_of(enter))
    rows = [[name, f"{statistics.median(found):.0f}", f"{max(found):.0f}"] for name, found in times.items()]
    assert held[0] == 1
    show("seal", ["what a child does", "median, ms", "longest, ms"], rows, record=arguments.record)


if __name__ == "__main__":
    main()

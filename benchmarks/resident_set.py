"""How much does the peak of a process's resident set scatter from one equal run to the next?

    OMP_NUM_THREADS=1 python benchmarks/resident_set.py

Perceptrons of five sizes train on the CPU, one after the other in one process. Every third run is of one configuration,
and the others are of random ones, as in a study. The scatter is that of the logarithms of the peaks of this configuration: the
standard deviation, and the one that follows from the median distance to the median.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from _record import parser_of, show
from beside_limit import BATCHES, BEST, DEPTHS, WIDTHS, Config, measured_peak

from perfguard.physics import scatter_of_readings
from perfguard.predictor import SIGMA_OF_MAD
from perfguard.quantities import format_bytes

FACTORS = (0.25, 0.5, 1.0, 2.0, 3.0)
"""On the widths."""


def read(factor: float, num_runs: int) -> list[int]:
    """Peaks of the one configuration, in bytes, at ``factor`` times its width."""

    def scaled(config: Config) -> Config:
        return round(config[0] * factor), config[1], config[2]

    others = list(product(WIDTHS, DEPTHS, BATCHES))
    chosen = random.Random(0)
    peaks = []
    for run in range(num_runs):
        is_the_one = run % 3 == 0
        peak = measured_peak(scaled(BEST if is_the_one else chosen.choice(others)))
        if is_the_one:
            peaks.append(peak)
    return peaks


def main() -> None:
    """Measure each size in a process of its own, and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=120, help="runs of each size, of which a third count")
    arguments = parser.parse_args()
    rows = []
    for factor in FACTORS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks = pool.submit(read, factor, arguments.runs).result()
        middle = statistics.median(peaks)
        logs = [math.log(peak / middle) for peak in peaks]
        rows.append([
            format_bytes(middle),
            f"{statistics.stdev(logs):.1%}",
            f"{SIGMA_OF_MAD * statistics.median(map(abs, logs)):.1%}",
            f"{math.exp(max(logs)) - 1:+.0%}",
            f"{scatter_of_readings(middle, 'cpu'):.1%}",
        ])  # fmt: skip
    columns = ["peak, median", "standard deviation", "from the median distance", "highest", "assumed"]
    show("resident-set", columns, rows, record=arguments.record)


if __name__ == "__main__":
    main()

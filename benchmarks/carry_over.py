"""Does what a network takes beyond its roofline carry over from one GPU to another?

    python benchmarks/carry_over.py TABLE --cache .perfguard-cache

Of networks that were measured on two GPUs in the same setting: the factor (measured / roofline) of the first times the roofline
of the second, against what was measured there. No model is trained. GuardNet answers so for GPUs that it has never seen.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from perfguard_models.features.step import STEP_FEATURES
from perfguard_training.dataset import dataset_of


def main() -> None:
    """Print the errors for each pair of GPUs and each mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    arguments = parser.parse_args()
    roofline = STEP_FEATURES.index("log_roofline")
    factors: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for run in dataset_of([arguments.table], "sums", cache=arguments.cache).runs:
        if "time" in run.labels:
            factors[f"{run.mode} {run.variant}", run.structure][run.gpu] = run.labels["time"] - float(run.view["sums"][roofline])
    pairs: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (setting, _), by_gpu in factors.items():
        for first, second in itertools.permutations(sorted(by_gpu), 2):
            pairs[setting, first, second].append(by_gpu[first] - by_gpu[second])
    print(f"{datetime.date.today()}")
    for (setting, first, second), found in sorted(pairs.items()):
        logs = np.array(found)
        errors = np.abs(np.exp(logs) - 1)
        factor = math.exp(np.quantile(np.abs(logs), 0.9))
        print(f"{setting}, {first} to {second}: {len(found)} networks, error mean {errors.mean():.1%}, ", end="")
        print(f"median {np.median(errors):.1%}, 90% within a factor of {factor:.2f}")


if __name__ == "__main__":
    main()

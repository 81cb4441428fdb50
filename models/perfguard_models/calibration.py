"""The errors of a predictor, by group: split-conformal intervals for runs that it has not seen.

A score is |measured - predicted| over a difficulty, in logarithms. The difficulty is the spread of the predictor's members, and
at least a floor. The quantile of the scores of held-out runs gives intervals that hold for exchangeable runs (Vovk et al. 2005).
Scores over a difficulty are from Lei et al. 2018, section 5.2. Groups are quantity, GPU and mode where there are enough runs, and
quantity alone elsewhere. Unseen GPUs have a group of their own, from folds in which a GPU was held out. Single operators have
their own groups, because they are many and their errors would outnumber those of whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

NEW_GPU = "new gpu"
CPU = "cpu"
"""Begins the groups of CPUs, and is the group of those without a scale of their own."""
OPERATOR = "operator"
"""The group of single operators."""


def on_new_gpu(group: str) -> str:
    """The group that replaces ``group`` on a GPU without training rows."""
    return f"{NEW_GPU} {OPERATOR}" if group == OPERATOR else NEW_GPU


class Calibration(NamedTuple):
    """Converts a spread into a standard deviation."""

    floor: Mapping[str, float]
    """By target: a spread counts as at least so much, because members can agree by chance."""
    scale: Mapping[str, float]
    """Scales by "target", for groups without a scale of their own, and by "target/group"."""

    def scale_of(self, target: str, group: str, *, known_gpu: bool = True) -> float | None:
        """Factor on the difficulty of a run of ``group``; None: there were no runs to fit it to."""
        others = self.scale.get(f"{target}/{CPU}") if group.startswith(CPU) else None
        others = self.scale.get(target) if others is None else others
        return self.scale.get(f"{target}/{group if known_gpu else on_new_gpu(group)}", others)

    def log_sigma(self, target: str, group: str, spread: float, *, known_gpu: bool = True) -> float:
        """The standard deviation whose central 90% holds."""
        scale = self.scale_of(target, group, known_gpu=known_gpu)
        difficulty = math.hypot(spread if math.isfinite(spread) else 0.0, self.floor.get(target, 0.1))
        return (1.0 if scale is None else scale) * difficulty

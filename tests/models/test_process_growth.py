"""What a process adds to the memory of a step on a CPU is a sum, which small steps show and large ones do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from perfguard_models.process_growth import MIB, Growth, growth_of, weighted_median


@pytest.mark.parametrize(
    ("predicted", "read", "expected"),
    [
        ([], [], 0.0),
        ([0.1], [6.1], 6.0),  # one tiny network is enough
        ([0.1, 0.1, 0.7], [3.1, 6.1, 9.7], 6.0),
        ([300.0], [450.0], 0.0),  # by a factor, or by a sum: a large step does not say
        ([300.0, 0.1], [450.0, 6.1], 6.0),
        ([0.1, 0.1, 0.1], [0.05, 0.1, 0.1], 0.0),  # memory that the process had kept
        ([0.1], [5000.0], 64.0),  # another program
    ],
)
def test_growth_is_the_excess_of_small_steps(predicted: Sequence[float], read: Sequence[float], expected: float) -> None:
    growth = growth_of(MIB * np.array(predicted), MIB * np.array(read), np.full(len(predicted), 0.4))
    assert growth.num_bytes / MIB == pytest.approx(expected, abs=0.1)


def test_growth_is_unsure_after_one_trial_and_as_unsure_as_trials_scatter_later() -> None:
    def of(*read: float) -> Growth:
        return growth_of(np.full(len(read), 0.1 * MIB), MIB * np.array(read), np.full(len(read), 0.4))

    assert of(6.1).sigma_bytes == pytest.approx(3 * MIB)
    assert of(*[6.1] * 20).sigma_bytes < 0.5 * MIB
    assert of(*[3.1, 6.1, 9.1] * 20).sigma_bytes > 3 * MIB


def test_weighted_median_by_hand() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert weighted_median(values, np.ones(3)) == 2.0
    assert weighted_median(values, np.array([5.0, 1.0, 1.0])) == 3.0

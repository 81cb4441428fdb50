"""A summary of what GuardNet's weights for memory were fitted to, so that a refinement does not cost what was known.

It has some steps of each setting, drawn at random, and the weights' predictions for them. The refinement takes them for runs of
which the weights were right: pseudorehearsal (Robins 1995), "learning without forgetting" (Li and Hoiem 2016). No measurement is
in it. `perfguard_research.summary` makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from perfguard.exceptions import PredictorError
from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.weight_files import check_hash, read_pair

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

NAME = "memory-summary"


class Summary(NamedTuple):
    """N steps on GPUs, and the weights' predictions of their memory."""

    device_ids: npt.NDArray[np.str_]  # shape: (N,)
    sums: npt.NDArray[np.float32]  # shape: (N, len(STEP_FEATURES))
    log_value: npt.NDArray[np.float64]  # shape: (N,), log bytes
    log_sigma: npt.NDArray[np.float64]  # shape: (N,), their standard deviations, as logarithms

    def of(self, device_id: str) -> Summary:
        """The steps on one GPU."""
        return Summary(*(column[self.device_ids == device_id] for column in self))


NOTHING = Summary(np.zeros(0, dtype=np.str_), np.zeros((0, len(STEP_FEATURES)), dtype=np.float32), np.zeros(0), np.zeros(0))


def read_summary(tensors: Traversable, card: Traversable, weights: str) -> Summary:
    """Read the files of `perfguard_research.summary`. The summary is empty if it was made for weights with another hash.

    Raises:
        PredictorError: if the files are missing or damaged.
    """
    data, document = read_pair(tensors, card, "GuardNet's summary", "make it again")
    check_hash(data, document, NAME)
    try:
        if document["weights"] != weights or document["sums"] != list(STEP_FEATURES):
            return NOTHING
        found = {name: tensor.numpy() for name, tensor in load_tensors(data).items()}
        return Summary(
            np.array(document["device_ids"])[found["device"]],
            found["sums"],
            found["value"].astype(np.float64),
            found["log_sigma"].astype(np.float64),
        )
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise PredictorError(f"GuardNet's summary cannot be used: {type(error).__name__}: {error}") from error

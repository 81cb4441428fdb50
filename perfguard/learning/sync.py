"""A predictor that follows the measurement log: conditioned anew on its runs, with the weights that are promoted in it.

One call takes half a second of one core for the newest 500 runs, and a few hundredths for 100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfguard._warn import warn_user
from perfguard.exceptions import LogError, LogWarning, PredictorError
from perfguard.learning.assessment import LogAssessment, assess_log
from perfguard.predictor import Predictor, Refinable

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.log import MeasurementStore


class LogSync:
    """Keeps a predictor up to date with a log.

    Args:
        predictor: which to keep up to date. A :class:`perfguard.predictor.Refinable` also takes the weights that were
            promoted in the log.
        log: from which it learns.
    """

    def __init__(self, predictor: Predictor, log: MeasurementStore) -> None:
        self._predictor = predictor
        self._log = log
        self._weights_id: str | None = None
        self._synced: dict[str, str | Device] = {}

    def update(self, device: str | Device) -> LogAssessment:
        """Condition the predictor on the runs of a device (or of all with its id), and return their assessment.

        If there are new weights, the predictor is conditioned anew on every device of an earlier call, too.
        """
        device_id = device if isinstance(device, str) else device.id
        if self._take_promoted():
            for other_id, other in self._synced.items():
                if other_id != device_id:
                    self._predictor.fine_tune(self._assessed(other).observations)
        assessment = self._assessed(device)
        self._predictor.fine_tune(assessment.observations)
        self._synced[device_id] = device
        return assessment

    def _assessed(self, device: str | Device) -> LogAssessment:
        return assess_log(self._log.observations(device), predictor=self._predictor.name)

    def _take_promoted(self) -> bool:
        """Whether the weights are others now."""
        if not isinstance(self._predictor, Refinable):
            return False
        try:
            weights_id = self._log.promoted_weights(self._predictor.lineage)
        except LogError:
            return False  # the log is away; what is in use goes on
        if weights_id == self._weights_id:
            return False
        data = None if weights_id is None else self._log.weights_data(weights_id)
        if weights_id is not None and data is None:
            return False  # it went away just now, or holds only their hash
        self._weights_id = weights_id
        try:
            self._predictor.use_refinement(data)
        except PredictorError as error:
            message = f"The weights {weights_id} that were promoted in the log are not used: {error}"
            warn_user(message, LogWarning)
            return False
        return True

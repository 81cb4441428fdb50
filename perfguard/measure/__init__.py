"""What a trial really cost."""

from perfguard.measure._measurement import Measurement, Status
from perfguard.measure._run import Run, status_of

__all__ = ["Measurement", "Run", "Status", "status_of"]

"""What a trial really cost."""

from perfguard.measure._cpu import PeakResidentSet
from perfguard.measure._measurement import Measurement, Status
from perfguard.measure._run import Run, status_of

__all__ = ["Measurement", "PeakResidentSet", "Run", "Status", "status_of"]

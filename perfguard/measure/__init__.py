"""What a trial really cost."""

from perfguard.measure._cpu import CpuProbe, PeakResidentSet
from perfguard.measure._gpu import GpuProbe
from perfguard.measure._measurement import Confidence, Measurement, Status
from perfguard.measure._probe import Probe, Reading
from perfguard.measure._run import Run, status_of
from perfguard.measure._steps import StepTimer

__all__ = [
    "Confidence",
    "CpuProbe",
    "GpuProbe",
    "Measurement",
    "PeakResidentSet",
    "Probe",
    "Reading",
    "Run",
    "Status",
    "StepTimer",
    "status_of",
]

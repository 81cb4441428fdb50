"""Measures the cost of trials."""

from perfguard.measure._cpu import CpuProbe, PeakResidentSet
from perfguard.measure._gpu import GpuProbe
from perfguard.measure._measurement import NOT_A_NUMBER, Confidence, Measurement, Status
from perfguard.measure._probe import Probe, Reading
from perfguard.measure._run import Run, status_of
from perfguard.measure._steps import StepTimer

__all__ = [
    "NOT_A_NUMBER",
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

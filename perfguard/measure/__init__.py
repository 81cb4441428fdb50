"""Measures the cost of trials."""

from perfguard.measure.cpu import CpuProbe
from perfguard.measure.gpu import GpuProbe
from perfguard.measure.measurement import NOT_A_NUMBER, CutShort, Measurement, Probe, RanOn, Reading, Status
from perfguard.measure.run import Run, StepTimer, status_of

__all__ = [
    "NOT_A_NUMBER",
    "CpuProbe",
    "CutShort",
    "GpuProbe",
    "Measurement",
    "Probe",
    "RanOn",
    "Reading",
    "Run",
    "Status",
    "StepTimer",
    "status_of",
]

"""Measures the cost of trials."""

from perfguard.measure.cpu import CpuProbe
from perfguard.measure.gpu import GpuProbe
from perfguard.measure.measurement import CUT_SHORT, NOT_A_NUMBER, TOO_SLOW, Measurement, Probe, RanOn, Reading, Status
from perfguard.measure.run import Run, StepTimer, status_of

__all__ = [
    "CUT_SHORT",
    "NOT_A_NUMBER",
    "TOO_SLOW",
    "CpuProbe",
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

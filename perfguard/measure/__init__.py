"""Measures the cost of trials."""

from perfguard.measure._health import CardHealth, DriverWindow, Signs, Trouble, is_busy, trouble_between
from perfguard.measure.cpu import CpuProbe, PeakResidentSet
from perfguard.measure.gpu import GpuProbe
from perfguard.measure.measurement import NOT_A_NUMBER, Confidence, Measurement, Probe, RanOn, Reading, Status
from perfguard.measure.run import Run, StepTimer, status_of

__all__ = [
    "NOT_A_NUMBER",
    "CardHealth",
    "Confidence",
    "CpuProbe",
    "DriverWindow",
    "GpuProbe",
    "Measurement",
    "PeakResidentSet",
    "Probe",
    "RanOn",
    "Reading",
    "Run",
    "Signs",
    "Status",
    "StepTimer",
    "Trouble",
    "is_busy",
    "status_of",
    "trouble_between",
]

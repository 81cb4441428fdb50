"""Measures the cost of trials."""

from perfguard.measure._cpu import CpuProbe, PeakResidentSet
from perfguard.measure._gpu import GpuProbe
from perfguard.measure._health import CardHealth, DriverWindow, Signs, Trouble, is_busy, trouble_between
from perfguard.measure._measurement import NOT_A_NUMBER, Confidence, Measurement, Status
from perfguard.measure._probe import Probe, Reading
from perfguard.measure._run import Run, status_of
from perfguard.measure._steps import StepTimer

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

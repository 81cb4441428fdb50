"""A queue of jobs on several devices: which runs where and when, so that the last one ends early and none runs out of memory."""

from perfguard_packing._chart import draw_schedule
from perfguard_packing._files import parse_slots, read_jobs
from perfguard_packing._plan import DEFAULT_SLOWDOWN, Job, Method, Placement, Schedule, Slot, plan

__all__ = [
    "DEFAULT_SLOWDOWN",
    "Job",
    "Method",
    "Placement",
    "Schedule",
    "Slot",
    "draw_schedule",
    "parse_slots",
    "plan",
    "read_jobs",
]

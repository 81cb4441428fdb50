"""A queue of jobs on several devices: which runs where and when, so that the last one ends early and none runs out of memory.

A device runs one job at a time, or up to ``at_once``, as long as their memory fits together. Jobs of one device run in the order
of the plan; one that does not fit beside those that run lets the next one pass.

**What sharing a device assumes.** While n jobs run on a device, each one takes ``1 + slowdown × (n - 1)`` times as long.
``slowdown=1`` is time slicing of kernels that fill the device, where nothing is won; 0 is the hope that they never meet. The
default, 0.7, is our guess, not a measurement: give a figure of yours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

from perfguard.exceptions import ConfigurationError, why_not_imported
from perfguard.quantities import format_bytes

Method = Literal["best", "exact", "longest-first"]
DEFAULT_SLOWDOWN = 0.7
_TICKS_PER_S = 1000
TINY_S = 1e-9
"""Smaller times are rounding errors."""

Assignment = tuple[int, ...]
"""Index of the slot of each job."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the queue."""

    name: str
    memory_bytes: int
    """Peak device memory. Give an upper bound, such as the 95% quantile of a prediction."""
    time_s: Mapping[str, float]
    """Seconds it takes alone, by kind of device; where a kind is missing, it cannot run."""

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigurationError(f"memory_bytes of job {self.name!r} must be positive, but got {self.memory_bytes!r}.")
        for kind, seconds in self.time_s.items():
            if not 0 < seconds < float("inf"):
                raise ConfigurationError(f"time_s[{kind!r}] of job {self.name!r} must be positive, but got {seconds!r}.")


@dataclass(frozen=True, slots=True)
class Slot:
    """One device."""

    name: str
    """Name of the slot, for instance "a100-0"."""
    kind: str
    """Key of ``Job.time_s``."""
    memory_bytes: int

    def can_run(self, job: Job) -> bool:
        """Whether ``job`` can run here, alone."""
        return self.kind in job.time_s and job.memory_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """One job in a schedule."""

    job: Job
    slot: Slot
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan in which no device ever holds more than its memory."""

    placements: tuple[Placement, ...]
    method: str
    is_optimal: bool = False
    """Proven."""

    @property
    def makespan_s(self) -> float:
        """End of the last job."""
        return max((placement.end_s for placement in self.placements), default=0.0)


def plan(
    jobs: Sequence[Job],
    slots: Sequence[Slot],
    *,
    method: Method = "best",
    at_once: int = 1,
    slowdown: float = DEFAULT_SLOWDOWN,
    time_limit_s: float = 10.0,
) -> Schedule:
    """A schedule of ``jobs`` on ``slots`` with a short makespan, in which no job runs out of memory.

    - "exact": CP-SAT of OR-tools, for one job at a time on a device. It proves optimality if the time limit allows.
    - "longest-first": list scheduling (Graham 1969). Each job goes to the device where it ends earliest.
    - "best": "exact" for one job at a time, if OR-tools is installed. Otherwise "longest-first".

    Example:
        >>> jobs = [Job(f"job{i}", 2**30, {"a100": 10.0, "t4": 30.0}) for i in range(8)]
        >>> plan(jobs, [Slot("a100-0", "a100", 40 * 2**30), Slot("t4-0", "t4", 16 * 2**30)], method="longest-first").makespan_s
        60.0

    Args:
        jobs: the queue.
        slots: the devices.
        method: see above.
        at_once: how many jobs may share a device.
        slowdown: the cost of sharing a device, in [0, 1]. The module's docstring has the assumptions.
        time_limit_s: seconds for "exact".

    Raises:
        ConfigurationError: if a job fits on no device, an argument is out of range, or OR-tools is needed and missing.
    """
    if method not in get_args(Method):
        raise ConfigurationError(f"method must be one of {', '.join(get_args(Method))}, but got {method!r}.")
    if at_once < 1:
        raise ConfigurationError(f"at_once must be at least 1, but got {at_once!r}.")
    if not 0 <= slowdown <= 1:
        raise ConfigurationError(f"slowdown must lie in [0, 1], but got {slowdown!r}.")
    if not jobs:
        return Schedule((), method)
    problem = _Problem.of(jobs, slots, at_once=at_once, slowdown=slowdown)
    if method == "exact" or (method == "best" and at_once == 1 and find_spec("ortools")):
        return _plan_exactly(problem, time_limit_s)
    return problem.schedule(problem.longest_first(), method="longest-first")


@dataclass(frozen=True, slots=True)
class _Problem:
    """Jobs, longest first, and the slots that each one can run on."""

    jobs: tuple[Job, ...]
    slots: tuple[Slot, ...]
    choices: tuple[tuple[int, ...], ...]
    """Indices of the possible slots of each job."""
    at_once: int
    slowdown: float

    @staticmethod
    def of(jobs: Sequence[Job], slots: Sequence[Slot], *, at_once: int, slowdown: float) -> _Problem:
        ordered = tuple(sorted(jobs, key=lambda job: -min(job.time_s.values(), default=0.0)))
        choices = tuple(tuple(index for index, slot in enumerate(slots) if slot.can_run(job)) for job in ordered)
        for job, possible in zip(ordered, choices, strict=True):
            if not possible:
                raise ConfigurationError(_nowhere(job, slots))
        return _Problem(ordered, tuple(slots), choices, at_once, slowdown)

    def schedule(self, assignment: Assignment, *, method: str) -> Schedule:
        queues: list[list[Job]] = [[] for _ in self.slots]
        for job, index in zip(self.jobs, assignment, strict=True):
            queues[index].append(job)
        runs = (_run(queue, slot, self.at_once, self.slowdown) for queue, slot in zip(queues, self.slots, strict=True))
        return Schedule(tuple(placement for run in runs for placement in run), method)

    def longest_first(self) -> Assignment:
        """Assign jobs in the order of decreasing time, each to the slot with the earliest end."""
        ends = [0.0] * len(self.slots)
        assignment: list[int] = []
        for job, choices in zip(self.jobs, self.choices, strict=True):
            index = min(choices, key=lambda index: ends[index] + job.time_s[self.slots[index].kind])
            ends[index] += job.time_s[self.slots[index].kind]
            assignment.append(index)
        return tuple(assignment)


def _run(queue: Sequence[Job], slot: Slot, at_once: int, slowdown: float) -> list[Placement]:
    """Starts and ends of the jobs of one device, if each starts as soon as there is room for it."""
    waiting = list(queue)
    running: list[tuple[Job, float, float]] = []  # job, start, seconds of work that are left
    done: list[Placement] = []
    now_s = 0.0
    while waiting or running:
        for job in list(waiting):
            used_bytes = sum(other.memory_bytes for other, _, _ in running)
            if len(running) < at_once and used_bytes + job.memory_bytes <= slot.memory_bytes:
                waiting.remove(job)
                running.append((job, now_s, job.time_s[slot.kind]))
        work_s = min(left_s for _, _, left_s in running)
        now_s += work_s * (1 + slowdown * (len(running) - 1))
        done += [Placement(job, slot, start_s, now_s) for job, start_s, left_s in running if left_s - work_s <= TINY_S]
        running = [(job, start_s, left_s - work_s) for job, start_s, left_s in running if left_s - work_s > TINY_S]
    return done


def _plan_exactly(problem: _Problem, time_limit_s: float) -> Schedule:
    if problem.at_once > 1:
        raise ConfigurationError('method="exact" plans one job at a time on a device. Use "longest-first" where jobs share one.')
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        missing = "method=\"exact\" needs OR-tools: pip install 'perfguard[packing]'."
        raise ConfigurationError(why_not_imported(error, "ortools", missing)) from error
    model = cp_model.CpModel()
    ticks = [
        {index: max(1, round(job.time_s[problem.slots[index].kind] * _TICKS_PER_S)) for index in choices}
        for job, choices in zip(problem.jobs, problem.choices, strict=True)
    ]
    makespan = model.new_int_var(0, sum(max(of_job.values()) for of_job in ticks), "makespan")
    on = [{index: model.new_bool_var(f"{job}_{index}") for index in of_job} for job, of_job in enumerate(ticks)]
    for of_job in on:
        model.add_exactly_one(of_job.values())
    for index in range(len(problem.slots)):
        model.add(sum(ticks[job][index] * of_job[index] for job, of_job in enumerate(on) if index in of_job) <= makespan)
    hint = problem.longest_first()
    for job, of_job in enumerate(on):
        for index, variable in of_job.items():
            model.add_hint(variable, int(hint[job] == index))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # the time limit came before the hint was completed
        return problem.schedule(hint, method="longest-first")
    assignment = tuple(next(index for index, variable in of_job.items() if solver.boolean_value(variable)) for of_job in on)
    return Schedule(problem.schedule(assignment, method="exact").placements, "exact", is_optimal=status == cp_model.OPTIMAL)


def _nowhere(job: Job, slots: Sequence[Slot]) -> str:
    kinds = {slot.kind for slot in slots}
    if not kinds & set(job.time_s):
        return f"Job {job.name!r} has no time for any of the devices {', '.join(sorted(kinds)) or '(none)'}."
    largest = max(slot.memory_bytes for slot in slots if slot.kind in job.time_s)
    return f"Job {job.name!r} needs {format_bytes(job.memory_bytes)}, but the largest device has {format_bytes(largest)}."

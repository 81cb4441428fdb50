"""A queue of jobs on several devices: which runs where and when, so that the last one ends early and none runs out of memory.

A device runs one job at a time, or up to ``at_once``, as long as their memory fits together. Jobs of one device run in the order
of the plan; one that does not fit beside those that run lets the next one pass.

**What sharing a device assumes.** While n jobs run on a device, each one takes ``1 + slowdown × (n - 1)`` times as long.
``slowdown=1`` is time slicing of kernels that fill the device, where nothing is won; 0 is the hope that they never meet. The
default, 0.7, is our guess, not a measurement: give a figure of yours.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from perfguard._optional import why_not_imported
from perfguard.exceptions import ConfigurationError
from perfguard.quantities import format_bytes, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Method = Literal["best", "exact", "genetic", "longest-first", "random"]
DEFAULT_SLOWDOWN = 0.7
_POPULATION = 20
_GENERATIONS = 20
_MOST_JOBS_FOR_A_PROOF = 40
_TICKS_PER_S = 1000
_TINY_S = 1e-9

Genes = tuple[int, ...]
"""For each job the index of its slot: DNNAbacus's 0-1 string, for any number of devices."""


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
    """For instance "a100-0"."""
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
    best_by_generation_s: tuple[float, ...] = ()
    """Makespan of the best plan so far, before the first generation and after each; of the genetic algorithm alone."""

    @property
    def makespan_s(self) -> float:
        """When the last job ends."""
        return max((placement.end_s for placement in self.placements), default=0.0)


def plan(
    jobs: Sequence[Job],
    slots: Sequence[Slot],
    *,
    method: Method = "best",
    at_once: int = 1,
    slowdown: float = DEFAULT_SLOWDOWN,
    seed: int = 0,
    time_limit_s: float = 10.0,
) -> Schedule:
    """A schedule of ``jobs`` on ``slots`` with a short makespan, in which no job runs out of memory.

    - "exact": CP-SAT of OR-tools, for one job at a time on a device; with a proof, where the time limit allows one.
    - "genetic": the algorithm of DNNAbacus (Bai et al. 2022, section 4.3) with population 20 and 20 generations, and one
      addition: children are improved by moves and swaps until none helps (all of them up to 40 jobs, one at a time; else one of
      each generation).
    - "longest-first": list scheduling (Graham 1969), each job where it ends earliest.
    - "random": each job on a random device that can run it.
    - "best": "exact" for up to 40 jobs, one at a time, where OR-tools is installed; else the shorter of "genetic" and
      "longest-first".

    Example:
        >>> jobs = [Job(f"job{i}", 2**30, {"a100": 10.0, "t4": 30.0}) for i in range(8)]
        >>> plan(jobs, [Slot("a100-0", "a100", 40 * 2**30), Slot("t4-0", "t4", 16 * 2**30)], method="longest-first").makespan_s
        60.0

    Args:
        jobs: the queue.
        slots: the devices.
        method: see above.
        at_once: how many jobs may share a device.
        slowdown: what sharing costs, in [0, 1]; see the module's docstring for what is assumed.
        seed: of "genetic" and "random".
        time_limit_s: of "exact".

    Raises:
        ConfigurationError: if a job fits on no device, an argument is out of range, or OR-tools is asked for and missing.
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
    if method == "exact" or (method == "best" and at_once == 1 and len(jobs) <= _MOST_JOBS_FOR_A_PROOF and find_spec("ortools")):
        return _plan_exactly(problem, time_limit_s)
    if method == "genetic":
        return _plan_by_evolution(problem, seed)
    if method == "random":
        return problem.schedule(problem.random_genes(random.Random(seed)), method="random")
    longest_first = problem.schedule(problem.longest_first(), method="longest-first")
    if method == "longest-first":
        return longest_first
    return min(_plan_by_evolution(problem, seed), longest_first, key=lambda schedule: schedule.makespan_s)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Jobs, longest first, and the slots that each one can run on."""

    jobs: tuple[Job, ...]
    slots: tuple[Slot, ...]
    choices: tuple[tuple[int, ...], ...]
    """For each job the indices of its slots."""
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

    def schedule(self, genes: Genes, *, method: str) -> Schedule:
        queues: list[list[Job]] = [[] for _ in self.slots]
        for job, index in zip(self.jobs, genes, strict=True):
            queues[index].append(job)
        runs = (_run(queue, slot, self.at_once, self.slowdown) for queue, slot in zip(queues, self.slots, strict=True))
        return Schedule(tuple(placement for run in runs for placement in run), method)

    def makespan_s(self, genes: Genes) -> float:
        if self.at_once > 1:
            return self.schedule(genes, method="").makespan_s
        loads = [0.0] * len(self.slots)
        for job, index in zip(self.jobs, genes, strict=True):
            loads[index] += job.time_s[self.slots[index].kind]
        return max(loads, default=0.0)

    def random_genes(self, generator: random.Random) -> Genes:
        return tuple(generator.choice(choices) for choices in self.choices)

    def longest_first(self) -> Genes:
        """Each job, the longest first, where the jobs so far would end earliest with it."""
        ends = [0.0] * len(self.slots)
        genes: list[int] = []
        for job, choices in zip(self.jobs, self.choices, strict=True):
            index = min(choices, key=lambda index: ends[index] + job.time_s[self.slots[index].kind])
            ends[index] += job.time_s[self.slots[index].kind]
            genes.append(index)
        return tuple(genes)

    def improved(self, genes: Genes) -> Genes:
        """``genes`` after moves of one job, and swaps of two, as long as one of them shortens the plan."""
        best, best_s = genes, self.makespan_s(genes)
        while True:
            candidates = [(self.makespan_s(neighbour), neighbour) for neighbour in self._neighbours(best)]
            shortest_s, neighbour = min(candidates, default=(best_s, best))
            if shortest_s >= best_s:
                return best
            best, best_s = neighbour, shortest_s

    def _neighbours(self, genes: Genes) -> list[Genes]:
        """The moves and swaps that take a job from the device that ends last: no other can shorten the plan."""
        schedule = self.schedule(genes, method="")
        last = max(schedule.placements, key=lambda placement: placement.end_s).slot
        neighbours: list[Genes] = []
        for job, index in enumerate(genes):
            if self.slots[index] is not last:
                continue
            neighbours += [_with(genes, {job: other}) for other in self.choices[job] if other != index]
            neighbours += [
                _with(genes, {job: elsewhere, other: index})
                for other, elsewhere in enumerate(genes)
                if elsewhere != index and elsewhere in self.choices[job] and index in self.choices[other]
            ]
        return neighbours


def _with(genes: Genes, changes: Mapping[int, int]) -> Genes:
    return tuple(changes.get(job, index) for job, index in enumerate(genes))


def _run(queue: Sequence[Job], slot: Slot, at_once: int, slowdown: float) -> list[Placement]:
    """When the jobs of one device start and end, if each starts as soon as there is room for it."""
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
        done += [Placement(job, slot, start_s, now_s) for job, start_s, left_s in running if left_s - work_s <= _TINY_S]
        running = [(job, start_s, left_s - work_s) for job, start_s, left_s in running if left_s - work_s > _TINY_S]
    return done


def _plan_by_evolution(problem: _Problem, seed: int, *, improve: bool = True) -> Schedule:
    generator = random.Random(seed)
    improved = _POPULATION if len(problem.jobs) <= _MOST_JOBS_FOR_A_PROOF and problem.at_once == 1 else 1
    population = [problem.random_genes(generator) for _ in range(_POPULATION)]
    history = [min(map(problem.makespan_s, population))]
    for _ in range(_GENERATIONS):
        parents = [generator.sample(population, 2) for _ in range(_POPULATION)]
        children = [_child(mother, father, problem, generator) for mother, father in parents]
        if improve:
            children = [problem.improved(child) for child in children[:improved]] + children[improved:]
        population = sorted({*population, *children}, key=problem.makespan_s)[:_POPULATION]
        while len(population) < _POPULATION:  # few jobs have few plans
            population.append(problem.random_genes(generator))
        history.append(problem.makespan_s(population[0]))
    schedule = problem.schedule(min(population, key=problem.makespan_s), method="genetic")
    return Schedule(schedule.placements, "genetic", best_by_generation_s=tuple(history))


def _child(mother: Genes, father: Genes, problem: _Problem, generator: random.Random) -> Genes:
    """Each gene from one of the parents; one in ``len(genes)`` is drawn anew."""
    genes = [generator.choice(pair) for pair in zip(mother, father, strict=True)]
    for job, choices in enumerate(problem.choices):
        if generator.random() < 1 / len(genes):
            genes[job] = generator.choice(choices)
    return tuple(genes)


def _plan_exactly(problem: _Problem, time_limit_s: float) -> Schedule:
    if problem.at_once > 1:
        raise ConfigurationError('method="exact" plans one job at a time on a device. Use "genetic" where jobs share one.')
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
    genes = tuple(next(index for index, variable in of_job.items() if solver.boolean_value(variable)) for of_job in on)
    return Schedule(problem.schedule(genes, method="exact").placements, "exact", is_optimal=status == cp_model.OPTIMAL)


def _nowhere(job: Job, slots: Sequence[Slot]) -> str:
    kinds = {slot.kind for slot in slots}
    if not kinds & set(job.time_s):
        return f"Job {job.name!r} has no time for any of the devices {', '.join(sorted(kinds)) or '(none)'}."
    largest = max(slot.memory_bytes for slot in slots if slot.kind in job.time_s)
    return f"Job {job.name!r} needs {format_bytes(job.memory_bytes)}, but the largest device has {format_bytes(largest)}."


def parse_slots(text: str) -> list[Slot]:
    """The devices that a text such as "a100:2,t4:4" means; the kinds are the names as they are written.

    Raises:
        ConfigurationError: for a text that cannot be read, or a GPU that is not in the catalog.
    """
    from perfguard.devices import resolve_device

    slots: list[Slot] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, count = part.partition(":")
        if count and not count.isdecimal():
            raise ConfigurationError(f'The GPUs must look like "a100:2,t4:4", but got {part!r}.')
        memory_bytes = resolve_device(kind).memory_bytes
        slots += [Slot(f"{kind}-{number}", kind, memory_bytes) for number in range(int(count or 1))]
    if not slots:
        raise ConfigurationError(f'The GPUs must look like "a100:2,t4:4", but got {text!r}.')
    return slots


def read_jobs(path: str | Path, kinds: Iterable[str]) -> list[Job]:
    """The jobs of a CSV file with the columns ``name``, ``memory`` ("12GiB", or bytes) and ``time_<gpu>`` ("90s", or seconds).

    An empty time means that the job cannot run on that kind. A column ``time`` stands for the kinds that have none of their
    own. Only the times on ``kinds`` are read.

    Raises:
        ConfigurationError: for a file or a line that cannot be used; names both.
    """
    wanted = tuple(dict.fromkeys(kinds))
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            missing = {"name", "memory"} - set(columns)
            if missing or not any(column == "time" or column.startswith("time_") for column in columns):
                raise ConfigurationError(
                    f"{path} must have the columns name, memory and time_<gpu> (for instance time_a100), but has "
                    f"{', '.join(columns) or 'none'}."
                )
            return [_job_of(row, wanted, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"The jobs cannot be read from {path}: {error}") from error


def _job_of(row: Mapping[str, str | None], kinds: Iterable[str], place: str) -> Job:
    def text(column: str) -> str:
        return (row.get(column) or "").strip()

    try:
        times = {kind: (column, text(column)) for kind in kinds for column in ("time", f"time_{kind}") if text(column)}
        time_s = {kind: parse_seconds(given, what=column) for kind, (column, given) in times.items()}
        return Job(text("name") or place, parse_bytes(text("memory"), what="memory"), time_s)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from error


def draw_schedule(schedule: Schedule) -> Figure:
    """A Gantt chart: one row a device, one bar a job; jobs that share a device stand side by side in its row.

    Raises:
        ConfigurationError: if Matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = "The picture needs Matplotlib: pip install 'perfguard[plot]'."
        raise ConfigurationError(why_not_imported(error, "matplotlib", missing)) from error
    slots = sorted({placement.slot for placement in schedule.placements}, key=lambda slot: slot.name)
    figure = Figure(figsize=(9, 0.9 + 0.55 * len(slots)), layout="constrained")
    axes = figure.subplots()
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
    names = sorted(placement.job.name for placement in schedule.placements)
    for row, slot in enumerate(slots):
        mine = sorted((placement for placement in schedule.placements if placement.slot == slot), key=lambda one: one.start_s)
        lanes = _lanes(mine)
        height = 0.8 / (max(lanes, default=0) + 1)
        for placement, lane in zip(mine, lanes, strict=True):
            length_s = placement.end_s - placement.start_s
            bottom = row - 0.4 + lane * height
            color = colors[names.index(placement.job.name) % len(colors)]
            axes.barh(bottom, length_s, height, left=placement.start_s, align="edge", color=color, edgecolor="white")
            if length_s > 0.04 * schedule.makespan_s:
                middle = placement.start_s + length_s / 2
                axes.text(middle, bottom + height / 2, placement.job.name, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(slots)), [slot.name for slot in slots])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, schedule.makespan_s * 1.02 or 1))
    proof = ", proven to be the shortest" if schedule.is_optimal else ""
    axes.set_title(f"{len(names)} jobs in {schedule.makespan_s:.4g} s ({schedule.method}{proof})", fontsize=10)
    return figure


def _lanes(placements: Sequence[Placement]) -> list[int]:
    """For each placement, in the order of their starts, the lowest row of its device that is free."""
    free_at: list[float] = []
    lanes = []
    for placement in placements:
        lane = next((lane for lane, end_s in enumerate(free_at) if end_s <= placement.start_s + _TINY_S), len(free_at))
        free_at[lane : lane + 1] = [placement.end_s]
        lanes.append(lane)
    return lanes


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

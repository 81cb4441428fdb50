"""Plan a queue of training jobs on several GPUs, from the memory and time that PerfGuard predicts.

pip install 'perfguard' ortools
python examples/pack_jobs.py --gpus a100,a100,t4,t4

CP-SAT of OR-tools finds the plan that ends first: one job at a time on a device, and no job on a device that it would not fit.
DNNAbacus (Bai et al. 2022) schedules jobs by predicted costs in the same way, with a genetic algorithm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from models import resnet, transformer
from perfguard import Workload, predict
from perfguard.devices import resolve_device


class Job(NamedTuple):
    """A training job: a workload and its number of steps."""

    name: str
    build: Callable[[Mapping[str, Any]], Workload]
    batch_size: int
    steps: int


QUEUE = [
    *(Job(f"resnet-{batch}", resnet, batch, 60_000 // batch) for batch in (16, 32, 64, 96, 128, 192)),
    *(Job(f"transformer-{batch}", transformer, batch, 20_000 // batch) for batch in (4, 8, 16, 32)),
]


def seconds_on(job: Job, gpu: str) -> float | None:
    """The seconds that ``job`` takes on ``gpu``; None if it needs more memory than there is with a chance of 5% or more."""
    prediction = predict(job.build({"batch_size": job.batch_size}), gpu=gpu)
    fits = prediction.p_oom(resolve_device(gpu).memory_bytes) < 0.05
    return prediction.step_time.median * job.steps if fits else None


def plan(seconds: list[dict[int, float]], num_devices: int, limit_s: float) -> tuple[list[int], bool]:
    """The device of each job so that the last device ends first, and whether no other plan is better.

    Args:
        seconds: of each job on each device where it fits, by the device's index.
        num_devices: number of devices.
        limit_s: seconds for the solver.
    """
    model = cp_model.CpModel()
    on = [{device: model.new_bool_var(f"{job}_{device}") for device in times} for job, times in enumerate(seconds)]
    end = model.new_int_var(0, int(sum(max(times.values()) + 1 for times in seconds)), "end")
    for choices in on:
        model.add_exactly_one(choices.values())
    for device in range(num_devices):
        # CP-SAT counts in integers. A job takes minutes, so whole seconds are fine enough.
        load = [round(seconds[job][device]) * choices[device] for job, choices in enumerate(on) if device in choices]
        model.add(sum(load) <= end)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise SystemExit(f"No plan was found in {limit_s:g} s.")
    chosen = [next(device for device, variable in choices.items() if solver.boolean_value(variable)) for choices in on]
    return chosen, status == cp_model.OPTIMAL


def main() -> None:
    """Predict, plan and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", default="a100,a100,t4,t4", help="one name for each device (default: a100,a100,t4,t4)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the solver (default: 10)")
    arguments = parser.parse_args()
    gpus = arguments.gpus.split(",")
    seconds: list[dict[int, float]] = []
    for job in QUEUE:
        by_gpu = {gpu: seconds_on(job, gpu) for gpu in set(gpus)}
        seconds.append({index: found for index, gpu in enumerate(gpus) if (found := by_gpu[gpu]) is not None})
        if not seconds[-1]:
            raise SystemExit(f"{job.name} fits none of these GPUs.")
    chosen, is_best = plan(seconds, len(gpus), arguments.seconds)
    ends = [0.0] * len(gpus)
    for job, times, device in zip(QUEUE, seconds, chosen, strict=True):
        start, ends[device] = ends[device], ends[device] + times[device]
        print(f"{job.name:<16} on {gpus[device]}-{device}  from {start:5.0f} s to {ends[device]:5.0f} s")
    print(f"All is done after {max(ends):.0f} s{', and no plan ends earlier' if is_best else ''}.")


if __name__ == "__main__":
    main()

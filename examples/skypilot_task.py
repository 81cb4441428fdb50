"""Tell SkyPilot how long a training script takes on each GPU, so that it picks the cheapest of them.

pip install perfguard skypilot
python examples/skypilot_task.py train.py --epochs 3

SkyPilot multiplies the price of an hour by the hours of a task. Without an estimate it takes one hour, whatever the GPU. A dry
run of the script predicts them, and leaves out the GPUs that it does not fit on. The script is not changed, and nothing is
launched here: give the task to `sky.launch`.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfguard.devices import resolve_device

if TYPE_CHECKING:
    import sky

GPUS = ("T4", "L4", "A10G", "V100", "A100", "A100-80GB", "H100")
"""As SkyPilot names them. PerfGuard knows these names, too."""


def seconds_by_gpu(script: str, words: Sequence[str]) -> dict[str, int]:
    """The seconds that ``script`` takes on each GPU that it fits on, rounded up.

    Raises:
        SystemExit: if the dry run says nothing of its time, with the reason.
    """
    dry_run = [sys.executable, "-m", "perfguard.cli", "dry-run", "--json", "--gpu", ",".join(GPUS), script, "--", *words]
    done = subprocess.run(dry_run, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(done.stderr)
    predictions: list[Mapping[str, Any]] = json.loads(done.stdout)
    if any(each["total_time_s"] is None for each in predictions):
        raise SystemExit(f"The steps of {script} are not known: `perfguard dry-run {script}` says why.")
    by_id = {each["gpu"]: each for each in predictions}
    return {name: int(by_id[gpu]["total_time_s"]["high"]) + 1 for name, gpu in ids().items() if by_id[gpu]["fits"]}


def ids() -> dict[str, str]:
    """PerfGuard's names by SkyPilot's."""
    return {name: resolve_device(name).id for name in GPUS}


def task_of(script: str, words: Sequence[str], seconds: Mapping[str, int]) -> sky.Task:
    """The task that runs ``script`` on any of these GPUs."""
    import sky

    task = sky.Task(run=shlex.join(["python", script, *words]), workdir=str(Path(script).resolve().parent))
    task.set_resources({sky.Resources(accelerators={name: 1}) for name in seconds})
    task.set_time_estimator(lambda resources: seconds[next(iter(resources.accelerators))])
    return task


def main() -> None:
    """Show what the task tells SkyPilot."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    script, *words = sys.argv[1:]
    seconds = seconds_by_gpu(script, words)
    if not seconds:
        raise SystemExit(f"{script} fits none of {', '.join(GPUS)}.")
    task = task_of(script, words, seconds)
    for resources in sorted(task.resources, key=task.estimate_runtime):
        print(f"{next(iter(resources.accelerators)):10} {task.estimate_runtime(resources):6} s")


if __name__ == "__main__":
    main()

"""The examples run as scripts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from perfguard import trace
from tests.warm import run_warm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(*arguments: str, cwd: Path) -> str:
    status, printed = run_warm(*arguments, cwd=cwd, timeout_s=240)
    assert status == 0, printed
    return printed


@pytest.mark.slow
def test_the_quickstart_compares_a_study_with_its_unguarded_twin(tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = run_example(str(EXAMPLES / "quickstart.py"), "--seconds", "3", "--out", str(out), cwd=tmp_path)
    trials, _, tables = text.partition("The same search for")
    verdicts = [words[1] for line in trials.splitlines() if (words := line.split()) and words[0].isdigit()]
    rows = {cells[1]: cells[2:4] for line in tables.splitlines() if len(cells := [cell.strip() for cell in line.split("│")]) == 5}
    num_over = sum(" unguarded " in line and line.endswith("over") for line in trials.splitlines())
    assert set(verdicts) <= {"launched", "pruned", "unguarded"}
    assert rows["trials that ran"] == [str(verdicts.count(verdict)) for verdict in ("launched", "unguarded")]
    assert rows["pruned before launch"] == [str(verdicts.count("pruned")), "0"]
    assert rows["over the memory or time budget"][1] == str(num_over)
    assert len(list(out.glob("log-*.db"))) == 1
    for page in ("memory.html", "time.html", "savings.html", "report.html"):
        assert str(out / page) in text
        assert "plotly" in (out / page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_ray_example_runs(tmp_path: Path) -> None:
    text = run_example(str(EXAMPLES / "ray_tune.py"), "--trials", "2", cwd=tmp_path)
    assert "launch" in text
    assert "2 trials ran in" in text


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_a_network_of_the_examples_can_be_traced(name: str) -> None:
    build = runpy.run_path(str(EXAMPLES / "models.py"))[name]
    small, large = (trace(build({"batch_size": batch_size})) for batch_size in (2, 4))
    assert len(small.ops) == len(large.ops) > 100
    assert small.flops < large.flops
    assert not small.unmodelled


@pytest.mark.slow
def test_jobs_are_packed_where_they_fit_and_end_early(tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    text = run_example(str(EXAMPLES / "pack_jobs.py"), "--gpus", "a100,t4", cwd=tmp_path)
    jobs = [line.split() for line in text.splitlines() if " on " in line]
    ends: dict[str, float] = {}
    for _, _, device, _, start, _, _, end, _ in jobs:
        assert float(start) == pytest.approx(ends.get(device, 0.0), abs=1)
        ends[device] = float(end)
    assert {words[2] for words in jobs if words[0] == "resnet-192"} == {"a100-0"}  # a T4 has 15 GiB
    assert float(text.split("after ")[1].split()[0]) == max(ends.values())
    assert "no plan ends earlier" in text


@pytest.mark.slow
def test_a_job_that_fits_nowhere_is_named(tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    status, printed = run_warm(str(EXAMPLES / "pack_jobs.py"), "--gpus", "t4", cwd=tmp_path, timeout_s=240)
    assert status != 0
    assert "resnet-192 fits none of these GPUs" in printed


COUNTED = """
import torch
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50_000):
    optimizer.zero_grad()
    model(torch.randn(8192, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_skypilot_is_told_the_time_of_a_script_on_each_gpu(tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLES / "skypilot_task.py"))
    script = tmp_path / "train.py"
    script.write_text(COUNTED)
    seconds = example["seconds_by_gpu"](str(script), [])
    assert seconds.keys() == set(example["GPUS"])
    assert seconds["T4"] > seconds["V100"] > seconds["A100"] > seconds["H100"] > 60
    pytest.importorskip("sky")
    task = example["task_of"](str(script), ["--epochs", "3"], {"T4": 60, "H100": 10})
    assert sorted(map(task.estimate_runtime, task.resources)) == [10, 60]


@pytest.mark.slow
def test_the_evolution_runs_measures_and_draws(tmp_path: Path) -> None:
    words = ["--measured", "4", "--trials", "7", "--epochs", "1", "--out", str(tmp_path)]
    text = run_example(str(EXAMPLES / "nas_evolution.py"), *words, cwd=tmp_path)
    for expected in ("4 random cells measured", "evolution", "error of the predicted latencies"):
        assert expected in text
    assert "plotly" in (tmp_path / "nas_evolution.html").read_text(encoding="utf-8")


def test_nas_space_has_benchmark_size_and_runs() -> None:
    space = runpy.run_path(str(EXAMPLES / "nas_space.py"))
    assert len(space["OPERATORS"]) ** len(space["EDGES"]) == 15_625
    cell = ("conv3x3", "skip", "pool3x3", "none", "conv1x1", "skip")
    assert space["is_connected"](cell)
    assert not space["is_connected"](("conv3x3", "none", "none", "none", "none", "none"))
    assert space["network"](cell, width=4, depth=1, channels=1)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.slow
def test_study_with_and_without_the_guard_runs_on_the_processor(tmp_path: Path) -> None:
    """The script is for a GPU; its code runs, whatever the numbers."""
    study = str(EXAMPLES.parent / "benchmarks" / "gpu_study.py")
    words = ["--gpu", "cpu", "--trials", "2", "--task", "images", "--out", str(tmp_path / "study.txt")]
    run_example(study, *words, cwd=tmp_path)
    text = (tmp_path / "study.txt").read_text()
    assert "│ images │ without " in text
    assert "│ images │ with  " in text

"""The examples run as scripts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
    text = run_example(str(EXAMPLES / "quickstart.py"), "--seconds", "6", "--out", str(out), cwd=tmp_path)
    trials, _, tables = text.partition("The same search for")
    verdicts = [words[1] for line in trials.splitlines() if (words := line.split()) and words[0].isdigit()]
    rows = {cells[1]: cells[2:4] for line in tables.splitlines() if len(cells := [cell.strip() for cell in line.split("│")]) == 5}
    num_over = sum(" unguarded " in line and line.endswith("over") for line in trials.splitlines())
    assert set(verdicts) <= {"launched", "pruned", "unguarded"}
    assert rows["trials that ran"] == [str(verdicts.count(verdict)) for verdict in ("launched", "unguarded")]
    assert rows["pruned before launch"] == [str(verdicts.count("pruned")), "0"]
    assert rows["over the memory or time budget"][1] == str(num_over)
    assert len(list(out.glob("log-*.db"))) == 1
    assert "trials pruned before launch" in tables
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

"""The examples run as scripts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from perfguard import trace
from tests.warm import run_warm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
QUICKSTART = (str(EXAMPLES / "quickstart.py"), "--seed", "51")
"""With this seed the first trials are small: without the guard, those of seed 0 take most of a minute."""


def run_example(*arguments: str, cwd: Path) -> str:
    status, printed = run_warm(*arguments, cwd=cwd, timeout_s=240)
    assert status == 0, printed
    return printed


@pytest.mark.slow
def test_the_quickstart_runs_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = run_example(*QUICKSTART, "--trials", "4", "--out", str(out), cwd=tmp_path)
    verdicts = [words[1] for line in text.splitlines() if (words := line.split()) and words[0].isdigit()]
    assert verdicts.count("launched") == 4
    assert set(verdicts) <= {"launched", "pruned"}
    assert len(list(out.glob("log-*.db"))) == 1
    for expected in ("trials launched", "trials pruned before launch", "time of the other pruned", "prediction error"):
        assert expected in text
    assert (out / "quickstart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_quickstart_runs_without_the_guard(tmp_path: Path) -> None:
    text = run_example(*QUICKSTART, "--trials", "2", "--no-guard", cwd=tmp_path)
    assert text.count("unguarded") == 2
    assert "2 trials, " in text
    assert not list(tmp_path.iterdir())


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

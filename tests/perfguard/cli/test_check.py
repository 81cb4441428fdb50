"""`perfguard check` and the GitHub Action: exit statuses that a script can rely on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfguard.cli import main
from perfguard.graph import trace
from perfguard.guard import Guard
from perfguard.verdict import Verdict
from perfguard.workload import build_workload

ROOT = Path(__file__).parents[3]
NO_OPTIMIZER = "The workload names no optimizer. Plain SGD is assumed, which keeps no state; AdamW keeps twice the parameters."
SCRIPT = """
from torch import nn
from perfguard import Workload

def build(params):
    width = params.get("width", 16_384)
    size = params.get("batch_size", 32), width
    return Workload(nn.Linear(width, width), inputs=size, loss=lambda output: params.get("scale", 1.0) * output.mean())

def needs_width(params):
    return Workload(nn.Linear(params["width"], 8), inputs=(4, params["width"]), loss=lambda output: output.mean())

def takes_all(params):
    return Workload(nn.Linear(8, 8), inputs=(4, 8), loss=lambda output: output.mean(), steps=dict(params)["number"])

def cannot_be_traced(params):
    return Workload(nn.Linear(8, 8), inputs=(4, 7), loss=lambda output: output.mean())

def fails(params):
    raise ZeroDivisionError("a mistake in build")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "checked_script", raising=False)
    path = tmp_path / "checked_script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], script: str) -> Callable[..., tuple[int, str, str]]:
    """Run the command on a function of the script: its exit status, what it printed, and its errors."""

    def run(function: str, *words: str) -> tuple[int, str, str]:
        try:
            status = main(["check", f"{script}:{function}", "--gpu", "a100-pcie-40gb", *words])
        except SystemExit as end:  # of argparse, for a word that cannot be read
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


Check = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        ([], 0, "fits: NVIDIA A100 PCIe 40 GB: needs "),
        (["--max-memory", "10GiB"], 0, "the budget is 10.0 GiB"),
        (["--max-memory", "600MiB"], 1, "does not fit: NVIDIA A100 PCIe 40 GB: needs "),
        (["--max-memory", "0.02"], 1, "does not fit"),
        (["--max-step-time", "1min"], 0, "takes "),
        (["--max-step-time", "1us"], 1, "does not fit: NVIDIA A100 PCIe 40 GB: takes "),
        (["--steps", "1000", "--max-trial-time", "1h"], 0, "the budget is 1.00 h"),
        (["--steps", "100000000", "--max-trial-time", "1min"], 1, "does not fit"),
        (["--steps", "1000", "--max-cost", "$2", "--price-per-hour", "3"], 0, "the budget is $2.00"),
        (["--steps", "1000000000", "--max-cost", "0.5", "--price-per-hour", "$3"], 1, "A100 PCIe 40 GB: costs $"),
        (["--batch-size", "1000000000000"], 1, "does not fit: NVIDIA A100 PCIe 40 GB: needs at least"),
        (["--batch-size", str(2**60)], 1, "does not fit: NVIDIA A100 PCIe 40 GB: needs at least"),
    ],
)
def test_exit_status_says_whether_it_fits(check: Check, words: list[str], status: int, line: str) -> None:
    ended, out, err = check("build", *words)
    assert ended == status
    assert err in ("", f"{NO_OPTIMIZER}\n")  # a bound needs no workload
    assert line in out
    assert out.count("\n") == 1  # one line for people


def test_doubtful_workload_cannot_be_told(check: Check) -> None:
    # Between risk and 1 - risk a script must not read a yes or a no.
    data = json.loads(check("build", "--json")[1])
    (limit,) = data["limits"]
    status, out, _ = check("build", "--max-memory", f"{limit['median'] / 2**20:.0f}MiB", "--json")
    doubtful = json.loads(out)
    assert (status, doubtful["exit_status"], doubtful["result"]) == (3, 3, "cannot tell")
    assert 0.05 < doubtful["p_exceeded"] < 0.95
    limits = f"{limit['low'] / 2**20:.0f}MiB", f"{limit['high'] / 2**20 + 1:.0f}MiB"
    assert [check("build", "--max-memory", text, "--risk", "0.06")[0] for text in limits] == [1, 0]
    assert [check("build", "--max-memory", text, "--risk", "6%")[0] for text in limits] == [1, 0]


def test_verdict_is_that_of_the_guard(check: Check, script: str) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(SCRIPT, script, "exec"), namespace)
    for text in ("600MiB", "1GiB", "10GiB"):
        guard = Guard("a100", memory_budget=text, step_time_budget="1s", log=False)
        workload = build_workload(namespace["build"], {})
        prediction = guard.predictor.predict(trace(workload, target=guard.device), guard.device)
        verdict = Verdict.of(prediction, guard.budget.limits(prediction, guard.device), accepted=0.05)
        status, out, _ = check("build", "--max-memory", text, "--max-step-time", "1s", "--json")
        assert (status == 0) == (verdict.action == "launch")
        if status != 1 or "at least" not in out:
            assert json.loads(out)["p_exceeded"] == pytest.approx(verdict.p_violation)


@pytest.mark.parametrize(
    ("function", "words", "message"),
    [
        ("build", ["--max-memory", "40"], "--max-memory=40.0 is 40 bytes. Write '40GiB'"),
        ("build", ["--max-memory", "80GiB"], "80.0 GiB is more than NVIDIA A100 PCIe 40 GB has"),
        ("build", ["--max-step-time", "soon"], "--max-step-time must look like"),
        ("build", ["--max-memory", "-1GiB"], "--max-memory must be positive and finite"),
        ("build", ["--max-step-time", "-.5s"], "--max-step-time must be positive and finite"),
        ("build", ["--max-cost", "-$2", "--price-per-hour", "3"], "--max-cost must look like"),
        ("build", ["--risk", "-0.2"], "risk must lie in (0, 1)"),
        ("build", ["--batch-size", "-4"], "expected a whole number of at least 1, but got '-4'"),
        ("build", ["--max-trial-time", "1h"], "--max-trial-time needs the number of steps of a trial. Give --steps"),
        ("build", ["--max-cost", "$1", "--price-per-hour", "2"], "--max-cost needs the number of steps of a trial. Give --steps"),
        ("build", ["--max-cost", "$1"], "--max-cost needs the price of an hour on the device: give --price-per-hour"),
        ("build", ["--price-per-hour", "2"], "--price-per-hour has no effect without --max-cost"),
        ("build", ["--max-cost", "free", "--price-per-hour", "2"], "--max-cost must look like"),
        ("build", ["--steps", "9", "--max-step-time", "2h", "--max-trial-time", "1h"], "(2.00 h) is more than --max-trial-time"),
        ("build", ["--risk", "2"], "risk must lie in (0, 1)"),
        ("build", ["--risk", "200%"], "risk must lie in (0, 1)"),
        ("build", ["--risk", "low"], "argument --risk: expected a chance such as 0.05 or 5%, but got 'low'"),
        ("build", ["--set", "widht=3"], "--set widht has no effect: build never reads params['widht'] (did you mean 'width'?)"),
        ("needs_width", ["--set", "width=8", "--batch-size", "4"], "--batch-size has no effect"),
        ("needs_width", ["--set", "widht=8"], "add --set width=VALUE instead of --set widht, which build never reads"),
        ("missing", [], "has no function 'missing'"),
        ("build", ["--set", "batch_size=lots"], "argument --set: expected a whole number of at least 1, but got 'lots'"),
        ("build", ["--set", "batch_size=2.5"], "expected a whole number of at least 1, but got '2.5'"),
        ("build", ["--set", "width=lots"], "Is --set width=lots right?"),
        ("build", ["--gpu", "a1000x"], "gpu must be a name from the catalog"),
    ],
)
def test_wrong_usage_is_explained(check: Check, function: str, words: list[str], message: str) -> None:
    status, out, err = check(function, *words)
    assert (status, out) == (2, "")
    assert message in err


def test_names_read_late_or_all_at_once_are_known(check: Check) -> None:
    assert check("build", "--set", "scale=3")[0] == 0  # the loss reads it, while the step is traced
    assert check("takes_all", "--set", "number=3")[0] == 0


@pytest.mark.parametrize(
    ("function", "message"), [("cannot_be_traced", "The step cannot be traced"), ("fails", "raised ZeroDivisionError")]
)
def test_failed_prediction_cannot_be_told(check: Check, function: str, message: str) -> None:
    # Python would end with 1, which is the status of what does not fit.
    status, out, _ = check(function, "--json")
    assert status == 3
    assert json.loads(out)["result"] == "cannot tell"
    assert message in json.loads(out)["reason"]


def test_notes_name_the_card_of_an_alias_and_the_assumed_optimizer(check: Check) -> None:
    status, out, err = check("build", "--gpu", "a100")
    assert (status, out.count("\n")) == (0, 1)
    assert "a100 is taken for NVIDIA A100 PCIe 40 GB (a100-pcie-40gb). Other cards of this name: a100-sxm-40gb, " in err
    assert NO_OPTIMIZER in err
    assert json.loads(check("build", "--json")[1])["notes"] == [NO_OPTIMIZER]
    assert json.loads(check("build", "--json", "--mode", "infer")[1])["notes"] == []


def run_action(folder: Path, inputs: dict[str, str]) -> tuple[int, str, str]:
    """Run the steps of the action with ``inputs``, as GitHub does: the exit status, the outputs, and the summary."""
    yaml: Any = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    missing = {name for name, given in action["inputs"].items() if given.get("required")} - set(inputs)
    assert not missing
    given = {name: str(inputs.get(name, declared.get("default", ""))) for name, declared in action["inputs"].items()}
    assert set(inputs) <= set(given)
    outputs, summary = folder / "outputs", folder / "summary"
    for file in (outputs, summary):
        file.write_text("")
    (folder / "perfguard").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perfguard.cli "$@"\n')
    (folder / "perfguard").chmod(0o755)
    always = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GITHUB_OUTPUT": str(outputs),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    status = 0
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        own = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text)
            for name, text in step["env"].items()
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        status = subprocess.run(command, env=always | own, cwd=folder, timeout=120, check=False).returncode
        if status:
            break
    return status, outputs.read_text(), summary.read_text()


def test_action_needs_no_shell_expansion_of_inputs() -> None:
    # An input in the text of a script would be run as code: a pull request could name a file `$(...)`.
    yaml: Any = pytest.importorskip("yaml")
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    assert not [step["name"] for step in steps if "${{" in step["run"]]


@pytest.mark.parametrize(
    ("inputs", "status", "result"),
    [
        ({"gpu": "a100", "set": "width=64\nscale=2"}, 0, "fits"),
        ({"gpu": "a100", "batch-size": "4294967296", "set": "width=1024"}, 1, "does not fit"),
        ({"gpu": "a100", "cannot-tell": "pass", "source": "cannot_be_traced"}, 0, "cannot tell"),
        ({"gpu": "a100", "set": "widht=64"}, 2, ""),
    ],
)
@pytest.mark.slow
def test_steps_of_the_action(tmp_path: Path, script: str, inputs: dict[str, str], status: int, result: str) -> None:
    source = f"{script}:{inputs.get('source', 'build')}"
    ended, outputs, summary = run_action(tmp_path, {**inputs, "source": source, "package": ""})
    assert ended == status
    assert outputs == (f"result={result}\n" if result else "")
    assert summary.startswith(result)


TRAINING = """
import argparse, torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("--name")
words = parser.parse_args()
assert words.name == "two words"
model = torch.nn.Linear(8, words.width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("width", "named", "status", "result"),
    [(64, {"source": "train.py"}, 0, "fits"), (2**32, {"module": "train", "world-size": "2"}, 1, "does not fit")],
)
@pytest.mark.slow
def test_the_action_takes_a_script_with_its_words(
    tmp_path: Path, width: int, named: dict[str, str], status: int, result: str
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = f"--width\n{width}\n--name\ntwo words\n"
    ended, outputs, _ = run_action(tmp_path, {**named, "gpu": "a100", "arguments": words, "package": ""})
    assert (ended, outputs) == (status, f"result={result}\n")

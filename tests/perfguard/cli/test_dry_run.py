"""`perfguard dry-run train.py -- --batch-size 64`, and the same script in the other commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from perfguard import Workload, load_predictor, resolve_device, trace
from perfguard.cli import main
from perfguard.cli import script as module
from perfguard.cli.slurm import slurm_lines
from perfguard.predictor import Estimate

GPU = ("--gpu", "a100-pcie-40gb")
TRAINING = """
import argparse, csv, pathlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from size_of_data import NUM_ROWS  # beside the script

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--evaluate", type=int, default=0)
words = parser.parse_args()

def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = TensorDataset(torch.randn(NUM_ROWS, 256), torch.randint(0, 10, (NUM_ROWS,)))
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(rows, words.batch_size, shuffle=True)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            for x, _ in DataLoader(rows, words.evaluate) if words.evaluate else ():
                model(x.to(device))
        print("epoch", epoch)
    torch.save(model.state_dict(), "model.pt")
    pathlib.Path("results").mkdir()
    csv.writer(open("results/log.csv", "w")).writerow(["done"])

if __name__ == "__main__":
    main()
    sys.exit(0)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a script in a folder of its own, where the command runs too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "size_of_data.py").write_text("NUM_ROWS = 6400\n")

    def written(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return written


Write = Callable[[str], str]


def described(batch_size: int) -> Any:
    """The step of TRAINING, as a workload says it."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    inputs, targets = (batch_size, 256), torch.empty(batch_size, dtype=torch.long, device="meta")
    workload = Workload(model, inputs, targets=targets, loss=nn.functional.cross_entropy, optimizer=torch.optim.AdamW)
    return trace(workload, target=resolve_device("a100"))


def test_script_is_predicted_as_the_workload_that_describes_it(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv[:], sys.path[:], sys.modules["__main__"]
    assert main(["dry-run", write(TRAINING), *GPU, "--json", "--", "--batch-size", "64"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["flops"] == described(64).flops
    assert (document["steps_per_epoch"], document["steps"]) == (100, 300)
    assert document["total_time_s"]["median"] == pytest.approx(300 * document["step_time_s"]["median"], rel=0.01)
    assert "peak_memory_by_phase_bytes" not in document  # it has no evaluation
    assert document["notes"] == []
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_module_runs_as_by_python_m(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Its relative imports work, and what it imports is found from the folder of the command."""
    write("")
    package = Path("trainer")
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "__init__.py").write_text("")
    (package / "sizes.py").write_text("from size_of_data import NUM_ROWS\n")
    text = TRAINING.replace("from size_of_data import", "from ..sizes import")
    (package / "deep" / "__main__.py").write_text(text)
    (package / "deep" / "run.py").write_text(text)
    for name in ("trainer.deep.run", "trainer.deep"):
        assert main(["dry-run", "-m", name, *GPU, "--json", "--", "--batch-size", "64"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["flops"], document["steps"]) == (described(64).flops, 300)
    assert "trainer" not in sys.modules
    assert main(["check", "-m", "trainer.deep", *GPU, "--max-trial-time", "1ms"]) == 1
    assert main(["check", "-m", "trainer.shallow", *GPU]) == 3
    assert "-m trainer.shallow ends with ImportError: No module named trainer.shallow" in capsys.readouterr().out
    assert main(["check", "-m", "traner.deep", *GPU]) == 2
    assert "There is no module or package 'traner'" in capsys.readouterr().err
    assert main(["check", "-m", "trainer.deep", *GPU, "--batch-size", "8"]) == 2


@pytest.mark.parametrize("words", [["-m", "trainer", "train.py"], []])
def test_one_subject_is_named(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check", *words])


def test_larger_evaluation_decides_the_memory(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(TRAINING)
    for rows, phases in (("6400", ["the evaluation", "a training step"]), ("8", ["a training step", "the evaluation"])):
        assert main(["dry-run", script, *GPU, "--json", "--explain", "--", "--evaluate", rows]) == 0
        document = json.loads(capsys.readouterr().out)
        assert list(document["peak_memory_by_phase_bytes"]) == phases
        assert document["peak_memory_by_phase_bytes"][phases[0]] == document["peak_memory_bytes"]
        by_module = document["explain"]["memory_by_module_bytes"]
        assert sum(by_module.values()) == pytest.approx(document["peak_memory_bytes"]["median"], rel=1e-9)
        assert min(by_module.values()) >= 0  # of the phase that decides


def test_people_read_steps_and_the_phase_that_decides(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", write(TRAINING), *GPU, "--", "--evaluate", "6400"]) == 0
    printed = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.out.splitlines() if line.startswith("│")]
    table = {row[0]: row[1] for row in rows if len(row) == 2}
    assert (table["steps per epoch"], table["steps"]) == ("200", "600")
    assert table["the evaluation"].endswith(", which decides")
    assert not table["a training step"].endswith("decides")
    assert "trial time" in table
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["--max-memory", "440MiB"], 3, "cannot tell: "),
        (["--max-trial-time", "1h"], 0, "the budget is 1.00 h"),  # the dry run has counted the steps
        (["--max-trial-time", "1ms"], 1, "does not fit: "),
        (["--max-cost", "$1"], 2, ""),
        (["--batch-size", "64"], 2, ""),
        (["--tf32", "on"], 2, ""),
    ],
)
def test_check_of_a_script_has_the_exit_statuses_of_check(
    write: Write, capsys: pytest.CaptureFixture[str], words: list[str], status: int, line: str
) -> None:
    assert main(["check", write(TRAINING), *GPU, *words, "--", "--batch-size", "64", "--evaluate", "6400"]) == status
    out, err = capsys.readouterr()
    assert out.count("\n") == (status != 2)
    assert line in out
    assert ("most memory is needed by the evaluation" in out) == (status != 2)
    assert bool(err) == (status == 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no training')", "train.py made no step of a torch optimizer. Describe what it runs: train.py:BUILD"),
        ("import sys\nsys.exit(0)", "train.py made no step of a torch optimizer"),
        ("def f():\n    return 1 / 0\nf()", "at train.py:2 with ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: '(' was never closed (train.py, line 1)"),
        ("import sys\nsys.stdin = open('/dev/null')\nname = input('name? ')", "at train.py:3 with EOFError"),
        ("import sys\n\nsys.exit('no data here')", "at train.py:3 with ExitError: status 1: no data here"),
        ("import argparse\nargparse.ArgumentParser().parse_args()", "error: unrecognized arguments: --epochs 3"),
        ("import os\nos.kill(os.getpid(), 9)", "the dry run of train.py was ended by signal 9"),
        ("import time\nwhile True:\n    time.sleep(9)", "at train.py:3 with TimeoutError: it has not ended after 0.5 s"),
    ],
)
def test_script_that_cannot_be_judged_says_so_in_a_line_that_names_its_own(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0.5)
    assert main(["check", write(text), *GPU, "--", "--epochs", "3"]) == 3
    out, err = capsys.readouterr()
    assert message in out
    assert (out.count("\n"), err) == (1, "")


def test_dry_run_of_a_script_that_fails_ends_with_1(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", write("open('missing.csv')"), *GPU]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("perfguard: the dry run of train.py ends at train.py:1 with FileNotFoundError: ")
    assert err.count("\n") == 1


def test_script_that_fails_after_its_training_is_judged_by_its_step(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(TRAINING.replace("sys.exit(0)", "sys.exit(1)"))
    assert main(["dry-run", script, *GPU, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["steps_per_epoch"], document["steps"]) == (200, None)
    assert document["notes"][0].startswith("The dry run did not come to the script's end: ExitError: status 1")
    assert "Give --steps" in document["notes"][1]
    assert main(["check", script, *GPU, "--max-trial-time", "1h"]) == 3
    assert "Give --steps" in capsys.readouterr().err
    assert main(["check", script, *GPU, "--max-trial-time", "1h", "--steps", "600"]) == 0


@pytest.mark.parametrize("gpu", ["a100-pcie-40gb", "cpu"])
def test_script_whose_model_the_host_cannot_hold_is_judged_by_its_bytes(
    write: Write, capsys: pytest.CaptureFixture[str], gpu: str
) -> None:
    where = "cpu" if gpu == "cpu" else "cuda"
    text = f"""
import torch
model = torch.nn.Linear(256, 200_000_000).to("{where}")
data = torch.randn(64, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(data.to("{where}")).mean().backward()
    optimizer.step()
"""
    assert main(["check", write(text), "--gpu", gpu]) == 1
    out, err = capsys.readouterr()
    assert "needs at least" in out
    assert err == ""


def test_a_script_is_predicted_on_several_devices(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", write(TRAINING), "--gpu", "t4,cpu", "--json"]) == 0
    assert {row["gpu"] for row in json.loads(capsys.readouterr().out) if row["total_time_s"]} == {"t4", "cpu"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dry-run", "missing.py"], "There is no file 'missing.py'"),
        (["dry-run", "train.py", "--gpu", "a1000"], "Did you mean 'a100'"),
        (["dry-run", "train.py", "--batch-size", "3"], "The script's own words follow --: train.py -- --batch-size 64"),
        (["check", "train.py", "--set", "width=3"], "--set is not for scripts. The script's own words follow --: train.py -- "),
        (["check", "train.py:build", "--", "--batch-size", "3"], "-- is for a script, such as train.py, but got"),
    ],
)
def test_wrong_usage_is_explained(write: Write, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    write(TRAINING)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perfguard.cli", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    stdin, stdout, stderr = (subprocess.PIPE,) * 3
    return subprocess.Popen(
        command, env=environment, text=True, start_new_session=True, stdin=stdin, stdout=stdout, stderr=stderr
    )


def test_the_lines_of_a_batch_script_reserve_the_upper_end(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(TRAINING)
    assert main(["dry-run", str(script), *GPU, "--log", "none", "--slurm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [line for line in lines if not line.startswith("# ")]
    assert [options[0], options[2]] == ["#SBATCH --gres=gpu:1", "#SBATCH --time=00:01:00"]
    assert re.fullmatch(r"#SBATCH --mem=[3-9]G", options[1])  # 2 GiB for CUDA, and what this process holds
    assert len(lines) == 2 * len(options)  # each has a comment with its source
    assert subprocess.run(["bash"], input="\n".join(lines), text=True, check=True, capture_output=True).stdout == ""


def test_what_is_not_known_is_not_reserved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    described = tmp_path / "model.py"
    described.write_text(
        "from torch import nn\nfrom perfguard import Workload\n"
        "def build(params):\n    return Workload(nn.Linear(8, 8), (4, 8), mode='infer')\n"
    )
    assert main(["predict", f"{described}:build", *GPU, "--log", "none", "--slurm"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("#SBATCH")] == ["#SBATCH --gres=gpu:1"]
    assert "No --time: the steps of the trial are not known. Give --steps." in err
    assert "No --mem" in err


def test_several_processes_share_the_memory_of_their_node() -> None:
    workload = Workload(torch.nn.Linear(8, 8), (4, 8), mode="infer")
    device = resolve_device("a100")
    prediction = load_predictor().predict(trace(workload, target=device), device, steps=10**9)
    lines = [*slurm_lines(prediction, device, host_memory=Estimate(3 * 2**30, 0.1), processes=4)]
    assert lines[1] == "#SBATCH --gres=gpu:4"
    assert lines[3] == "#SBATCH --mem=23G"  # 4 x 3 GiB and 18% more, and 4 x 2 GiB for CUDA
    assert re.fullmatch(r"#SBATCH --time=\d+-\d\d:\d\d:00", lines[5])


@pytest.mark.slow
def test_dry_run_writes_no_file_and_prints_nothing_of_the_script(write: Write, tmp_path: Path) -> None:
    script = write("print('hello', flush=True)\n" + TRAINING)
    with start("dry-run", script, *GPU, "--json", "--", "--evaluate", "64") as process:
        out, err = process.communicate(input="an answer\n", timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    assert json.loads(out)["steps"] == 600
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["size_of_data.py", "train.py"]


@pytest.mark.slow
def test_interrupted_dry_run_leaves_no_process(write: Write) -> None:
    with start("dry-run", write("import time\ntime.sleep(600)"), *GPU) as process:
        ends_at, children = time.monotonic() + 60, list[psutil.Process]()
        while len(children) < 2 and time.monotonic() < ends_at:  # the server, and the script
            time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")
    assert len(children) == 2
    assert psutil.wait_procs(children, timeout=10)[1] == []

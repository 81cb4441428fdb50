"""Collecting for real on this machine's processor, and all that can go wrong on the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfguard import load_predictor, resolve_device
from perfguard.cli import main
from perfguard.exceptions import ConfigurationError, MeasuringError
from perfguard_research.collect.loop import COLUMNS, collect, collecting_device
from perfguard_research.collect.worker import Worker
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import evaluate
from perfguard_research.networks import Network
from perfguard_research.tables import MeasuredRow

MiB = 2**20
SMALL = {"inputs": 16, "width": 32, "depth": 1, "norm": False, "dropout": False, "activation": "relu", "classes": 10}
MLP = MeasuredRow(
    table="collected", source="collected", family="mlp", network=Network(name="perfguard:mlp", config=SMALL), mode="train",
    gpu="cpu", batch_size=8, optimizer="sgd-momentum",
)  # fmt: skip


def with_sizes(**sizes: int) -> MeasuredRow:
    return dataclasses.replace(MLP, network=Network(name="perfguard:mlp", config=SMALL | sizes))


HUGE = dataclasses.replace(with_sizes(inputs=4096, width=4096), batch_size=2**16)
"""Its batch alone has a gibibyte, and a step takes seconds."""
CPU = resolve_device("cpu")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(CPU)
    yield worker
    worker.close()


def run(worker: Worker, measured: MeasuredRow) -> dict[str, str]:
    row = worker.run(measured)
    assert row is not None
    return row


@pytest.mark.slow
def test_collected_table_can_be_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    summary = collect(path, device=CPU, spaces=["mlp", "ops", "nas", "rnn"], max_rows=8, memory_limit=64 * MiB)
    columns, rows = read_table(path)
    assert tuple(columns) == COLUMNS
    assert summary.rows.total() == len(rows) == 8
    assert {row["space"] for row in rows} == {"mlp", "ops", "nas", "rnn"}
    ok = [row for row in rows if row["status"] == "ok"]
    assert len(ok) >= 5
    for row in ok:
        assert float(row["step_time_ms"]) > 0
        assert 0 < float(row["peak_memory_mib"]) < 256
        assert row["framework"].startswith("torch")
    results = evaluate(columns, rows, path, load_predictor())
    assert [result.error for result in results] == [""] * len(rows)
    assert all(result.device == CPU.with_memory(64 * MiB) for result in results)


def test_run_that_does_not_fit_is_one_oom_row() -> None:
    """The allocation fails for real, and the process lives on."""
    worker = Worker(CPU, limit_bytes=256 * MiB)
    try:
        row = run(worker, HUGE)
        assert row["status"] == "oom"
        assert "can't allocate memory" in row["note"]
        assert row["step_time_ms"] == ""
        before = worker.pid
        assert run(worker, MLP)["status"] == "ok"
        assert worker.pid == before
    finally:
        worker.close()


def test_a_run_that_hangs_is_given_up() -> None:
    slow = Worker(CPU, row_limit_s=0.3)
    row = run(slow, HUGE)
    assert (row["status"], row["note"]) == ("timeout", "given up after 0.3 s")
    assert slow.run(HUGE, until=time.monotonic() - 1) is None  # the time of the session is over
    slow.close()


def test_worker_that_dies_costs_one_row(worker: Worker) -> None:
    """Another process takes its place."""
    worker.start()
    assert worker.pid is not None
    threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL)).start()
    row = run(worker, HUGE)
    assert (row["status"], row["note"]) == ("failed", "the process was ended by SIGKILL")
    assert run(worker, MLP)["status"] == "ok"


def test_an_error_of_the_run_is_its_status(worker: Worker) -> None:
    row = run(worker, with_sizes(classes=-1))
    assert row["status"] == "failed"
    assert "cannot be made" in row["note"]


def test_a_process_that_cannot_start_says_why() -> None:
    absent = dataclasses.replace(resolve_device("t4"), name="a card that is not here")
    with pytest.raises(MeasuringError, match="No process could be started on a card that is not here: "):
        Worker(absent).start()


def test_collecting_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected in silence on the processor."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MeasuringError, match=r"NVML shows no GPU here. To collect on the CPU, use --gpu cpu"):
        collecting_device("auto")
    assert collecting_device("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "mlp,audio"], "--space takes vision, text, mlp, rnn, nas, ops, with commas between them, not audio"),
        (["--minutes", "0"], "--minutes must be positive"),
        (["--memory-limit", "much"], "--memory-limit must look like"),
    ],
)
def test_words_that_cannot_be_right_are_explained(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", "--gpu", "cpu", "--out", str(tmp_path / "rows.csv"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_program_leaves_a_table_to_go_on_with(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    words = ["collect", "--gpu", "cpu", "--space", "ops", "--memory-limit", "64MiB", "--out", str(path), "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "perfguard.cli", *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < 4:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert "Ended because Ctrl-C was pressed" in said
    assert main([*words, "--rows", "1"]) == 0
    numbers = [int(row["index"]) for row in read_table(path)[1]]
    assert len(numbers) == len(set(numbers)) > 3


# When the loop ends, and how it goes on


class _Scripted(Worker):
    """Answers at once, with what the test says."""

    status = "failed"

    def start(self) -> None:
        """Nothing."""

    def run(self, row: Any, **_: Any) -> dict[str, str]:
        return {"status": self.status, "note": "no kernel image is available for execution on the device"}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[_Scripted]:
    monkeypatch.setattr("perfguard_research.collect.loop.Worker", _Scripted)
    return _Scripted


def test_collect_ends_after_25_failures_in_a_row(scripted: type[_Scripted], tmp_path: Path) -> None:
    """A card on which everything fails is not tried for ever."""
    summary = collect(tmp_path / "rows.csv", device=CPU, spaces=["ops"])
    assert summary.ended_by == "25 configurations in a row failed"
    assert summary.rows == {("ops", "failed"): 25}
    rows = read_table(tmp_path / "rows.csv")[1]
    assert {row["note"] for row in rows} == {"no kernel image is available for execution on the device"}


def test_time_that_is_over_begins_nothing(scripted: type[_Scripted], tmp_path: Path) -> None:
    summary = collect(tmp_path / "rows.csv", device=CPU, spaces=["ops"], minutes=1e-9)
    assert (summary.rows.total(), summary.ended_by) == (0, "1e-09 minutes are over")
    assert read_table(tmp_path / "rows.csv")[1] == []


@pytest.fixture
def table(scripted: type[_Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rows of the space "ops"."""
    monkeypatch.setattr(scripted, "status", "ok")
    collect(tmp_path / "rows.csv", device=CPU, spaces=["ops"], max_rows=2)
    return tmp_path / "rows.csv"


def indices(table: Path) -> list[str]:
    return [row["index"] for row in read_table(table)[1]]


def test_collecting_goes_on_where_it_was(table: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is there already. Continue it with --resume"):
        collect(table, device=CPU, spaces=["ops"])
    collect(table, device=CPU, spaces=["ops"], max_rows=1, resume=True)
    first = [int(index) for index in indices(table)]
    assert first == sorted(set(first))
    collect(table, device=CPU, spaces=["ops"], max_rows=1, resume=True, memory_limit=2**27)
    assert indices(table)[-1] == indices(table)[0]  # another limit is another order


def test_a_line_that_was_cut_short_is_measured_again(table: Path) -> None:
    """A program that is killed while it writes leaves such a line."""
    before = indices(table)
    table.write_text(table.read_text()[:-40])
    collect(table, device=CPU, spaces=["ops"], max_rows=1, resume=True)
    assert indices(table) == before


@pytest.mark.parametrize(
    ("name", "message"), [("file/rows.csv", "The rows cannot be written to"), ("rows.csv.gz", "end in .csv")]
)
def test_a_table_that_cannot_be_written_fails_before_anything_is_measured(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=message):
        collect(tmp_path / name, device=CPU, spaces=["ops"])

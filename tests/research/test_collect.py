"""Collecting for real on this machine's processor, and all that can go wrong on the way."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfguard import load_predictor, resolve_device
from perfguard.cli import main
from perfguard.exceptions import MeasuringError
from perfguard_research.collect import COLUMNS, CollectReport, collect, collecting_device
from perfguard_research.collect.worker import Worker
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import evaluate
from perfguard_research.networks import Network
from perfguard_research.tables import MeasuredRow, kind_of_table

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


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CollectReport]:
    """Eight rows of this machine."""
    path = tmp_path_factory.mktemp("collect") / "rows.csv"
    summary = collect(path, device=CPU, spaces=["mlp", "ops", "nas", "rnn"], max_rows=8, memory_limit=64 * MiB)
    return path, summary


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a processor takes a C++ compiler")
def test_a_compiled_step_is_a_row_too(worker: Worker) -> None:
    for mode in ("train", "infer"):
        row = run(worker, dataclasses.replace(MLP, compiled=True, mode=mode))
        assert row["status"] == "ok", row
        assert float(row["step_time_ms"]) > 0


@pytest.mark.slow
def test_collected_table_can_be_evaluated(table: tuple[Path, CollectReport]) -> None:
    path, summary = table
    columns, rows = read_table(path)
    assert tuple(columns) == COLUMNS
    assert kind_of_table(columns) == "collected"
    assert summary.rows.total() == len(rows) == 8
    assert {row["space"] for row in rows} == {"mlp", "ops", "nas", "rnn"}
    ok = [row for row in rows if row["status"] == "ok"]
    assert len(ok) >= 5
    for row in ok:
        assert float(row["step_time_ms"]) > 0
        assert 0 < float(row["peak_memory_mib"]) < 256
        assert int(row["num_steps"]) >= 4
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
        assert run(worker, MLP)["status"] == "ok"
        assert worker.starts == 1
    finally:
        worker.close()


def test_a_run_that_hangs_is_given_up(worker: Worker) -> None:
    worker.start()
    slow = Worker(CPU, row_limit_s=0.3)
    row = run(slow, HUGE)
    slow.close()
    assert (row["status"], row["note"]) == ("timeout", "given up after 0.3 s")


def test_worker_that_dies_costs_one_row(worker: Worker) -> None:
    """Another process takes its place."""
    worker.start()
    starts = worker.starts
    assert worker.pid is not None
    threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL)).start()
    row = run(worker, HUGE)
    assert (row["status"], row["note"]) == ("failed", "the process was ended by SIGKILL")
    assert run(worker, MLP)["status"] == "ok"
    assert worker.starts == starts + 1


def test_worker_gives_up_when_the_time_is_over(worker: Worker) -> None:
    start = time.monotonic()
    assert worker.run(HUGE, until=time.monotonic() + 0.2) is None
    assert time.monotonic() - start < 20


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


def test_collecting_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = resolve_device("t4")
    monkeypatch.setattr(
        "perfguard_research.collect.loop.resolve_device", lambda gpu: here if gpu == "auto" else resolve_device(gpu)
    )
    with pytest.raises(MeasuringError, match=r"but this machine has the .*T4. Use --gpu auto"):
        collecting_device("a100")


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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
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

"""Collecting for real on this machine's processor, and all that can go wrong on the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfguard import load_predictor, resolve_device
from perfguard.cli import main
from perfguard.exceptions import ConfigurationError, MeasuringError
from perfguard.measure import Measurement
from perfguard_research.collect.loop import COLUMNS, collect, collecting_device
from perfguard_research.collect.run import limit_memory, measured_columns, run_apart, run_row
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import evaluate
from tests.rows import MLP, mlp

MiB = 2**20
HUGE = dataclasses.replace(mlp(inputs=4096, width=4096, depth=1), batch_size=2**16)
"""Its batch alone has a gibibyte, and a step takes seconds."""
CPU = resolve_device("cpu")


@pytest.mark.slow
def test_collected_table_can_be_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    summary = collect(path, device=CPU, spaces=["mlp", "nas", "rnn"], max_rows=5, memory_limit=64 * MiB)
    columns, rows = read_table(path)
    assert tuple(columns) == COLUMNS
    assert summary.rows.total() == len(rows) == 5
    assert {row["space"] for row in rows} == {"mlp", "nas", "rnn"}
    ok = [row for row in rows if row["status"] == "ok"]
    assert len(ok) >= 3
    for row in ok:
        assert float(row["step_time_ms"]) > 0
        assert 0 < float(row["peak_memory_mib"]) < 256
        assert row["framework"].startswith("torch")
    results = evaluate(columns, rows, path, load_predictor())
    assert [result.error for result in results] == [""] * len(rows)
    assert all(result.device == CPU.with_memory(64 * MiB) for result in results)


def test_run_that_does_not_fit_is_an_oom_row() -> None:
    """The allocation fails for real."""
    row = run_apart(HUGE, CPU, limit_bytes=256 * MiB)
    assert row["status"] == "oom"
    assert "can't allocate memory" in row["note"]
    assert row["step_time_ms"] == ""


def test_an_error_of_the_run_is_its_status() -> None:
    row = run_apart(mlp(classes=-1), CPU)
    assert row["status"] == "failed"
    assert "cannot be made" in row["note"]


class _Ends:
    """Ends the process that receives it."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        function, argument = self.call
        return function, (argument,)


@pytest.mark.parametrize(
    ("row", "status", "note"),
    [
        (HUGE, "timeout", "given up after 0.3 s"),
        (_Ends(signal.raise_signal, signal.SIGKILL), "failed", "the process was ended by SIGKILL"),
        (_Ends(os._exit, 3), "failed", "the process ended with status 3"),
    ],
)
def test_process_that_hangs_or_dies_costs_one_row(row: Any, status: str, note: str) -> None:
    measured = run_apart(row, CPU, limit_s=0.3 if status == "timeout" else 60)
    assert (measured["status"], measured["note"]) == (status, note)


def test_row_of_a_card_has_the_peaks_of_allocator_and_driver() -> None:
    measured = Measurement(
        "ok", "t4", "T4", 550 * MiB, 0.004, 1.0, 9, "torch", "", allocated_peak_bytes=90 * MiB, reserved_peak_bytes=100 * MiB
    )
    row = measured_columns(measured, 50)
    names = "peak_memory_mib", "allocated_peak_mib", "reserved_peak_mib", "step_time_ms", "num_steps"
    assert [row[name] for name in names] == ["550", "90", "100", "4", "50"]
    disturbed = measured_columns(dataclasses.replace(measured, note="other processes used the GPU"), 50)
    assert (disturbed["status"], disturbed["step_time_ms"], disturbed["reserved_peak_mib"]) == ("ok", "", "100")


def test_limit_counts_context_like_a_smaller_card(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    card = dataclasses.replace(resolve_device("a100"), context_bytes=500 * MiB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=40_000 * MiB))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", shares.append)
    limit_memory(card, 16_500 * MiB)
    assert shares == [pytest.approx(16_000 / 40_000)]


def test_switches_of_a_row_are_set() -> None:
    try:
        run_row(dataclasses.replace(MLP, tf32="on", cudnn_benchmark=True), CPU)
        assert torch.backends.cudnn.benchmark
        assert torch.backends.cuda.matmul.allow_tf32
        run_row(dataclasses.replace(MLP, tf32="off"), CPU)
        assert not torch.backends.cudnn.allow_tf32
    finally:
        run_row(MLP, CPU)


def test_collecting_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected in silence on the processor."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MeasuringError, match=r"NVML shows no GPU here. To collect on the CPU, use --gpu cpu"):
        collecting_device("auto")
    assert collecting_device("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "mlp,audio"], "--space takes vision, text, mlp, rnn, nas, with commas between them, not audio"),
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
    words = ["collect", "--gpu", "cpu", "--space", "mlp", "--memory-limit", "64MiB", "--out", str(path), "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "perfguard.cli", *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert "Ended because Ctrl-C was pressed" in said
    assert main([*words, "--rows", "1"]) == 0
    numbers = [int(row["index"]) for row in read_table(path)[1]]
    assert len(numbers) == len(set(numbers)) > 2


# When the loop ends, and how it goes on


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What every run answers, at once."""
    columns = {"status": "failed", "note": "no kernel image is available for execution on the device"}
    monkeypatch.setattr("perfguard_research.collect.loop.run_apart", lambda row, device, **_: dict(columns))
    return columns


def test_collect_ends_after_25_failures_in_a_row(scripted: dict[str, str], tmp_path: Path) -> None:
    """A card on which everything fails is not tried for ever."""
    summary = collect(tmp_path / "rows.csv", device=CPU, spaces=["mlp"])
    assert summary.ended_by == "25 configurations in a row failed"
    assert summary.rows == {("mlp", "failed"): 25}
    rows = read_table(tmp_path / "rows.csv")[1]
    assert {row["note"] for row in rows} == {"no kernel image is available for execution on the device"}


def test_time_that_is_over_begins_nothing(scripted: dict[str, str], tmp_path: Path) -> None:
    summary = collect(tmp_path / "rows.csv", device=CPU, spaces=["mlp"], minutes=1e-9)
    assert (summary.rows.total(), summary.ended_by) == (0, "1e-09 minutes are over")
    assert read_table(tmp_path / "rows.csv")[1] == []


@pytest.fixture
def table(scripted: dict[str, str], tmp_path: Path) -> Path:
    """Two rows of the space "mlp"."""
    scripted["status"] = "ok"
    collect(tmp_path / "rows.csv", device=CPU, spaces=["mlp"], max_rows=2)
    return tmp_path / "rows.csv"


def indices(table: Path) -> list[str]:
    return [row["index"] for row in read_table(table)[1]]


def test_collecting_goes_on_where_it_was(table: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is there already. Continue it with --resume"):
        collect(table, device=CPU, spaces=["mlp"])
    collect(table, device=CPU, spaces=["mlp"], max_rows=1, resume=True)
    first = [int(index) for index in indices(table)]
    assert first == sorted(set(first))
    collect(table, device=CPU, spaces=["mlp"], max_rows=1, resume=True, memory_limit=2**27)
    assert indices(table)[-1] == indices(table)[0]  # another limit is another order


def test_a_line_that_was_cut_short_is_measured_again(table: Path) -> None:
    """A program that is killed while it writes leaves such a line."""
    before = indices(table)
    table.write_text(table.read_text()[:-40])
    collect(table, device=CPU, spaces=["mlp"], max_rows=1, resume=True)
    assert indices(table) == before


@pytest.mark.parametrize(
    ("name", "message"), [("file/rows.csv", "The rows cannot be written to"), ("rows.csv.gz", "end in .csv")]
)
def test_a_table_that_cannot_be_written_fails_before_anything_is_measured(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=message):
        collect(tmp_path / name, device=CPU, spaces=["mlp"])

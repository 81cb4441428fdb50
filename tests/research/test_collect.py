"""Collecting for real on this machine's processor, and all that can go wrong on the way."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
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
from perfguard_research.collect import COLUMNS, CollectReport, Recipe, collect, collecting_device
from perfguard_research.collect.health import CardHealth, Trouble
from perfguard_research.collect.loop import _Watch, marked
from perfguard_research.collect.plan import Plan
from perfguard_research.collect.rows import Journal
from perfguard_research.collect.spaces import Draft
from perfguard_research.collect.worker import Worker
from perfguard_research.evaluate import evaluate
from perfguard_research.tables import kind_of_table, read_table
from tests.fake_gpu import FakeGpu, FakeNvml

MiB = 2**20
SMALL = {"inputs": 16, "width": 32, "depth": 1, "norm": False, "dropout": False, "activation": "relu", "classes": 10}
RECIPE = Recipe(space="mlp", kind="mlp", model="mlp-1", family="mlp", sizes=SMALL, batch_size=8)
HUGE = dataclasses.replace(RECIPE, sizes=SMALL | {"inputs": 4096, "width": 4096}, batch_size=2**16)
"""Its batch alone has a gibibyte, and a step takes seconds."""
CPU = resolve_device("cpu")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(CPU)
    yield worker
    worker.close()


def run(worker: Worker, recipe: Recipe) -> dict[str, str]:
    row = worker.run(recipe, long=False, stop=lambda: False)
    assert row is not None
    return row


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CollectReport]:
    """Eight rows of this machine."""
    path = tmp_path_factory.mktemp("collect") / "rows.csv.gz"
    summary = collect(path, device=CPU, spaces=["mlp", "ops", "nas", "rnn"], max_rows=8, memory_limit=64 * MiB)
    return path, summary


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a processor takes a C++ compiler")
def test_a_compiled_step_is_a_row_too(worker: Worker) -> None:
    for changes in ({}, {"mode": "infer", "optimizer": None}):
        row = run(worker, dataclasses.replace(RECIPE, compiled=True, **changes))  # type: ignore[arg-type]
        assert row["status"] == "ok", row
        assert float(row["step_time_ms"]) > 0


@pytest.mark.slow
def test_collected_table_can_be_evaluated(table: tuple[Path, CollectReport]) -> None:
    path, summary = table
    columns, rows = read_table(path)
    assert tuple(columns) == COLUMNS
    assert kind_of_table(columns) == "collected"
    assert summary.num_rows == len(rows) == 8
    assert {row["space"] for row in rows} == {"mlp", "ops", "nas", "rnn"}
    ok = [row for row in rows if row["status"] == "ok"]
    assert len(ok) >= 5
    for row in ok:
        assert float(row["step_time_ms"]) > 0
        assert float(row["step_time_iqr_ms"]) >= 0
        assert 0 < float(row["peak_memory_mib"]) < 256
        assert int(row["num_steps"]) >= 4
        assert row["framework"].startswith("torch")
    results = evaluate(columns, rows, path, load_predictor())
    assert [result.error for result in results] == [""] * len(rows)
    assert all(result.device == CPU.with_memory(64 * MiB) for result in results)


@pytest.mark.slow
def test_collecting_goes_on_where_it_was(table: tuple[Path, CollectReport], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(table[0].read_bytes())
    with pytest.raises(ConfigurationError, match=r"is there already. Continue it with --resume"):
        collect(path, device=CPU, spaces=["mlp", "ops", "nas", "rnn"], max_rows=1)
    again = {"device": CPU, "spaces": ["mlp", "ops", "nas", "rnn"], "memory_limit": 64 * MiB, "resume": True}
    summary = collect(path, max_rows=2, **again)  # type: ignore[arg-type]
    assert (summary.earlier_rows, summary.num_rows) == (8, 2)
    numbers = [int(row["index"]) for row in read_table(path)[1]]
    assert numbers == list(range(10))
    other = collect(path, max_rows=1, **again | {"memory_limit": 128 * MiB})  # type: ignore[arg-type]
    assert other.earlier_rows == 10
    assert [row["index"] for row in read_table(path)[1]][-1] == "0"  # another limit is another order


def test_run_that_does_not_fit_is_one_oom_row() -> None:
    """The allocation fails for real, and the process lives on."""
    worker = Worker(CPU, limit_bytes=256 * MiB)
    try:
        row = run(worker, HUGE)
        assert row["status"] == "oom"
        assert "can't allocate memory" in row["note"]
        assert row["step_time_ms"] == ""
        assert run(worker, RECIPE)["status"] == "ok"
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
    threading.Timer(0.3, os.kill, (worker.last_pid, signal.SIGKILL)).start()
    row = run(worker, HUGE)
    assert (row["status"], row["note"]) == ("failed", "the process was ended by SIGKILL")
    assert run(worker, RECIPE)["status"] == "ok"
    assert worker.starts == starts + 1


def test_worker_gives_up_at_once_when_collecting_stops(worker: Worker) -> None:
    start = time.monotonic()
    assert worker.run(HUGE, long=False, stop=lambda: True) is None
    assert time.monotonic() - start < 20


def test_an_error_of_the_run_is_its_status(worker: Worker) -> None:
    row = run(worker, dataclasses.replace(RECIPE, sizes=SMALL | {"classes": -1}))
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


def test_marked_names_trouble_and_drops_what_it_spoils() -> None:
    row = {"status": "ok", "step_time_ms": "5", "step_energy_j": "1", "peak_memory_mib": "900"}
    assert marked(row, Trouble()) == row | {"trouble": ""} | dict.fromkeys(())
    shared = marked(row, Trouble(("other processes on the GPU: 7",), spoils_time=True))
    assert (shared["status"], shared["step_time_ms"], shared["step_energy_j"], shared["peak_memory_mib"]) == ("ok", "", "", "900")
    assert shared["trouble"] == "other processes on the GPU: 7"
    broken = marked(row, Trouble(("Xid 31",), spoils_all=True))
    assert (broken["status"], broken["step_time_ms"], broken["peak_memory_mib"]) == ("failed", "", "")


class InstantWorker(Worker):
    """Runs nothing; meanwhile something happens to the card."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(CPU)
        self.gpu = gpu
        self.facts = {"pid": str(gpu.own_pid), "uuid": gpu.uuid}

    def start(self) -> None:
        pass

    def run(self, recipe: Recipe, **_: Any) -> dict[str, str]:
        self.rows += 1
        if self.rows == 2:
            self.gpu.others = {7: MiB}
        if self.rows == 3:
            self.gpu.others, self.gpu.xids = {}, [31]
        if self.rows == 4:
            self.gpu.lost = True
        return {"status": "ok", "step_time_ms": "5", "peak_memory_mib": "900"}


def test_watch_marks_rows_with_what_befell_the_card() -> None:
    gpu = FakeGpu(initialized=True, utilisation=0)
    watch = _Watch(InstantWorker(gpu), CardHealth(gpu.uuid, nvml=FakeNvml(gpu)))
    plan = Plan(Draft(0, RECIPE, 0.1, False, False), RECIPE)
    rows, troubles = zip(*(watch.run(plan, stop=lambda: False) for _ in range(4)), strict=True)
    seen = [(row["status"], row["step_time_ms"], row["peak_memory_mib"], row["trouble"]) for row in rows]
    assert seen == [
        ("ok", "5", "900", ""),
        ("ok", "", "900", "other processes on the GPU: 7"),
        ("failed", "", "", "other processes on the GPU: 7; Xid 31"),
        ("failed", "", "", "the GPU was lost"),
    ]
    assert [trouble.fatal for trouble in troubles] == [False, False, False, True]


def test_watch_marks_all_rows_of_a_busy_card() -> None:
    """A card that is busy before the first run is reported, too."""
    gpu = FakeGpu(initialized=True, utilisation=70)
    watch = _Watch(InstantWorker(gpu), CardHealth(gpu.uuid, nvml=FakeNvml(gpu)))
    said: list[str] = []
    watch.look_at_the_idle_card(said.append)
    assert said == [
        "The GPU is not ours alone (70% busy, no process is seen on it): rows are marked, their times and energy left out."
    ]
    row, _ = watch.run(Plan(Draft(0, RECIPE, 0.1, False, False), RECIPE), stop=lambda: False)
    assert row is not None
    assert (row["step_time_ms"], row["trouble"]) == ("", "the GPU was busy before the first run")


def test_journal_drops_a_cut_line(tmp_path: Path) -> None:
    """Its configuration is measured again."""
    path = tmp_path / "rows.csv"
    journal = Journal(path, resume=False)
    for number in ("0", "1"):
        journal.write({"order": "o", "index": number, "recipe": RECIPE.to_json()})
    journal.close()
    partial = path.with_name("rows.csv.partial")  # as a killed program leaves it
    partial.write_text(partial.read_text()[:-40])
    again = Journal(path, resume=True)
    assert [row["index"] for row in again.earlier] == ["0"]
    again.finish()
    assert not partial.exists()
    assert [row["index"] for row in read_table(path)[1]] == ["0"]


def test_journal_that_cannot_be_written_fails_first(tmp_path: Path) -> None:
    """It is known before anything is measured."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="The rows cannot be written to"):
        Journal(tmp_path / "file" / "rows.csv", resume=False)


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
    assert main(["collect", "--gpu", "cpu", "--out", str(tmp_path / "rows.csv"), *words]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def started(path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perfguard.cli", "collect", "--gpu", "cpu", "--space", "ops", "--out", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--memory-limit", "64MiB", *words], env=environment, stderr=subprocess.PIPE, text=True)
    partial = path.with_name(f"{path.name}.partial")
    end = time.monotonic() + 120
    while not partial.exists() or partial.read_text().count("\n") < 4:
        assert process.poll() is None, process.stderr
        assert time.monotonic() < end
        time.sleep(0.1)
    return process


@pytest.mark.slow
def test_sighup_leaves_a_table_and_sigkill_a_partial(tmp_path: Path) -> None:
    """A lost connection leaves a whole table, a kill one to go on with."""
    path = tmp_path / "rows.csv.gz"
    process = started(path)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Ended because SIGHUP was received" in said
    with gzip.open(path, "rt") as file:
        first = len(file.readlines()) - 1
    assert first >= 3
    killed = started(path, "--resume", "--minutes", "5")
    killed.kill()
    killed.communicate(timeout=60)
    assert (
        main(
            [
                "collect",
                "--gpu",
                "cpu",
                "--space",
                "ops",
                "--out",
                str(path),
                "--memory-limit",
                "64MiB",
                "--resume",
                "--rows",
                "1",
            ]
        )
        == 0
    )
    numbers = [int(row["index"]) for row in read_table(path)[1]]
    assert len(numbers) == len(set(numbers)) > first
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv.gz"]
    assert all(json.loads(row["recipe"]) for row in read_table(path)[1])

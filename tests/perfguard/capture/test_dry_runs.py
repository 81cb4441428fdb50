"""Dry runs change nothing of the user's, and whatever an objective does in one, the process that asks goes on."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture import Answer, Ask, DryRuns, SelfEnded, dry_runs
from perfguard.capture.seal import RUNGS, inherited, ladder
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError, TooLargeError
from perfguard.workload import CapturedTrial
from tests.warm import run_fresh

A100 = resolve_device("a100")
Objective = Callable[[Ask], object]


def train(width: int = 8, *, batch: int = 32, rate: float = 0.1, epochs: int = 2, model: Any = None, data: Any = None) -> Any:
    model = nn.Sequential(nn.Linear(20, width), nn.Linear(width, 3)) if model is None else model
    model.to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    data = TensorDataset(torch.randn(320, 20), torch.randint(0, 3, (320,))) if data is None else data
    for _ in range(epochs):
        for x, y in DataLoader(data, batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
    return model


def answering(params: dict[str, Any], **others: float) -> Callable[..., Answer]:
    """Of the parameters that ``others`` has, it gives another value."""

    def answer(name: str) -> Answer:
        return Answer(name, params[name], others.get(name))

    return answer


def no_params(*question: Any) -> Answer:
    raise AssertionError(question)


class Bell:
    """A pipe that dry runs write a byte to. The seal leaves it open, for these tests alone."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)

    def ring(self, text: bytes = b".") -> None:
        os.write(self._write, text)

    def heard(self) -> bytes:
        try:
            return os.read(self._read, 10_000)
        except BlockingIOError:
            return b""


@pytest.fixture
def bell(monkeypatch: pytest.MonkeyPatch) -> Bell:
    bell, leave_files = Bell(), inherited.leave_files
    monkeypatch.setattr(ladder, "leave_files", lambda keep, **settings: leave_files([*keep, bell._write], **settings))
    return bell


def is_alive(process: int) -> bool:
    """A process that nobody has waited for yet has ended, too."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(process: int, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while is_alive(process) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(process)


# --- Nothing of the user's changes ----------------------------------------------------------------------------------------------


def test_weights_gradients_and_random_numbers_stay_as_they_are(dry: Callable[..., DryRuns]) -> None:
    model = nn.Linear(20, 3)
    model(torch.randn(4, 20)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]

    def objective(ask: Ask) -> None:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        train(model=model)

    captured = dry(objective).capture(no_params)
    assert captured.steps == 20
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    found = [parameter.grad for parameter in model.parameters()]
    assert all(one is not None and torch.equal(one, other) for one, other in zip(found, gradients, strict=True))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(states[2], torch.get_rng_state())
    assert not torch.cuda.is_initialized()


def test_a_dry_run_reaches_no_database_and_leaves_its_connections_alone(postgres_url: str, dry: Callable[..., DryRuns]) -> None:
    """Two processes that talk over one connection get each other's answers."""
    engine = sqlalchemy.create_engine(postgres_url)

    def backend() -> Any:
        with engine.connect() as connection:
            return connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()

    own = backend()

    def objective(ask: Ask) -> None:
        backend()
        train()

    with pytest.raises(CaptureError, match="A dry run has no network"):
        dry(objective).capture(no_params)
    assert backend() == own
    engine.dispose()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("rung", RUNGS)
def test_files_stay_as_they_are(rung: str, dry: Callable[..., DryRuns], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFGUARD_SEAL", rung)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "weights.pt").write_bytes(b"weights")
    (tmp_path / "notes.txt").write_text("notes")
    database = sqlite3.connect(tmp_path / "own.db")
    database.execute("CREATE TABLE found (value)")
    database.commit()
    log = (tmp_path / "run.log").open("a")
    handler = logging.FileHandler(tmp_path / "handler.log")
    before = _contents(tmp_path)

    def objective(ask: Ask) -> None:
        import shutil

        folder = tmp_path / "runs" / "0"
        folder.mkdir(parents=True)
        os.makedirs(tmp_path / "more")  # noqa: PTH103
        model = train()
        torch.save(model.state_dict(), folder / "best.pt")
        model.load_state_dict(torch.load(folder / "best.pt"))  # what was saved is there for this objective
        torch.save(model.state_dict(), tmp_path / "notes.txt")
        np.save(tmp_path / "loss.npy", np.zeros(3))
        (tmp_path / "notes.txt").write_text("other")
        with open(tmp_path / "notes.txt", "a") as notes:  # noqa: PTH123
            notes.write("more")
        (tmp_path / "old" / "weights.pt").unlink()
        (tmp_path / "notes.txt").rename(tmp_path / "renamed.txt")
        shutil.rmtree(tmp_path / "old")
        os.remove(tmp_path / "renamed.txt")  # noqa: PTH107
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "handler.log",
            "loss.npy",
            "more",
            "own.db",
            "run.log",
            "runs",
        ]
        try:
            handler.emit(logging.LogRecord("user", logging.INFO, "", 1, "dry", (), None))
            log.write("dry")
            log.flush()
        except OSError:
            pass
        try:
            database.execute("INSERT INTO found VALUES (1)")
            database.commit()
        except sqlite3.OperationalError:
            pass

    captured = dry(objective).capture(no_params)
    assert (captured.unseen, captured.steps) == ("", 20)
    assert _contents(tmp_path) == before
    log.write("real")
    log.close()
    handler.close()
    assert (tmp_path / "run.log").read_text() == "real"
    assert database.execute("SELECT * FROM found").fetchall() == []
    database.close()


@pytest.mark.parametrize(("place", "copies"), [("cuda:0", 1), (None, 1), ("cpu", 0)])
def test_a_checkpoint_of_the_trial_is_loaded_beside_what_training_has_left(
    place: str | None, copies: int, dry: Callable[..., DryRuns], tmp_path: Path
) -> None:
    def objective(ask: Ask) -> None:
        model = train(width=1000, batch=4)
        torch.save({"model": model.state_dict()}, tmp_path / "best.pt")
        model.load_state_dict(torch.load(tmp_path / "best.pt", map_location=place)["model"])

    found = dry(objective).capture(no_params)
    num_bytes = 4 * (21 * 1000 + 3 * 1001)
    peaks = [phase.peak_live_bytes for name, phase in found.phases.items() if "checkpoint" in name]
    assert len(peaks) == copies
    assert all(3 * num_bytes <= peak < 4 * num_bytes for peak in peaks)  # and the gradients


@pytest.mark.parametrize("store", ["http://127.0.0.1:9", "sqlite:///{folder}/mlflow.db"])
def test_mlflow_starts_no_run(store: str, dry: Callable[..., DryRuns], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is another process, so a seal for files alone would not keep a run from being made there."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    def objective(ask: Ask) -> None:
        mlflow.set_tracking_uri(store.format(folder=tmp_path))  # nobody listens, so a request would raise
        with mlflow.start_run():
            mlflow.log_param("width", 8)
            train()
            mlflow.MlflowClient().log_metric(mlflow.active_run().info.run_id, "loss", 1.0)

    assert dry(objective).capture(no_params).unseen == ""
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_nothing(dry: Callable[..., DryRuns], capfd: pytest.CaptureFixture[str]) -> None:
    def objective(ask: Ask) -> None:
        print("hello")
        sys.stderr.write("hello")
        os.write(1, b"hello")
        subprocess.run(["echo", "hello"], check=True)
        train()

    print("before", end="")  # in a buffer as the server is forked
    assert dry(objective).capture(no_params).unseen == ""
    assert capfd.readouterr() == ("before", "")


def test_a_loader_of_before_keeps_its_workers(dry: Callable[..., DryRuns]) -> None:
    loader = DataLoader(TensorDataset(torch.arange(40.0)), 4, num_workers=1, persistent_workers=True)
    running = [iter(loader)]
    assert next(running[0])[0].tolist() == [0, 1, 2, 3]

    def objective(ask: Ask) -> None:
        for (x,) in loader:  # its own pass, in a process of its own
            assert x.tolist() == [0, 1, 2, 3]
            break
        running.clear()
        train()

    runs = dry(objective)
    assert runs.capture(no_params).unseen == ""
    runs.close()  # beside workers that know the pipe of the server
    assert [batch[0][0].item() for batch in running[0]] == [4, 8, 12, 16, 20, 24, 28, 32, 36]
    running.clear()


def test_an_objective_that_asks_for_threads_computes_in_one(dry: Callable[..., DryRuns]) -> None:
    """OpenMP waits for the threads of the process before the fork, which are not there."""

    def objective(ask: Ask) -> None:
        torch.set_num_threads(4)
        torch.set_num_interop_threads(4)
        assert torch.get_num_threads() == 1
        train()

    assert dry(objective).capture(no_params).unseen == ""


def test_an_iterator_of_before_is_not_read_on(dry: Callable[..., DryRuns]) -> None:
    iterator = iter(DataLoader(TensorDataset(torch.arange(4.0))))
    with pytest.raises(CaptureError, match="begun before the trial"):
        dry(lambda ask: next(iterator)).capture(no_params)
    assert len([*iterator]) == 4


# --- Whatever the objective does ------------------------------------------------------------------------------------------------


def hang_in_c(ask: Ask) -> None:
    time.sleep(1000)


def hang_without_end(ask: Ask) -> None:
    while True:
        try:
            train()
            time.sleep(1000)
        except BaseException:
            continue


def crash(ask: Ask) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def eat(ask: Ask) -> None:
    kept = []
    while True:
        kept.append(np.ones(2**21))


def leave(ask: Ask) -> None:
    sys.exit("that was it")


def leave_at_once(ask: Ask) -> None:
    os._exit(0)


def step_never(ask: Ask) -> None:
    for _ in DataLoader(TensorDataset(torch.randn(8, 20))):
        pass


def have_a_bug(ask: Ask) -> None:
    nn.Linear(20, 3).cuda()(torch.randn(4, 21).cuda())


def return_what_cannot_be_asked(ask: Ask) -> None:
    ask(lambda: None)


TROUBLES: list[tuple[Objective, str]] = [
    (hang_in_c, r"did not end within 0\.3 s"),
    (hang_without_end, r"did not end within 0\.3 s"),
    (crash, "ended by signal 11"),
    (eat, r"more than 0\.125 GiB of host memory"),
    (leave, r"test_dry_runs\.py:\d+ with SystemExit: that was it"),
    (leave_at_once, r"exit status 0"),
    (step_never, "no step of a torch optimizer"),
    (have_a_bug, rf"test_dry_runs\.py:{have_a_bug.__code__.co_firstlineno + 1} with RuntimeError: .*4, 21"),
    (return_what_cannot_be_asked, r"test_dry_runs\.py:\d+ with \w+: .*pickle"),
]


@pytest.mark.parametrize(("trouble", "message"), TROUBLES, ids=[trouble.__name__ for trouble, _ in TROUBLES])
def test_a_dry_run_in_trouble_says_so_and_the_next_one_runs(
    dry: Callable[..., DryRuns], trouble: Objective, message: str
) -> None:
    def objective(ask: Ask) -> None:
        trouble(ask) if ask("troubles") else train()

    runs = dry(objective, most_seconds=0.3 if "hang" in trouble.__name__ else 20, most_bytes=2**27)
    runs.start()
    with pytest.raises(CaptureError, match=message):
        runs.capture(answering({"troubles": True}))
    runs._most_seconds = 20
    assert runs.capture(answering({"troubles": False})).steps == 20
    with pytest.raises(CaptureError, match=message):  # remembered
        runs.capture(answering({"troubles": True}), {"troubles": True})


def test_an_objective_that_forks_is_heard_once(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        child = os.fork()
        assert ask("width") == 8
        train()
        if child:
            os.waitpid(child, 0)

    runs = dry(objective)
    assert runs.capture(answering({"width": 8})).steps == 20
    with pytest.raises(CaptureError, match="AssertionError"):
        runs.capture(answering({"width": 9}))


def test_processes_that_the_objective_starts_end_with_its_dry_run(dry: Callable[..., DryRuns], bell: Bell) -> None:
    def objective(ask: Ask) -> None:
        bell.ring(b"%d" % subprocess.Popen(["sleep", "1000"]).pid)
        train()

    assert dry(objective).capture(no_params).unseen == ""
    assert ends(int(bell.heard()))


def test_a_slow_loader_gives_few_batches(dry: Callable[..., DryRuns]) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.001)
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    data = Slow(torch.randn(100_000, 20), torch.randint(0, 3, (100_000,)))
    captured = dry(lambda ask: train(data=data, batch=8, epochs=3)).capture(no_params)
    assert (captured.steps_per_epoch, captured.steps) == (12_500, 37_500)


def test_what_answers_may_raise(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        try:
            ask("width")
        finally:
            train()

    runs = dry(objective)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            runs.capture(lambda name: Answer(name, 1 / 0))
    assert runs.capture(answering({"width": 8})).steps == 20


# --- What is remembered ---------------------------------------------------------------------------------------------------------


def test_a_learning_rate_makes_no_dry_run(dry: Callable[..., DryRuns], bell: Bell) -> None:
    def objective(ask: Ask) -> None:
        bell.ring()
        train(ask("width"), rate=ask("rate"))

    runs = dry(objective)
    first = runs.capture(answering({"width": 8, "rate": 0.1}, rate=0.3))
    assert bell.heard() == b".."  # the second one tries another rate
    for rate in (0.2, 0.4, 1.0):
        params = {"width": 8, "rate": rate}
        assert runs.capture(answering(params, rate=0.7), params) is first
    assert bell.heard() == b""
    params = {"width": 16, "rate": 0.1}
    assert runs.capture(answering(params, rate=0.3), params) is not first
    assert bell.heard() == b"."


def test_a_float_that_changes_the_step_is_noticed(dry: Callable[..., DryRuns], bell: Bell) -> None:
    def objective(ask: Ask) -> None:
        bell.ring()
        train(int(100 * ask("share")))

    runs = dry(objective)
    peaks = []
    for share in (0.1, 0.5, 0.9):
        params = {"share": share}
        peaks.append(runs.capture(answering(params, share=0.3), params).graph.peak_live_bytes)
    assert peaks == sorted(set(peaks))
    assert bell.heard() == b"...."
    runs.capture(answering({"share": 0.5}, share=0.3), {"share": 0.5})
    assert bell.heard() == b""


@pytest.mark.parametrize("breaks", [False, True])
def test_later_dry_runs_are_short_where_that_counts_the_same_steps(dry: Callable[..., DryRuns], bell: Bell, breaks: bool) -> None:
    def objective(ask: Ask) -> None:
        model = nn.Linear(20, ask("width")).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=ask("rate"))
        for _ in range(2):
            for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(64, 20)), 2)):
                if breaks and number == 20:
                    break
                bell.ring()
                optimizer.zero_grad()
                model(x.cuda()).mean().backward()
                optimizer.step()

    runs, steps = dry(objective), 40 if breaks else 64
    assert runs.capture(answering({"width": 8, "rate": 0.1}, rate=0.3)).steps == steps
    bell.heard()
    assert runs.capture(answering({"width": 16, "rate": 0.1}, rate=0.3)).steps == steps
    assert len(bell.heard()) == (21 if breaks else 5)  # steps of the first epoch, and one of the second


def test_a_float_that_changes_the_number_of_steps_is_noticed(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        share = ask("share")
        train(data=TensorDataset(torch.randn(int(320 * share), 20), torch.zeros(int(320 * share), dtype=torch.int64)))

    runs = dry(objective)
    assert [runs.capture(answering({"share": share}, share=0.3)).steps for share in (0.5, 1.0)] == [10, 20]


def end_itself(width: int) -> None:
    if width % 4:
        raise SelfEnded("no such width")
    train()


@pytest.mark.parametrize(
    ("run", "error", "widths"),
    [(end_itself, SelfEnded, (1, 2, 3)), (lambda width: train(2**width), TooLargeError, (60, 61, 62, 59))],
)
def test_trials_that_end_themselves_or_are_too_large_do_not_end_dry_runs(
    run: Callable[[int], object], error: type[Exception], widths: tuple[int, ...], dry: Callable[..., DryRuns]
) -> None:
    runs = dry(lambda ask: run(ask("width")))
    for width in widths:
        with pytest.raises(error):
            runs.capture(answering({"width": width}), {"width": width})
    assert runs.capture(answering({"width": 4}), {"width": 4}).steps == 20


def test_a_rate_of_zero_is_another_step(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        share = ask("share")
        train(model=nn.Sequential(nn.Linear(20, 3), *([nn.Dropout(share)] if share else [])))

    runs = dry(objective)
    some, more, none = (runs.capture(answering({"share": value}, share=0.5), {"share": value}) for value in (0.1, 0.2, 0.0))
    assert some is more
    assert none.graph.content_hash != some.graph.content_hash


def test_parameters_may_be_drawn_after_training_began(dry: Callable[..., DryRuns], bell: Bell) -> None:
    def objective(ask: Ask) -> None:
        bell.ring()
        model = train(ask("width"))
        train(model=model, batch=ask("batch"))

    runs = dry(objective)
    params = {"width": 8, "batch": 64}
    captured = runs.capture(answering(params), params)
    assert runs.capture(answering(params), params) is captured
    assert bell.heard() == b"."
    with pytest.raises(KeyError, match="batch"):
        runs.capture(answering({"width": 8}), {"width": 8})


def test_an_equal_trial_is_asked_for_its_parameters_without_a_dry_run(dry: Callable[..., DryRuns], bell: Bell) -> None:
    def objective(ask: Ask) -> None:
        bell.ring()
        train(ask("width"), batch=ask("batch"), rate=ask("rate"))

    runs, asked = dry(objective), []

    def answer(name: str) -> Answer:
        asked.append(name)
        return answering({"width": 8, "batch": 16, "rate": 0.1 * len(asked)}, rate=0.7)(name)

    first = runs.capture(answer)
    assert bell.heard() == b".."
    assert runs.capture(answer) is first
    assert bell.heard() == b""
    assert asked == ["width", "batch", "rate"] * 2


def test_what_is_asked_after_another_float_is_not_foreseen(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        train(ask("wide") if ask("rate") > 0.5 else ask("narrow"))

    runs = dry(objective)
    narrow = runs.capture(answering({"rate": 0.1, "narrow": 8}, rate=0.3))
    wide = runs.capture(answering({"rate": 0.9, "wide": 64}, rate=0.7))
    assert wide.graph.peak_live_bytes > narrow.graph.peak_live_bytes


def test_what_is_asked_decides_which_parameters_are_needed(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        train(ask("width") if ask("kind") == "wide" else 4)

    runs = dry(objective)
    narrow = runs.capture(answering({"kind": "narrow"}), {"kind": "narrow"})
    wide = {"kind": "wide", "width": 64}
    assert runs.capture(answering(wide), wide).graph.peak_live_bytes > narrow.graph.peak_live_bytes
    assert runs.capture(answering({"kind": "narrow"})) is narrow
    wider = {"kind": "wide", "width": 128}
    assert runs.capture(answering(wider), wider).graph.peak_live_bytes > runs.capture(answering(wide)).graph.peak_live_bytes


@pytest.mark.parametrize("known_before", [True, False])
def test_an_objective_that_always_fails_is_tried_three_times(dry: Callable[..., DryRuns], bell: Bell, known_before: bool) -> None:
    def objective(ask: Ask) -> None:
        bell.ring()
        raise ValueError(f"width {ask('width')}")

    runs = dry(objective)
    for width in range(6):
        params = {"width": width}
        with pytest.raises(CaptureError, match=f"ValueError: width {min(width, 2)}"):
            runs.capture(answering(params), params if known_before else None)
    assert bell.heard() == b"..."


# --- Processes and threads ------------------------------------------------------------------------------------------------------


def test_threads_may_ask_at_once(dry: Callable[..., DryRuns]) -> None:
    runs = dry(lambda ask: train(ask("width")))
    runs.start()
    found: dict[int, CapturedTrial] = {}

    def search(first: int) -> None:
        for width in range(first, first + 3):
            found[width] = runs.capture(answering({"width": width}), {"width": width})

    threads = [threading.Thread(target=search, args=(first,)) for first in (1, 4, 7, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peaks = [found[width].graph.peak_live_bytes for width in range(1, 13)]
    assert peaks == sorted(set(peaks))


def test_a_server_that_was_killed_is_started_again(dry: Callable[..., DryRuns]) -> None:
    runs = dry(lambda ask: train(ask("width")))
    runs.start()
    os.kill(runs._server, signal.SIGKILL)
    with pytest.raises(CaptureError, match="process for dry runs has ended"):
        runs.capture(answering({"width": 8}))
    assert runs.capture(answering({"width": 9})).steps == 20


def test_dry_runs_that_are_gone_have_no_server() -> None:
    runs = DryRuns(lambda ask: train(), A100)
    runs.start()
    server = runs._server
    del runs
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.parametrize("forks", [True, False])
def test_closing_ends_the_server_and_may_be_done_twice(
    forks: bool, dry: Callable[..., DryRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_runs, "can_fork", lambda: forks)
    runs = dry(lambda ask: train())
    runs.start()
    server = runs._server
    assert is_alive(server)
    runs.close()
    assert ends(server)
    runs.close()
    assert runs.capture(no_params).steps == 20  # it begins again


PARENT = """
import os, sys, time
from perfguard.capture import Answer, DryRuns, dry_runs
from perfguard.devices import resolve_device

if sys.argv[1] == "new":
    dry_runs.can_fork = lambda: False

def objective(ask):
    ask(os.getpid())
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass

def answer(process):
    print(runs._server, process, flush=True)
    return Answer("process", process)

runs = DryRuns(objective, resolve_device("a100"))
try:
    runs.capture(answer)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", ["ctrl-c", "kill"])
@pytest.mark.parametrize("process", ["forked", pytest.param("new", marks=pytest.mark.slow)])
def test_no_process_is_left_behind(process: str, how: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, script, process], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    server, child = map(int, parent.stdout.readline().split())
    assert is_alive(child)
    if how == "ctrl-c":
        os.killpg(parent.pid, signal.SIGINT)
    else:
        parent.kill()
    assert parent.stdout.read() == ("interrupted\n" if how == "ctrl-c" else "")
    assert parent.wait(10) == (0 if how == "ctrl-c" else -signal.SIGKILL)
    parent.stdout.close()
    assert ends(child)
    assert ends(server)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "_Fork"), reason="this C library cannot hide a fork")
def test_dry_runs_begin_after_a_backward_pass_beside_a_gpu() -> None:
    """PyTorch refuses another in a process that is forked then: of a second study in a notebook, nothing would be seen."""
    assert run_fresh(Path(__file__).parent / "toy_gpu_threads.py") == "5\n5\n5\n"


ON_THE_DEVICE_BY_DEFAULT = """
import torch
from torch import nn
from torch.utils.data import DataLoader

from perfguard.capture import DryRuns
from perfguard.devices import resolve_device

def objective(_, device=None):
    model = nn.Linear(4, 3, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [torch.full((4,), 1.0, device=device) for _ in range(80)]
    for x in DataLoader(samples, 8, shuffle=True, generator=torch.Generator(device="cuda")):
        optimizer.zero_grad()
        (model(x.to("cuda")) * torch.ones(8, 1, device=device)).mean().backward()
        optimizer.step()

def seen(objective):
    runs = DryRuns(objective, resolve_device("a100"))
    try:
        return runs.capture(None)
    finally:
        runs.close()

named = seen(lambda ask: objective(ask, "cuda"))
torch.set_default_device("cuda")
by_default = seen(objective)
print(by_default.steps, by_default.graph.content_hash == named.graph.content_hash)
"""


def test_what_is_on_the_device_by_default_is_on_the_stage() -> None:
    assert run_fresh("-c", ON_THE_DEVICE_BY_DEFAULT) == "10 True\n"

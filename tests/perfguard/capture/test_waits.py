"""No study waits for ever: each wait on a dry run is held against a child that never answers."""

import ctypes
import gc
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from perfguard.capture import Answer, Ask, DryRuns
from perfguard.capture import dry_runs as dry_runs_module
from perfguard.capture import first_forward as first_forward_module
from perfguard.capture.child import limit_stalls
from perfguard.capture.first_forward import FirstForward
from perfguard.capture.seal import RUNGS, Rung, inherited, ladder
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError
from perfguard.workload import CapturedTrial
from tests.warm import run_fresh

CPU = resolve_device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its children are Linux's")


def train(width: int = 4, steps: int = 5) -> None:
    model = nn.Linear(8, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def no_params(*question: object) -> Answer:
    raise AssertionError(question)


def sleep() -> None:
    time.sleep(1000)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def say_half() -> None:
    """Begin a message of a megabyte, and stop."""
    connection = max((each for each in gc.get_objects() if isinstance(each, Connection)), key=lambda each: each.fileno())
    os.write(connection.fileno(), struct.pack("!i", 2**20) + b"half")
    time.sleep(1000)


def refuse_to_end() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def take_all_memory() -> None:
    held = []
    while True:
        held.append(bytearray(os.urandom(2**20)) * 16)


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


FATES: list[Callable[[], None]] = [sleep, stop, say_half, refuse_to_end, take_all_memory, crash, leave]


@pytest.fixture(autouse=True)
def short_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dry_runs_module, first_forward_module):
        monkeypatch.setattr(module, "limit_stalls", lambda pipe: limit_stalls(pipe, most_s=1.0))


@pytest.fixture
def dry() -> Iterator[Callable[..., DryRuns]]:
    made: list[DryRuns] = []

    def make(objective: Callable[[Ask], object]) -> DryRuns:
        made.append(DryRuns(objective, CPU, most_seconds=2.0, most_bytes=2**29))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
def test_a_dry_run_that_never_answers_ends_and_the_next_one_is_well(
    fate: Callable[[], None], dry: Callable[..., DryRuns]
) -> None:
    def objective(ask: Ask) -> None:
        if ask("hangs"):
            fate()
        train()

    runs = dry(objective)
    with pytest.raises(CaptureError):
        runs.capture(lambda name: Answer(name, True))
    assert runs.capture(lambda name: Answer(name, False)).unseen == ""


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
def test_a_child_that_never_answers_at_the_first_forward_pass_ends(fate: Callable[[], None]) -> None:
    found: list[CapturedTrial | Exception] = []
    trial = os.getpid()
    model = nn.Linear(8, 4)

    def hang(*_: object) -> None:
        if os.getpid() != trial:
            fate()

    model.register_forward_pre_hook(hang)
    problem = CaptureError("the set-up")
    with FirstForward(CPU, found.append, lambda: None, problem=problem, most_seconds=2.0, most_bytes=2**29):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert len(found) == 1
    assert isinstance(found[0], CaptureError)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_lock_that_a_dry_run_holds_at_its_end_is_free_for_all_others(
    rung: Rung, dry: Callable[..., DryRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFGUARD_SEAL", rung)
    context = multiprocessing.get_context("fork")
    locks = [context.Lock(), context.RLock(), context.Semaphore(1), context.BoundedSemaphore(1)]
    event, queue, value = context.Event(), context.Queue(), context.Value("i", 3)
    queue.put("GPU 0")

    def objective(ask: Ask) -> None:
        for lock in locks:
            assert lock.acquire(timeout=1)
        event.set()
        value.value = 4
        with pytest.raises(Exception):  # noqa: B017, PT011 - its pipe is that of others
            queue.get(timeout=1)
        train(ask("width"))

    runs = dry(objective)
    assert runs.capture(lambda name: Answer(name, 4)).unseen == ""
    assert runs.capture(lambda name: Answer(name, 4)).unseen == ""  # it is known at the suggestion, in the middle
    assert all(lock.acquire(block=False) for lock in locks)
    assert not event.is_set()
    assert value.value == 3
    assert queue.get(timeout=5) == "GPU 0"


def test_an_item_of_a_manager_stays_where_it_is(dry: Callable[..., DryRuns]) -> None:
    with multiprocessing.get_context("fork").Manager() as manager:
        gpus = manager.Queue()
        gpus.put(0)

        def objective(ask: Ask) -> None:
            gpu = gpus.get()
            train()
            gpus.put(gpu)

        with pytest.raises(CaptureError):
            dry(objective).capture(no_params)
        assert gpus.get(timeout=5) == 0


def test_an_objective_unwinds_where_its_next_answers_are_known(
    dry: Callable[..., DryRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it would close, or give back, it closes and gives back."""
    read, write = os.pipe()
    monkeypatch.setattr(ladder, "leave_files", lambda keep, **settings: inherited.leave_files([*keep, write], **settings))

    def objective(ask: Ask) -> None:
        try:
            width, _, _ = ask("width"), ask("rate"), ask("momentum")
            train(width)
        finally:
            os.write(write, b"unwound ")

    runs = dry(objective)
    for rate in (0.1, 0.2):  # after another rate, only a dry run can tell what is asked next
        values = {"width": Answer("width", 4), "rate": Answer("rate", rate, 0.3), "momentum": Answer("momentum", 0.5, 0.6)}
        runs.capture(values.__getitem__)
    heard = b""
    while heard.count(b"unwound") < 3:  # two dry runs of the first trial, and the one that ended at the second's last suggestion
        heard += os.read(read, 1000)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_cancelled_objective_that_does_not_unwind_is_ended(hangs: bool, dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        try:
            ask("width")
            train()
        finally:
            if ask("end") and hangs:
                time.sleep(1000)

    runs = dry(objective)
    for width in (1, 2, 3):
        found = runs.capture(lambda name: Answer(name, width if name == "width" else 0))  # noqa: B023
        assert found.unseen == ""


def test_a_program_that_trains_ends_the_dry_run_and_is_not_started_again(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        ask("width")
        subprocess.run([sys.executable, "-c", "while True: pass"], check=False)
        train()

    runs = DryRuns(objective, CPU, most_seconds=60.0)
    try:
        began = time.monotonic()
        for width in (1, 2, 3):
            with pytest.raises(CaptureError, match=r"starts a program that takes more than 2 s of processor time"):
                runs.capture(lambda name: Answer(name, width))  # noqa: B023
        assert runs._num_runs == 1
        assert time.monotonic() - began < 60
    finally:
        runs.close()


@pytest.mark.parametrize("fate", [leave, crash, refuse_to_end], ids=lambda fate: fate.__name__)
def test_a_daemon_of_a_dry_run_that_dies_is_ended(fate: Callable[[], None], dry: Callable[..., DryRuns]) -> None:
    mark = f"3{os.getpid()}.5"

    def objective(ask: Ask) -> None:
        subprocess.Popen(["sleep", mark], start_new_session=True)
        fate()

    with pytest.raises(CaptureError):
        dry(objective).capture(no_params)
    assert mark not in subprocess.run(["ps", "axww", "-o", "args"], check=False, capture_output=True, text=True).stdout


def test_a_program_that_prepares_is_no_program_that_trains(dry: Callable[..., DryRuns], tmp_path: Path) -> None:
    """On the second rung a program writes nothing. It still may run, and is not taken to train."""

    def objective(ask: Ask) -> None:
        done = subprocess.run(["sh", "-c", f"echo 4 > {tmp_path}/width"], check=False, stderr=subprocess.DEVNULL)
        has_view = isinstance(os.open, types.BuiltinFunctionType)  # else Python's functions are redirected
        assert done.returncode == 0 or not has_view
        train(int((tmp_path / "width").read_text()) if has_view else 4)

    assert dry(objective).capture(no_params).unseen == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("forks", [True, False])
def test_a_dry_run_finds_the_compiler_of_pytorch_loaded(forks: bool) -> None:
    """Its import takes a second or two, and would be paid in each dry run that makes an optimizer."""
    code = f"""
import sys
from perfguard.capture import Answer, DryRuns, dry_runs
from perfguard.devices import resolve_device
dry_runs.can_fork = lambda: {forks}
asked = []
runs = DryRuns(lambda ask: ask("torch._dynamo" in sys.modules), resolve_device("a100"))
try:
    runs.capture(lambda is_loaded: asked.append(is_loaded) or Answer("x", 1))
except Exception:
    pass
runs.close()
print(asked, "torch._dynamo" in sys.modules)
"""
    assert run_fresh("-c", code).splitlines()[-1] == "[True] False"

"""A run counts its own steps, sees its own memory, and says so where it cannot."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Device, Measurement, Run, TensorSpec, Workload, resolve_device, trace
from perfguard.exceptions import ConfigurationError
from perfguard.measure import Status, StepTimer, status_of
from perfguard.measure import cpu as cpu_module
from perfguard.measure import run as run_module

MB = 10**6


@pytest.fixture(scope="module")
def device() -> Device:
    return resolve_device("cpu")


@pytest.fixture(autouse=True)
def _nothing_else_runs() -> Iterator[None]:
    """Runs that other tests left unfinished would overlap with these."""
    run_module._active.clear()
    yield
    run_module._active.clear()


def make_optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.SGD([parameter], lr=0.1)


def measured(run: Run) -> Measurement:
    assert run.measurement is not None
    return run.measurement


def test_a_step_of_another_thread_is_not_counted(device: Device) -> None:
    optimizer = make_optimizer()
    other = threading.Thread(target=lambda: [make_optimizer().step() for _ in range(5)])
    with Run(device) as run:
        optimizer.step()
        other.start()
        other.join()
        optimizer.step()
    assert measured(run).num_steps == 2


def test_a_step_that_is_only_traced_is_not_counted(device: Device) -> None:
    workload = Workload(nn.Linear(8, 2), (4, 8), TensorSpec((4,), "int64"), nn.functional.cross_entropy, torch.optim.Adam)
    with Run(device) as run:
        trace(workload)
    assert measured(run).num_steps == 0


def test_finish_at_last_step_ends_total_time(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose end nobody told ends with its last step."""
    clock = iter([5.0, 10.0, 11.0])
    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    run = Run(device).start()
    run.step()
    run.step()
    assert run.finish(at_last_step=True).total_time_s == 6.0


def test_run_that_was_stopped_has_no_result(device: Device) -> None:
    assert Run(device).start().finish().has_result
    assert not Run(device).start().finish("failed").has_result
    stopped = Run(device).start().finish(cut_short="by the tuner")
    assert (stopped.status, stopped.has_result) == ("ok", False)
    with pytest.raises(ConfigurationError, match=r"cut_short must be one of '', 'by the tuner', 'too slow', but got"):
        replace(stopped, cut_short="by hand")  # type: ignore[arg-type]


@pytest.fixture(params=["vmhwm", "rss-sampled"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Both ways to take the peak; the second where the kernel forbids to reset its own."""
    if request.param == "rss-sampled":
        monkeypatch.setattr(cpu_module, "_CLEAR_REFS", tmp_path / "forbidden" / "clear_refs")
    elif not cpu_module.reset_peak():
        pytest.skip("this system does not let a process reset its peak resident set")
    return str(request.param)


def test_memory_is_seen(device: Device, method: str) -> None:
    with Run(device) as run:
        tensor = torch.ones(50 * MB)
        time.sleep(0.1)
        del tensor
    assert measured(run).method == method
    assert measured(run).peak_memory_bytes == pytest.approx(200 * MB, rel=0.1)


def test_what_an_earlier_run_held_does_not_count(device: Device, method: str) -> None:
    with Run(device):
        torch.ones(50 * MB)
    kept = torch.ones(25 * MB)
    with Run(device) as run:
        time.sleep(0.02)
    peak = measured(run).peak_memory_bytes
    assert peak is not None
    assert peak < 10 * MB
    del kept


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each collection of garbage by the probe of the processor."""
    found: list[int] = []
    monkeypatch.setattr(cpu_module, "gc", SimpleNamespace(collect=lambda: found.append(gc.collect())))
    return found


def test_garbage_is_not_looked_for_after_a_trial_whose_model_is_gone(device: Device, collections: list[int]) -> None:
    with Run(device):
        _train(nn.Linear(8, 2))
        study_remembers = torch.ones(MB)
    collections.clear()
    with Run(device):
        pass
    assert not collections
    assert study_remembers.nbytes > cpu_module._SCATTER_BYTES


def test_a_model_that_is_garbage_does_not_count_in_the_next_run(device: Device, collections: list[int]) -> None:
    with Run(device):
        model = nn.Linear(8, 2)
        model.itself = [model]  # type: ignore[assignment]  # as a trainer's model has its trainer
        model.samples = torch.ones(MB)
        _train(model)
        left = weakref.ref(model)
        del model
    collections.clear()
    with Run(device):
        assert left() is None
    assert len(collections) == 1


def test_much_memory_is_looked_into_even_if_the_model_is_gone(device: Device, collections: list[int]) -> None:
    with Run(device):
        _train(nn.Linear(8, 2))
        kept = torch.ones(20 * MB)
    collections.clear()
    with Run(device):
        pass
    assert len(collections) == 1
    assert kept.nbytes > cpu_module._MOST_GROWN_BYTES


def test_the_sampling_thread_ends_with_the_run(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_module, "_CLEAR_REFS", tmp_path / "forbidden" / "clear_refs")
    with Run(device):
        assert "perfguard-rss" in {thread.name for thread in threading.enumerate()}
        with Run(device):
            pass
    assert "perfguard-rss" not in {thread.name for thread in threading.enumerate()}


def test_the_memory_of_overlapping_runs_is_nobodys(device: Device) -> None:
    first = Run(device).start()
    inside = threading.Event()
    leave = threading.Event()
    second = Run(device)

    def run_beside() -> None:
        with second:
            inside.set()
            leave.wait(timeout=30)

    thread = threading.Thread(target=run_beside)
    thread.start()
    inside.wait(timeout=30)
    first.finish()
    leave.set()
    thread.join()
    for run in (first, second):
        assert measured(run).peak_memory_bytes is None
        assert "other trials ran in this process" in measured(run).note
    with Run(device) as alone:
        pass
    assert measured(alone).peak_memory_bytes is not None
    assert measured(alone).note == ""


def test_nested_run_is_measured_but_outer_is_not(device: Device) -> None:
    with Run(device) as outer, Run(device) as inner:
        torch.ones(50 * MB)
    assert measured(outer).peak_memory_bytes is None
    assert measured(inner).peak_memory_bytes == pytest.approx(200 * MB, rel=0.1)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "ok"),
        (MemoryError(), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory."), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried ..."), "oom"),
        (RuntimeError("std::bad_alloc"), "oom"),
        (TimeoutError("timed out"), "failed"),  # a socket's, as a rule: no time limit of the trial
        (ValueError("a mistake"), "failed"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "failed"),
        (KeyboardInterrupt(), "interrupted"),  # says nothing about the trial
        (SystemExit(0), "interrupted"),  # how Ray ends the thread of a trial that it stops
        (GeneratorExit(), "interrupted"),
        (SystemExit(1), "failed"),
    ],
)
def test_status_of_an_error(error: BaseException | None, status: Status) -> None:
    assert status_of(error) == status


def test_a_real_allocation_that_fails_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert status_of(caught.value) == "oom"


# --- the time of a step, by hand


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A processor's clock that a test moves."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def run_steps(clock: Any, seconds: list[float]) -> StepTimer:
    timer = StepTimer(lambda: None)
    for step_s in seconds:
        clock.now_s += step_s
        timer.step()
    return timer


@pytest.mark.parametrize(
    ("seconds", "step_time_s"),
    [
        ([], None),
        ([9.0], None),
        ([9.0, 1.0], 1.0),
        ([9.0, 1.0, 2.0, 1.0, 16.0], 1.5),
        ([9.0, *[8.0] * 1, *[1.0] * 4, *[2.0] * 5], 2.0),  # of ten, one is warm-up; the median of 1 1 1 1 2 2 2 2 2
        ([9.0, *[8.0] * 10, *[1.0] * 11, *[2.0] * 179], 2.0),  # of two hundred, ten
        ([9.0, *[8.0] * 10, *[1.0] * 60, *[3.0] * 50], 1.0),
    ],
)
def test_warm_up_is_first_step_and_tenth_of_others(clock: Any, seconds: list[float], step_time_s: float | None) -> None:
    timer = run_steps(clock, seconds)
    assert timer.step_time_s() == step_time_s
    assert timer.num_steps == len(seconds)
    assert timer.durations_s == seconds[1:]

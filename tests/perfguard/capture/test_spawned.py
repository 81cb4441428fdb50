"""Where no process can be forked, a new one makes each dry run. It sees the same, changes nothing, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture import Answer, Ask, DryRuns, dry_runs
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError, UnguardedTrialWarning
from perfguard_optuna import OptunaGuard, PerfGuardPruner, create_study
from tests.perfguard.capture.test_dry_runs import (
    Objective,
    answering,
    crash,
    eat,
    ends,
    hang_in_c,
    have_a_bug,
    leave_at_once,
    no_params,
    train,
)
from tests.warm import run_fresh

A100 = resolve_device("a100")


@pytest.fixture(autouse=True)
def no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_runs, "can_fork", lambda: False)


# --- The same is seen -----------------------------------------------------------------------------------------------------------


def plain_loop(ask: Ask) -> None:
    model = nn.Sequential(nn.Linear(20, ask("width")), nn.BatchNorm1d(ask("width")), nn.Linear(ask("width"), 3)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(64, 20, device="cuda"), torch.randint(0, 3, (64,), device="cuda")
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def loader_with_workers(ask: Ask) -> None:
    class Lengths(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index)  # type: ignore[no-untyped-call]

    model = nn.Linear(20, ask("width")).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Lengths(torch.randn(160, 20)), 8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
    for _ in range(3):
        for (x,) in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x.cuda(non_blocking=True)).square().mean()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.randn(100, 20, device="cuda"))


def closure_over_a_model() -> Objective:
    outside = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 3))
    return lambda ask: train(model=nn.Sequential(outside, nn.Linear(3, ask("width"))))


def lengths_by_chance() -> Objective:
    """What runs depends on the random states of before."""

    def objective(ask: Ask) -> None:
        lengths = int(np.random.randint(100, 900)), int(torch.randint(100, 900, ()))  # Python's own begin anew in a fork
        train(ask("width"), model=nn.Sequential(*(nn.Linear(20, 20) for _ in lengths), nn.Linear(20, sum(lengths))))

    return objective


OBJECTIVES: dict[str, Objective] = {
    "plain loop": plain_loop,
    "loader with workers": loader_with_workers,
    "closure": closure_over_a_model(),
    "lambda": lambda ask: train(ask("width")),
    "chance": lengths_by_chance(),
}


@pytest.mark.parametrize("name", ["plain loop", *(pytest.param(name, marks=pytest.mark.slow) for name in [*OBJECTIVES][1:])])
def test_a_new_process_sees_what_a_forked_one_sees_to_the_byte(
    name: str, dry: Callable[..., DryRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = OBJECTIVES[name]
    runs = dry(objective)
    runs.start()  # the random states are those of now
    new = runs.capture(answering({"width": 8}))
    with monkeypatch.context() as patch:
        patch.setattr(dry_runs, "can_fork", lambda: True)
        forked = dry(objective).capture(answering({"width": 8}))
    assert new.graph.content_hash == forked.graph.content_hash
    hashes = [{name: graph.content_hash for name, graph in seen.phases.items()} for seen in (new, forked)]
    assert hashes[0] == hashes[1]
    assert (new.steps, new.steps_per_epoch, new.unseen) == (forked.steps, forked.steps_per_epoch, forked.unseen)


@pytest.mark.slow
def test_switches_of_pytorch_go_along(dry: Callable[..., DryRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.set_default_dtype(torch.float64)
    try:
        graph = dry(lambda ask: train()).capture(no_params).graph
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(torch.float32)
    assert "cudnn_benchmark" in graph.options
    assert "tf32" in graph.options
    assert {op.dtype for op in graph.ops if op.kind == "matmul"} == {"float64"}


def attend(ask: Ask) -> None:
    model = nn.Linear(64, 64).cuda().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = model(torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.half))
        F.scaled_dot_product_attention(x, x, x).mean().backward()
        optimizer.step()


def test_the_kernels_of_attention_that_are_switched_off_are_so_there(dry: Callable[..., DryRuns]) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        graph = dry(attend).capture(no_params).graph
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
    assert not {op.name for op in graph.ops if op.kind.startswith("attention")}
    assert "_safe_softmax" in {op.name for op in graph.ops}


SCRIPT = """
import sys
import torch
from torch import nn
import perfguard_optuna

print("the script runs")

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)

def loss_of(model, x):
    return model(x).square().mean()

def objective(trial):
    model = Net(trial.suggest_categorical("width", [10, 10**8]))
    assert trial.params["width"] == 10 or all(p.is_meta for p in model.parameters()), "it would take 8 GB"
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1))
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randn(4, WIDTH))
        loss.backward()
        optimizer.step()
    return loss.item()

WIDTH = 20
pruner = perfguard_optuna.PerfGuardPruner(gpu="cpu", memory_budget="1GiB", log=False)
study = perfguard_optuna.create_study(direction="minimize")
for width in (10, 10**8):
    study.enqueue_trial({"width": width, "lr": 0.01})
study.optimize(objective, n_trials=2, pruner=pruner, count="proposed")
print([trial.state.name for trial in study.trials])
"""


WINDOWS = """
import builtins, os, signal

for name in "fork forkpty killpg setpgid pwrite O_ACCMODE".split():
    delattr(os, name)
for name in "SIGALRM SIGURG SIGXCPU setitimer pthread_kill".split():
    delattr(signal, name)

def __import__(name, globals=None, *args, own=builtins.__import__, **kwargs):
    if name in ("resource", "fcntl") and (globals or {}).get("__name__", "").startswith("perfguard"):
        raise ImportError(name)
    return own(name, globals, *args, **kwargs)

builtins.__import__ = __import__
"""
"""Takes from Python what Windows does not have, as far as PyTorch on Linux can do without, also in processes that are started."""


@pytest.mark.slow
def test_a_study_is_guarded_as_on_windows_and_its_script_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WINDOWS)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_fresh(tmp_path / "train.py").splitlines() == ["the script runs", "['COMPLETE', 'PRUNED']"]
    model = Path(__file__).parents[3] / "examples" / "keras_cnn.onnx"
    assert "step time" in run_fresh("-m", "perfguard.cli", "predict", model, "--gpu", "t4", "--batch-size", 8)


def test_a_fork_that_the_system_refuses_is_made_up_for(dry: Callable[..., DryRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    """There are too many processes, or this one has more memory than the system would grant twice."""

    def refuse() -> int:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(dry_runs, "can_fork", lambda: True)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(dry_runs, "autograd_refuses_forks", lambda: False)
    assert dry(lambda ask: train()).capture(no_params).steps == 20


# --- Whatever the objective is, or does -----------------------------------------------------------------------------------------


def test_an_objective_that_cannot_be_sent_says_why_and_its_trials_run() -> None:
    lock = threading.Lock()

    def objective(trial: Any) -> float:
        with lock:
            return float(trial.suggest_int("width", 1, 4))

    study = create_study()
    with pytest.warns(
        UnguardedTrialWarning, match=r"cannot be sent to a new one \(TypeError: .*lock.*build=\.\.\. or guard\.trial"
    ):
        study.optimize(objective, n_trials=2, pruner=PerfGuardPruner(gpu="cpu", log=False))
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE] * 2


@pytest.mark.slow
def test_an_objective_that_describes_its_step_by_itself_is_judged_by_that() -> None:
    """It is sent with the guard, which has the dry runs."""
    guard = OptunaGuard("cpu", log=False)

    def objective(trial: Any) -> float:
        model, x = nn.Linear(20, trial.suggest_int("width", 1, 4)), torch.zeros(4, 20)
        with guard.trial(trial, model, x, loss=lambda output: output.mean(), optimizer=torch.optim.SGD):
            return 1.0

    study = create_study()
    study.optimize(objective, n_trials=1, pruner=PerfGuardPruner(guard=guard))
    assert study.trials[0].user_attrs["perfguard:verdict"] == "launch"
    assert "perfguard:unjudged" not in study.trials[0].user_attrs


class NotForOthers:
    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(process: int) -> NotForOthers:
    if process != os.getpid():
        raise ValueError("elsewhere")
    return NotForOthers()


class EndsTheProcess:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NotForOthers, r"cannot load the objective \(ValueError: elsewhere\).*build"),
        (EndsTheProcess, r"a new process ends as it loads the objective.*build"),
    ],
)
def test_an_objective_that_cannot_be_loaded_says_why(make: type, message: str, dry: Callable[..., DryRuns]) -> None:
    here = make()
    with pytest.raises(CaptureError, match=message):
        dry(lambda ask: train(model=here)).capture(no_params)


TROUBLES: dict[str, tuple[Objective, str]] = {
    "hang": (hang_in_c, r"did not end within 1 s"),
    "crash": (crash, "process for dry runs has ended"),
    "eat": (eat, r"more than 0\.125 GiB of host memory"),
    "leave": (leave_at_once, "process for dry runs has ended"),
    "bug": (have_a_bug, rf"test_dry_runs\.py:{have_a_bug.__code__.co_firstlineno + 1} with RuntimeError: .*4, 21"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TROUBLES)
def test_a_dry_run_in_trouble_says_so_and_the_next_one_runs(name: str, dry: Callable[..., DryRuns]) -> None:
    trouble, message = TROUBLES[name]
    runs = dry(
        lambda ask: trouble(ask) if ask("troubles") else train(), most_seconds=1 if name == "hang" else 20, most_bytes=2**27
    )
    with pytest.raises(CaptureError, match=message):
        runs.capture(answering({"troubles": True}))
    runs._most_seconds = 20
    assert runs.capture(answering({"troubles": False})).steps == 20


@pytest.mark.slow
def test_an_answer_that_is_known_ends_the_dry_run_and_what_it_has_started(dry: Callable[..., DryRuns]) -> None:
    def objective(ask: Ask) -> None:
        ask("rate")
        started = subprocess.Popen(["sleep", "1000"])
        ask(started.pid)
        train()

    runs = dry(objective)
    started: list[int] = []

    def answer(question: Any) -> Answer:
        if question == "rate":
            return Answer("rate", 0.1)
        started.append(question)
        if len(started) == 2:
            raise KeyError("stop")
        return Answer("process", 1)

    assert runs.capture(answer).steps == 20
    assert ends(started[0])
    with pytest.raises(KeyError, match="stop"):
        runs.capture(lambda question: Answer("rate", 0.2) if question == "rate" else answer(question))
    assert ends(started[1])

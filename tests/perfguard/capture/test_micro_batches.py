"""A step that adds up many gradients is recorded as it would be in full, and its model runs a few times."""
# ruff: noqa: PLW2901 - as users write `x = x.cuda()`

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture import DryRuns
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.graph import OpGraph
from perfguard.workload import CapturedTrial

A100 = resolve_device("a100")
PASSES = 12
"""Micro-batches of a step."""


@pytest.fixture(autouse=True)
def _few_objects_to_collect() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


class Model(nn.Module):
    """Counts how often it runs."""

    num_runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Model.num_runs += 1
        out: torch.Tensor = self.layers(x)
        return out


def batches(number: int = 6 * PASSES) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32 * number, 64), torch.randint(0, 10, (32 * number,))), 32)


def plain(*, keeps: str = "", set_to_none: bool = True, number: int = 6 * PASSES) -> None:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[torch.Tensor] = []
    total = torch.zeros((), device="cuda")
    loader = batches(number)
    for at, (x, y) in enumerate(loader, 1):
        x, y = x.cuda(), y.cuda()
        out = model(x)
        loss = F.cross_entropy(out, y) / PASSES
        loss.backward()
        if keeps == "sum":
            total = total + loss.detach()
        elif keeps:
            kept.append((out if keeps == "out" else loss).detach())
        if at % PASSES == 0 or at == len(loader):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            kept.clear()


def fetching_ahead() -> None:
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    iterator = iter(batches(6 * PASSES + 1))
    x, y = (each.cuda() for each in next(iterator))
    for _ in range(6):
        for _ in range(PASSES):
            loss = F.cross_entropy(model(x), y)
            x, y = (each.cuda() for each in next(iterator))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def reading_a_step_ahead() -> None:
    """As Transformers' Trainer does."""
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    iterator = iter(batches())
    for _ in range(6):
        step = [[each.cuda() for each in next(iterator)] for _ in range(PASSES)]
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def distilled() -> None:
    teacher = Model().cuda().eval()
    student = Model().cuda()
    optimizer = torch.optim.Adam(student.parameters())
    for at, (x, _) in enumerate(batches(), 1):
        x = x.cuda()
        with torch.no_grad():
            says = teacher(x)
        F.mse_loss(student(x), says).backward()
        if at % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()


def twice_a_backward_pass() -> None:
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for at, (x, _) in enumerate(batches(), 1):
        x = x.cuda()
        (model(x) - model(x.flip(1))).square().mean().backward()
        if at % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()


def in_turns() -> None:
    one, other = Model().cuda(), Model().cuda()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (one, other)]
    iterator = iter(batches(12 * PASSES))
    for _ in range(6):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            for _ in range(PASSES):
                model(next(iterator)[0].cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def longer_at_the_end() -> None:
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        for at in range(PASSES):
            model(torch.randn(48 if at >= PASSES - 4 else 32, 64).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def runs_of(run: Callable[[], object], *, replays: bool) -> tuple[CapturedTrial, int]:
    Model.num_runs = 0
    captured = capture(run, A100, replays=replays)
    return captured, Model.num_runs


def shown(graph: OpGraph) -> tuple[Any, ...]:
    """What does not depend on the order in which storages were numbered."""
    ops = [op._replace(inputs=(), outputs=(), attributes={**op.attributes, "views": 0}) for op in graph.ops]
    return ops, Counter(storage[:4] for storage in graph.storages if storage.num_bytes), graph.peak_live_bytes


@pytest.mark.parametrize(
    "run",
    [
        plain, functools.partial(plain, keeps="sum"), functools.partial(plain, set_to_none=False), fetching_ahead,
        reading_a_step_ahead, distilled,
        twice_a_backward_pass, in_turns, longer_at_the_end,
    ],
)  # fmt: skip
def test_a_step_of_many_micro_batches_is_that_of_all_of_them(run: Callable[[], object]) -> None:
    whole, num_whole = runs_of(run, replays=False)
    few, num_few = runs_of(run, replays=True)
    assert shown(few.graph) == shown(whole.graph)
    assert not few.may_be_lost
    assert (few.steps, few.samples_per_step) == (whole.steps, whole.samples_per_step)
    assert num_few < 0.75 * num_whole


@pytest.mark.parametrize("keeps", ["loss", "out"])
def test_what_the_loop_keeps_of_each_micro_batch_is_counted(keeps: str) -> None:
    whole, _ = runs_of(functools.partial(plain, keeps=keeps), replays=False)
    few, _ = runs_of(functools.partial(plain, keeps=keeps), replays=True)
    assert few.graph.peak_live_bytes == whole.graph.peak_live_bytes
    of_few, of_whole = (Counter((s.num_bytes, s.death) for s in each.graph.storages if s.num_bytes) for each in (few, whole))
    assert of_few == of_whole


def test_an_epoch_may_end_with_fewer_micro_batches() -> None:
    run = functools.partial(plain, number=6 * PASSES + 5)
    whole, _ = runs_of(run, replays=False)
    few, _ = runs_of(run, replays=True)
    assert (few.steps, few.may_be_lost) == (whole.steps, False)
    assert few.graph.peak_live_bytes == whole.graph.peak_live_bytes


@pytest.mark.parametrize("number", [PASSES, 2 * PASSES - 4])
def test_a_step_whose_last_micro_batch_was_not_seen_is_dry_run_whole(number: int) -> None:
    dry_runs = DryRuns(lambda ask: plain(number=number), A100)
    found = dry_runs.capture(lambda *_: pytest.fail("it has no parameters"), {})
    whole, _ = runs_of(functools.partial(plain, number=number), replays=False)
    assert shown(found.graph) == shown(whole.graph)
    assert found.steps == whole.steps
    dry_runs.close()


def test_an_objective_that_looks_into_its_model_is_dry_run_whole() -> None:
    def objective(_: object) -> None:
        model = Model().cuda()
        features: list[torch.Tensor] = []
        model.layers[2].register_forward_hook(lambda *found: features.append(found[2]))
        optimizer = torch.optim.Adam(model.parameters())
        for at, (x, _) in enumerate(batches(), 1):
            model(x.cuda())
            features.pop().square().mean().backward()
            if at % PASSES == 0:
                optimizer.step()
                optimizer.zero_grad()

    dry_runs = DryRuns(objective, A100)
    found = dry_runs.capture(lambda *_: pytest.fail("it has no parameters"), {})
    dry_runs.close()
    whole, _ = runs_of(lambda: objective(None), replays=False)
    assert shown(found.graph) == shown(whole.graph)
    assert found.steps == 6


def test_a_batch_with_gradients_is_never_left_out() -> None:
    def attacked() -> None:
        model = Model().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for x, y in batches(30):
            x, y = x.cuda(), y.cuda()
            changed = x
            for _ in range(8):
                changed = changed.detach().requires_grad_()
                F.cross_entropy(model(changed), y).backward()
                assert changed.grad is not None
                changed = changed + 0.1 * changed.grad.sign()
            optimizer.zero_grad()
            F.cross_entropy(model(changed.detach()), y).backward()
            optimizer.step()

    whole, _ = runs_of(attacked, replays=False)
    few, _ = runs_of(attacked, replays=True)
    assert shown(few.graph) == shown(whole.graph)
    assert few.steps == whole.steps


def penalized() -> None:
    """The gradient of a gradient, of all micro-batches at once."""
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        total = torch.zeros((), device="cuda")
        for _ in range(PASSES):
            scale = torch.ones((), device="cuda", requires_grad=True)
            loss = (model(torch.randn(32, 64).cuda()) * scale).square().mean()
            (gradient,) = torch.autograd.grad(loss, [scale], create_graph=True)
            total = total + loss + gradient.square()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()


def weighted() -> None:
    """Losses whose gradients are looked at before they are added up."""
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        losses = []
        for _ in range(PASSES):
            losses.append(model(torch.randn(32, 64).cuda()).square().mean())
            torch.autograd.grad(losses[-1], [*model.layers[-1].parameters()][:1], retain_graph=True)
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def probed() -> None:
    """A head learns from each output, and the model from all of them."""
    model, head = Model().cuda(), nn.Linear(10, 4).cuda()
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    for _ in range(6):
        outputs = []
        for _ in range(PASSES):
            outputs.append(model(torch.randn(32, 64).cuda()))
            head(outputs[-1].detach()).square().mean().backward()
        torch.cat(outputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("run", [penalized, weighted, probed])
def test_graphs_that_outlive_their_micro_batches_are_recorded(run: Callable[[], object]) -> None:
    whole, _ = runs_of(run, replays=False)
    few, _ = runs_of(run, replays=True)
    assert shown(few.graph) == shown(whole.graph)


@pytest.mark.parametrize("first_step", [0, 1])
def test_a_step_whose_later_micro_batches_have_a_larger_loss_is_dry_run_whole(first_step: int) -> None:
    def objective(_: object) -> None:
        model = Model().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            for at in range(PASSES):
                out = model(torch.randn(32, 64).cuda()).reshape(-1, 1)
                is_larger = step >= first_step and PASSES - 4 < at < PASSES - 1
                loss = (out - out.T).square().mean() if is_larger else out.square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    dry_runs = DryRuns(objective, A100)
    found = dry_runs.capture(lambda *_: pytest.fail("it has no parameters"), {})
    dry_runs.close()
    whole, _ = runs_of(lambda: objective(None), replays=False)
    assert shown(found.graph) == shown(whole.graph)

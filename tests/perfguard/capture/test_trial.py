"""A dry run of an objective shows the step that a description of it would: operators, storages, and their lifetimes."""
# ruff: noqa: PLW2901 - as users write `x = x.cuda()`

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import itertools
import math
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # it changes torch as it is imported
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from perfguard.capture import DryRuns
from perfguard.capture.loaders import longest_batches
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError
from perfguard.graph import Phase, StorageKind, trace
from perfguard.unmodelled import DATA_PARALLEL, HALF_CHOSEN, KEPT, LBFGS
from perfguard.workload import CapturedTrial, TensorSpec, Workload
from tests.perfguard.capture.batches import ahead
from tests.perfguard.graph.parts import RealBytes

A100, CPU = resolve_device("a100"), resolve_device("cpu")
BATCH = 16


@pytest.fixture(autouse=True)
def _few_objects_to_collect() -> Iterator[None]:
    """A capture collects garbage after each step. The process of a dry run has frozen what was there before, as this does."""
    gc.freeze()
    yield
    gc.unfreeze()


def convolutional() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10))


def images(number: int = 160, size: int = 32, batch: int = BATCH, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number, 3, size, size), torch.randint(0, 10, (number,))), batch, **options)


def rows(number: int = 320, batch: int = 32, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number, 20), torch.randint(0, 3, (number,))), batch, **options)


def fit(model: Any, loader: Any, optimizer: Any, *, loss: Any = F.cross_entropy, device: str = "cuda", epochs: int = 2) -> None:
    for _ in range(epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            output = model(x)
            value = loss(output, y)
            value.backward()
            optimizer.step()


def train(loader: Any, *, epochs: int = 2, model: nn.Module | None = None) -> nn.Module:
    """A linear layer on the GPU, or ``model``, by plain SGD."""
    model = nn.Linear(20, 3).cuda() if model is None else model
    fit(model, loader, torch.optim.SGD(model.parameters()), epochs=epochs)
    return model


def classifies(make: Callable[[], Any] = convolutional, size: int = 32, **settings: Any) -> Workload:
    """The described step of :func:`fit` with :func:`images`."""
    settings = {"optimizer": torch.optim.AdamW} | settings
    labels = TensorSpec((BATCH,), "int64")
    return Workload(make(), inputs=(BATCH, 3, size, size), targets=labels, loss=F.cross_entropy, **settings)


Case = tuple[Callable[[], object], Callable[[], Workload]]
CASES: dict[str, Case] = {}


def described_by(describe: Callable[[], Workload]) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def note(objective: Callable[[], object]) -> Callable[[], object]:
        CASES[objective.__name__] = objective, describe
        return objective

    return note


@described_by(partial(classifies, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)))
def momentum() -> None:
    model = convolutional().cuda()
    fit(model, images(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss=nn.CrossEntropyLoss())


@described_by(classifies)
def workers_that_pin() -> None:
    model = convolutional().to("cuda:0")
    fit(model, images(num_workers=2, pin_memory=True, persistent_workers=True), torch.optim.AdamW(model.parameters()))


@described_by(classifies)
def device_as_tutorials_ask_for_it() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = convolutional()
    fit(model, images(), torch.optim.AdamW(model.parameters()), device=device)  # type: ignore[arg-type]


outer_model = convolutional()


@described_by(classifies)
def model_of_before() -> None:
    fit(outer_model.cuda(), images(), torch.optim.AdamW(outer_model.parameters()))


@described_by(partial(classifies, accumulation=4))
def accumulation() -> None:
    model = convolutional().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (inputs, labels) in enumerate(images(320), 1):
        x, y = inputs.cuda(), labels.cuda()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


@described_by(lambda: classifies(lambda: torch.compile(convolutional())))
def compiled() -> None:
    model: Any = torch.compile(convolutional().cuda())
    fit(model, images(), torch.optim.AdamW(model.parameters()))


@described_by(partial(classifies, layout="nhwc"))
def channels_last() -> None:
    model = convolutional().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loader = ((x.to(memory_format=torch.channels_last), y) for x, y in images())
    fit(model, loader, torch.optim.AdamW(model.parameters()))


@described_by(partial(classifies, precision="bf16"))
def pure_bfloat16() -> None:
    model = convolutional().to("cuda", torch.bfloat16)
    fit(model, ((x.bfloat16(), y) for x, y in images()), torch.optim.AdamW(model.parameters()))


@described_by(partial(classifies, precision="amp-bf16"))
def autocast() -> None:
    model = convolutional().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in images():
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(x)
            loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()


@described_by(partial(classifies, zero_grad="before-backward"))
def gradients_are_dropped_late() -> None:
    model = convolutional().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in images():
        x, y = x.cuda(), y.cuda()
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


@described_by(partial(classifies, lazy))
def lazy_modules() -> None:
    model, loader = lazy().cuda(), images()
    model(next(iter(loader))[0].cuda())
    fit(model, loader, torch.optim.AdamW(model.parameters()))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)


@described_by(lambda: Workload(encoder(), (8, 16, 64), (8, 16, 64), loss=F.mse_loss, optimizer=torch.optim.AdamW))
def transformer() -> None:
    model, data = encoder().cuda(), TensorDataset(torch.randn(64, 16, 64), torch.randn(64, 16, 64))
    fit(model, DataLoader(data, 8), torch.optim.AdamW(model.parameters()), loss=F.mse_loss)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(100, 32), nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> Any:
        states, _ = self.cells(self.words(x))
        return self.head(states[:, -1])


INTEGERS = {"inputs": TensorSpec((8, 12), "int64"), "targets": TensorSpec((8,), "int64")}


@described_by(lambda: Workload(Reader(), **INTEGERS, loss=F.cross_entropy, optimizer=torch.optim.Adam))  # type: ignore[arg-type]
def recurrent() -> None:
    model, data = Reader().cuda(), TensorDataset(torch.randint(0, 100, (64, 12)), torch.randint(0, 5, (64,)))
    fit(model, DataLoader(data, 8), torch.optim.Adam(model.parameters()))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Conv2d(3, 8, 3), nn.Linear(8, 10), reentrant
        self.block = nn.Sequential(nn.Conv2d(8, 32, 3), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(32, 8, 3), nn.GELU())

    def forward(self, x: torch.Tensor) -> Any:
        x = checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant)
        return self.head(x.mean((2, 3)))


def checkpointing(reentrant: bool) -> None:
    model = Checkpointed(reentrant).cuda()
    fit(model, images(), torch.optim.AdamW(model.parameters()))


CASES["reentrant_checkpoints"] = partial(checkpointing, True), lambda: classifies(lambda: Checkpointed(True))
CASES["checkpoints"] = partial(checkpointing, False), lambda: classifies(lambda: Checkpointed(False))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:Using `torch.compile")  # of torch.compile
@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_is_the_step_that_a_workload_describes(name: str) -> None:
    objective, describe = CASES[name]
    captured, described = capture(objective, A100).graph, trace(describe(), target=A100)
    assert captured.ops == described.ops
    assert captured.storages == described.storages
    assert captured.content_hash == described.content_hash


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_a_step_on_the_cpu_is_the_step_that_a_workload_describes(optimizer: Any) -> None:
    def objective() -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = convolutional().to(device)
        fit(model, images(), optimizer(model.parameters()), device=device)

    assert capture(objective, CPU).graph.content_hash == trace(classifies(optimizer=optimizer), target=CPU).content_hash


# --- Where the objective runs a little more than can be described ---------------------------------------------------------------

HEAVY = ("conv", "matmul", "norm", "attention", "fused_rnn")


def heavy_ops(trial: Any) -> list[Any]:
    graph = trial.graph if isinstance(trial, CapturedTrial) else trial
    return [(op.name, op.phase, op.shape, op.dtype, op.flops) for op in graph.ops if op.kind in HEAVY]


def test_counters_of_a_fused_optimizer_are_on_the_device() -> None:
    fused = partial(torch.optim.AdamW, fused=True)

    def objective() -> None:
        model = convolutional().cuda()
        fit(model, images(), fused(model.parameters()))

    captured, described = capture(objective, A100).graph, trace(classifies(optimizer=fused), target=A100)
    num_parameters = len([*convolutional().parameters()])
    assert heavy_ops(captured) == heavy_ops(described)
    assert captured.peak_live_bytes - described.peak_live_bytes == 4 * num_parameters


def test_scaled_and_clipped_gradients_add_a_few_bytes() -> None:
    def objective() -> None:
        model = convolutional().cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        for x, y in images():
            x, y = x.cuda(), y.cuda()
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(x)
                loss = F.cross_entropy(output, y)
            if torch.isnan(loss):
                raise ValueError
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert f"{loss:.3f}" == f"{loss.item():.3f}"

    captured, described = capture(objective, A100).graph, trace(classifies(precision="amp-fp16"), target=A100)
    assert heavy_ops(captured) == heavy_ops(described)
    assert abs(captured.peak_live_bytes - described.peak_live_bytes) <= 64
    names = [op.name for op in captured.ops]
    assert "_amp_foreach_non_finite_check_and_unscale_" in names
    assert any("norm" in op.name and op.phase is not Phase.FORWARD for op in captured.ops)


# --- More than one model, or one optimizer --------------------------------------------------------------------------------------


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 20))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))


@pytest.mark.parametrize("num_critic_steps", [1, 3])
def test_a_step_of_a_gan_is_that_of_both_optimizers(num_critic_steps: int) -> None:
    def objective() -> None:
        make, judge = generator().cuda(), critic().cuda()
        of_judge, of_maker = torch.optim.Adam(judge.parameters()), torch.optim.Adam(make.parameters())
        for _ in range(4):
            for number, (x, _) in enumerate(rows(480), 1):
                of_judge.zero_grad()
                noise = torch.randn(32, 8, device="cuda")
                (judge(make(noise).detach()).mean() - judge(x.cuda()).mean()).backward()
                of_judge.step()
                if number % num_critic_steps == 0:
                    of_maker.zero_grad()
                    (-judge(make(torch.randn(32, 8, device="cuda"))).mean()).backward()
                    of_maker.step()

    captured = capture(objective, A100)
    updates = [op for op in captured.graph.ops if op.name == "_foreach_addcdiv_"]
    assert len(updates) == num_critic_steps + 1
    assert captured.steps_per_epoch == 15 // num_critic_steps
    assert captured.steps == 4 * 15 // num_critic_steps
    state = sum(s.num_bytes for s in captured.graph.storages if s.kind is StorageKind.OPTIMIZER_STATE)
    assert state == 2 * 4 * sum(p.numel() for model in (generator(), critic()) for p in model.parameters())


@pytest.mark.parametrize(("number", "per_epoch"), [(3200, 100), (160, 5), (224, 7), (640, 20)])
def test_an_optimizer_that_never_steps_is_not_waited_for(number: int, per_epoch: int) -> None:
    def objective() -> None:
        other = nn.Linear(20, 3)
        torch.optim.SGD(other.parameters())
        spare = torch.optim.SGD(other.parameters())
        train(rows(number), epochs=3)
        del spare

    captured = capture(objective, A100)
    assert (captured.steps_per_epoch, captured.steps) == (per_epoch, 3 * per_epoch)
    assert len([op for op in captured.graph.ops if op.phase is Phase.OPTIMIZER]) == 1


def test_lbfgs_evaluates_its_closure_within_a_step() -> None:
    def objective() -> None:
        model, x, y = nn.Linear(10, 1).cuda(), torch.randn(64, 10).cuda(), torch.randn(64, 1).cuda()
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)

    captured = capture(objective, A100)
    assert {op.phase for op in captured.graph.ops} == set(Phase)
    assert next(op.shape for op in captured.graph.ops if op.kind == "matmul") == (64, 1)
    assert (captured.steps, captured.steps_per_epoch) == (5, None)
    assert captured.graph.unmodelled == (LBFGS,)


@pytest.mark.parametrize("make", [copy.deepcopy, AveragedModel])
def test_an_average_of_the_weights_is_on_the_device(make: Callable[[nn.Module], nn.Module]) -> None:
    def objective(averages: bool) -> None:
        model = convolutional().cuda()
        average, optimizer = make(model) if averages else None, torch.optim.AdamW(model.parameters())
        for batch in images():
            fit(model, [batch], optimizer, epochs=1)
            if isinstance(average, AveragedModel):
                average.update_parameters(model)

    with_average, without = (capture(partial(objective, averages), A100).graph for averages in (True, False))
    copied = sum(tensor.nbytes for tensor in convolutional().state_dict().values())
    counter = 8 if make is AveragedModel else 0
    assert with_average.peak_live_bytes - without.peak_live_bytes == copied + counter
    assert heavy_ops(with_average) == heavy_ops(without)


# --- Values, masks and metrics --------------------------------------------------------------------------------------------------


COUNTED: dict[str, tuple[Callable[[], object], tuple[int | None, int | None]]] = {}


def counts(per_epoch: int | None, steps: int | None) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Steps of an epoch and of the trial. The dry run comes to the objective's end."""

    def note(objective: Callable[[], object]) -> Callable[[], object]:
        COUNTED[objective.__name__] = objective, (per_epoch, steps)
        return objective

    return note


@counts(10, 10)
def metrics_in_numpy_and_lists() -> None:
    model = nn.Linear(20, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for x, y in rows():
        fit(model, [(x, y)], optimizer, epochs=1)
        output = model(x.cuda())
        assert 0 <= np.mean(output.argmax(1).cpu().numpy() == y.numpy()) <= 1
        assert len(output.detach().cpu().tolist()) == 32
        assert np.asarray(output.detach().cpu()).shape == (32, 3)
        assert sum(value.item() for value in output[0]) == 0


@counts(10, 20)
def torchmetrics_on_the_device() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=3).to("cuda")
    model = train(rows()).eval()
    with torch.no_grad():
        for x, y in rows():
            accuracy.update(model(x.cuda()), y.cuda())
    float(accuracy.compute())


def test_an_operator_that_the_device_has_a_kernel_for_is_not_taken_apart() -> None:
    def objective() -> None:
        model = nn.Sequential(nn.Linear(20, 8), nn.SiLU(), nn.Linear(8, 3)).cuda()
        fit(model, rows(), torch.optim.SGD(model.parameters(), lr=0.1))

    names = [op.name for op in capture(objective, A100).graph.ops]
    assert (names.count("silu"), names.count("silu_backward"), names.count("sigmoid")) == (1, 1, 0)


def test_evaluation_in_inference_mode_is_the_same_as_without_gradients() -> None:
    def objective(mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
        model = convolutional().cuda()
        fit(model, images(), torch.optim.SGD(model.parameters(), lr=0.1), epochs=1)
        model.eval()
        with mode():
            found = [model(x.cuda()).softmax(1) for x, _ in images()]
            assert torch.cat(found).cpu().shape == torch.cat(found).to("cpu", torch.float64).shape
        assert found[0].to("cpu").sum() == 0

    outside, inside = (capture(partial(objective, mode), A100) for mode in (torch.no_grad, torch.inference_mode))
    assert outside.unseen == inside.unseen == ""
    assert inside.phases["the evaluation"].content_hash == outside.phases["the evaluation"].content_hash


@pytest.mark.parametrize("keeps", ["on the host", "on the device", "by the network"])
def test_masks_select_rows(keeps: str) -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in rows():
            y[:8] = -1
            if keeps != "on the host":
                x, y = x.cuda(), y.cuda()
            keep = y >= 0 if keeps != "by the network" else model(x).sum(1) > 0
            x, y = x[keep].cuda(), y[keep].cuda()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    graph = capture(objective, A100).graph
    products = [op for op in graph.ops if op.kind == "matmul"]
    if keeps != "by the network":  # the values are there
        assert products[0].shape == (24, 3)
        assert graph.unmodelled == ()
    else:
        assert products[1].shape == (16, 3)
        assert HALF_CHOSEN in graph.unmodelled


def counts_classes(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.binary_cross_entropy_with_logits(model(x)[:, : int(labels.max()) + 1], F.one_hot(labels).float())


def weighs_classes(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    classes, counts = labels.unique(return_counts=True)
    return (model(x)[:, classes] / counts).square().mean()


def repeats_rows(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return model(torch.repeat_interleave(x, labels, dim=0)).square().mean()


def fills_a_padded_batch(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    lengths = torch.arange(5, device=x.device)[None] < labels[:, None]
    return model(x[:, None].expand(-1, 5, -1)[lengths]).square().mean()


def checks_the_outputs(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    outputs = model(x)
    if not (outputs[:, 1:] >= outputs[:, :1]).all() and x.is_meta:  # what is not known is 0
        raise ValueError("corners are not ordered")
    return outputs.square().mean()


def spells_words(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    log_probs = model(x).log_softmax(1)[:, None].expand(-1, 2, -1)
    targets = torch.ones(2, 3, dtype=torch.int64, device=x.device)
    return F.ctc_loss(log_probs, targets[targets > 0], torch.full((2,), len(x)), (targets > 0).sum(1))


class Products(TorchDispatchMode):
    """Notes the shapes of the matrix products that really run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize(
    "loss", [counts_classes, weighs_classes, repeats_rows, fills_a_padded_batch, checks_the_outputs, spells_words]
)
def test_values_of_labels_decide_sizes_as_they_do_in_the_real_step(loss: Any) -> None:
    """Held against the same step on the host, where it has the same labels."""
    labels = torch.tensor([0, 4, 1, 1, 2, 3, 3, 3])

    def step(device: str) -> None:
        model = nn.Linear(20, 5).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, torch.ones(8, 20).to(device), labels.to(device)).backward()
            optimizer.step()

    graph = capture(lambda: step("cuda"), A100).graph
    assert graph.unmodelled == ()
    with Products() as real:
        step("cpu")
    products = [op.shape for op in graph.ops if op.kind == "matmul"]
    assert products == real.shapes[: len(products)]


@counts(10, 20)
def trained_model_that_goes_to_the_host() -> None:
    model: Any = train(images(), model=convolutional().cuda())
    model.cpu().double()
    assert model(torch.randn(2, 3, 8, 8).double()).detach().numpy().shape == (2, 10)
    assert model.to("cpu").state_dict()["0.weight"].cpu().numpy().sum() == 0


@counts(10, 30)
def evaluation_that_is_broken_off_before_training() -> None:
    model = nn.Linear(20, 3).cuda()
    with torch.no_grad():
        for x, _ in rows(6400):
            model(x.cuda())
            break
    train(rows(320), epochs=3, model=model)


@counts(10, 80)
def batches_that_are_fetched_ahead() -> None:
    model, loader = nn.Linear(20, 3).cuda(), rows(320)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(8):
        fit(model, ahead(loader), optimizer, epochs=1)


# --- Loaders, steps and epochs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "drop_last", "epochs", "per_epoch"),
    [(320, False, 7, 10), (330, False, 3, 11), (330, True, 3, 10), (32, False, 9, 1), (64, False, 1, 2)],
)
@pytest.mark.parametrize("evaluates", [True, False])
def test_steps_are_batches_times_epochs(number: int, drop_last: bool, epochs: int, per_epoch: int, evaluates: bool) -> None:
    def objective() -> None:
        model, loader = nn.Linear(20, 3).cuda(), rows(number, drop_last=drop_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(epochs):
            fit(model, loader, optimizer, epochs=1)
            if evaluates:
                evaluate(model, rows())

    captured = capture(objective, A100)
    assert (captured.steps_per_epoch, captured.steps) == (per_epoch, per_epoch * epochs)


def test_epochs_over_data_that_grow_have_more_steps() -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in (320, 352, 400):  # as the labelled samples of active learning
            for _ in range(2):
                fit(model, rows(number), optimizer, epochs=1)

    captured = capture(objective, A100)
    assert (captured.steps_per_epoch, captured.steps) == (10, 2 * (10 + 11 + 13))


def test_strict_zip_of_two_loaders_is_cut_as_one() -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for (x, y), (other, _) in zip(rows(), rows(), strict=True):
                (F.cross_entropy(model(x.cuda()), y.cuda()) + model(other.cuda()).square().mean()).backward()
                optimizer.step()

    captured = capture(objective, A100)
    assert (captured.unseen, captured.steps) == ("", 30)


def evaluate(model: nn.Module, loader: Any) -> int:
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += int((model(x.cuda()).argmax(1) == y.cuda()).sum())
    model.train()
    return right


@counts(3, 15)
def last_step_of_an_epoch_has_fewer_micro_batches() -> None:
    model, loader = nn.Linear(20, 3).cuda(), rows(320)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        for number, (x, y) in enumerate(loader, 1):
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            if number % 4 == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()


class Texts(IterableDataset[Any]):
    """Batches of tokens, of shape (4, 8)."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        yield from ((torch.zeros(4, 8, dtype=torch.long),) for _ in range(24))


def parts_of_tokens(batch: int, parts: int = 1) -> Iterator[tuple[torch.Tensor]]:
    for (tokens,) in DataLoader(TensorDataset(torch.zeros(96, 8, dtype=torch.long)), batch):
        yield from ((part,) for part in tokens.chunk(parts))


@pytest.mark.parametrize(
    ("batches", "accumulation", "samples"),
    [
        (partial(parts_of_tokens, 4), 1, 4),
        (partial(parts_of_tokens, 4), 3, 12),
        (partial(parts_of_tokens, 8, parts=2), 2, 8),  # the script cuts a batch into micro-batches
        (partial(DataLoader, Texts(), batch_size=None), 2, 8),  # the loader does not say
        (lambda: iter(Texts()), 2, 8),  # there is no loader
    ],
)
def test_samples_and_tokens_of_a_step_are_counted(batches: Any, accumulation: int, samples: int) -> None:
    def objective() -> None:
        model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for number, (tokens,) in enumerate(batches(), 1):
            tokens = tokens.cuda()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()

    found = capture(objective, A100, spares=False)
    assert (found.samples_per_step, found.tokens_per_step, found.num_ranks) == (samples, 8 * samples, 1)


def test_numbers_are_no_tokens_and_what_is_prepared_on_the_device_is_not_counted() -> None:
    def objective(prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            model(prepare(torch.randn(16, 20).cuda())).mean().backward()
            optimizer.step()

    for prepare, samples in ((lambda x: x), 16), ((lambda x: x / 2), None):
        found = capture(partial(objective, prepare), A100)
        assert (found.samples_per_step, found.tokens_per_step) == (samples, None)


@counts(10, 50)
def training_data_are_evaluated() -> None:
    model, loader = nn.Linear(20, 3).cuda(), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluate(model, loader)
    for _ in range(5):
        fit(model, loader, optimizer, epochs=1)
        evaluate(model, loader)
        evaluate(model, rows())


def train_on_both(pairs: Callable[[Any, Any], Iterable[Any]], labelled: Any, others: Any) -> None:
    model = nn.Linear(20, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for (x, y), (more, _) in pairs(labelled, others):
            optimizer.zero_grad()
            (F.cross_entropy(model(x.cuda()), y.cuda()) + model(more.cuda()).square().mean()).backward()
            optimizer.step()


def begun_again(labelled: Any, others: Any) -> Iterator[Any]:
    iterator = iter(labelled)
    for other in others:
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(labelled)
            batch = next(iterator)
        yield batch, other


@counts(10, 30)
def second_loader_is_longer() -> None:
    others = rows(960)
    next(iter(others))
    train_on_both(zip, rows(320), others)


@counts(10, 30)
def look_at_another_loader() -> None:
    assert len(next(iter(rows(6400)))) == 2
    train(rows(320), epochs=3)


COUNTED |= {
    "few_are_repeated": (lambda: train_on_both(lambda a, b: zip(itertools.cycle(a), b), rows(), rows(960)), (30, 90)),
    "repeated_beside_many": (lambda: train_on_both(lambda a, b: zip(a, itertools.cycle(b)), rows(960), rows()), (30, 90)),
    "few_are_begun_again": (lambda: train_on_both(begun_again, rows(), rows(960)), (30, 90)),
    "few_end_the_epoch": (lambda: train_on_both(zip, rows(960), rows()), (10, 30)),
}


class Batches:
    """Without an end, as helpers of steps are written."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.iterator = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield next(self.iterator)
            except StopIteration:
                self.iterator = iter(self.loader)

    def from_generator(self) -> Iterator[Any]:
        while True:
            yield from self.loader


COUNTED |= {
    "own_iterator": (lambda: train(itertools.islice(Batches(rows()), 35), epochs=1), (10, 35)),
    "own_generator": (lambda: train(itertools.islice(Batches(rows()).from_generator(), 35), epochs=1), (10, 35)),
    "cycle": (lambda: train(itertools.islice(itertools.cycle(rows()), 35), epochs=1), (10, 35)),
}


@counts(40, 80)
def several_steps_of_a_batch() -> None:
    model = nn.Linear(20, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in itertools.chain(*[rows()] * 2):
        fit(model, [batch] * 4, optimizer, epochs=1)


@counts(30, 60)
def several_tasks_in_turn() -> None:
    model = nn.Linear(20, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batches in zip(rows(), rows(352), rows(400), strict=False):
            fit(model, batches, optimizer, epochs=1)


@counts(None, None)
def as_many_steps_of_a_batch_as_it_has_samples_of_a_class() -> None:
    model = nn.Linear(20, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(rows()):
        fit(model, [(x, y)] * (2 + number % 3), optimizer, epochs=1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(20), random.randrange(3)


@counts(None, None)
def loader_without_an_end() -> None:
    train(itertools.islice(DataLoader(Stream(), 32), 1000), epochs=1)


def trained(
    step: Callable[[nn.Module, torch.Tensor], torch.Tensor], make: Callable[[], nn.Module] = lambda: nn.Linear(20, 3)
) -> None:
    """Ten steps."""
    model = make().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for x, _ in rows():
        optimizer.zero_grad()
        loss = step(model, x.cuda())
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if torch.isfinite(loss) and all(torch.isfinite(gradient).all() for gradient in gradients):
            optimizer.step()


def is_finite(x: torch.Tensor) -> bool:
    with torch.inference_mode():  # tensors that are made in it count no versions
        found = bool(torch.isfinite(x + 1).all())
    assert found
    return found


def packs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    lengths = torch.arange(1, 21).repeat(2)[: len(x)]
    packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False)
    padded, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0])
    return torch.mean(padded)


ASKS_FOR_VALUES: dict[str, Any] = {
    "categorical": lambda model, x: torch.distributions.Categorical(logits=model(x)).entropy().mean(),
    "normal": lambda model, x: torch.distributions.Normal(model(x), 1.0).log_prob(x[:, :3]).mean(),
    "bincount": lambda model, x: model(x).mean() * torch.bincount(x[:, 0].long(), minlength=3).sum(),
    "generator": lambda model, x: model(torch.rand(x.shape, generator=torch.Generator(x.device), device=x.device)).mean(),
    "inference": lambda model, x: model(x).mean() * is_finite(x),
}
COUNTED |= {name: (partial(trained, step), (10, 10)) for name, step in ASKS_FOR_VALUES.items()}
COUNTED["packed"] = partial(trained, packs, lambda: nn.LSTM(1, 8, batch_first=True)), (10, 10)


@pytest.mark.parametrize("name", COUNTED)
def test_steps_are_counted_up_to_the_end_of_the_objective(name: str) -> None:
    objective, expected = COUNTED[name]
    captured = capture(objective, A100)
    assert ((captured.steps_per_epoch, captured.steps), captured.unseen) == (expected, "")


@pytest.mark.parametrize(
    "pairs",
    [lambda many, few: zip(many, few, strict=False), lambda *_: zip(rows(960), rows(), strict=False)],
    ids=["kept", "made for each epoch"],
)
def test_steps_of_a_zip_that_was_cut_short_are_not_those_of_its_longest_loader(pairs: Callable[[Any, Any], Any]) -> None:
    def objective() -> None:
        train_on_both(pairs, rows(960), rows())

    captured = capture(objective, A100, spares=False)
    assert (captured.steps_per_epoch, captured.steps) == (None, None)


class _LongAtItsEnd:
    """A data set of 400 samples, of which the last 40 are long. ``on_read`` is called for each."""

    def __init__(self, on_read: Callable[[], object]) -> None:
        self._on_read = on_read

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        self._on_read()
        return torch.ones(64 if index >= 360 else 16)


def test_the_longest_batch_of_a_slow_data_set_is_found_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no time for all samples, so those that are read are spread over the data set."""
    now = [0.0]

    def tick() -> None:
        now[0] += 0.02

    monkeypatch.setattr("perfguard.capture.loaders.time.monotonic", lambda: now[0])
    data: Any = _LongAtItsEnd(tick)
    collate = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    name, (batch,) = longest_batches(DataLoader(data, 8, collate_fn=collate), lambda collate, samples: collate(samples))
    assert name == "the longest batch of 100 samples"
    assert batch.shape == (8, 64)


def test_the_step_of_the_longest_batch_is_one_of_a_zip_that_another_loader_ends() -> None:
    def objective() -> None:
        model = nn.EmbeddingBag(200, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for (tokens, y), _ in zip(DataLoader(Sentences(), 8, collate_fn=padded), rows(), strict=False):
                optimizer.zero_grad()
                F.cross_entropy(model(tokens.cuda()), y.cuda()).backward()
                optimizer.step()

    captured = capture(objective, A100)
    assert captured.phases.keys() == {"the longest batch of 500 samples"}
    assert (captured.steps_per_epoch, captured.steps) == (10, 30)


def test_batches_that_are_on_the_device_are_indexed_there() -> None:
    def objective() -> None:
        x, y = torch.randn(1000, 20).cuda(), torch.randint(0, 3, (1000,)).cuda()
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            fit(model, ((x[chosen], y[chosen]) for chosen in torch.randperm(1000).split(50)), optimizer, epochs=1)

    captured = capture(objective, A100)
    assert "batch-on-device" in captured.graph.options
    assert captured.graph.live_bytes_of(StorageKind.INPUT)[0] >= 1000 * 20 * 4


def test_an_optimizer_that_steps_without_a_backward_pass_of_its_own_is_another() -> None:
    def objective() -> None:
        head, body = nn.Linear(200, 3).cuda(), nn.Linear(200, 200).cuda()
        of_head, of_body = torch.optim.Adam(head.parameters()), torch.optim.Adam(body.parameters())
        for number in range(20):
            head(body(torch.randn(4, 200).cuda())).mean().backward()
            of_head.step()
            if number > 4:
                of_body.step()

    captured = capture(objective, A100)
    assert captured.num_optimizers == 2
    assert captured.graph.live_bytes_of(StorageKind.OPTIMIZER_STATE)[0] == 2 * 4 * (200 * 200 + 200 + 200 * 3 + 3)


def test_values_of_the_host_stay_on_the_host() -> None:
    def objective(*, scales: bool) -> None:
        x = torch.randn(1000, 20)
        x = ((x - 0.1) / x.sum(1, keepdim=True)) @ torch.eye(20) if scales else x
        train(DataLoader(TensorDataset(x, torch.zeros(1000).long()), 50))

    scaled, plain = (capture(partial(objective, scales=scales), A100).graph for scales in (True, False))
    assert scaled.peak_live_bytes == plain.peak_live_bytes


def test_an_optimizer_may_call_its_base_and_name_states_as_it_likes() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # PyTorch calls hooks in the base's `step`, too, from its first instance on

    class Named(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["shared"] = {"number": torch.zeros(3)}  # type: ignore[index]
            return super().step(closure)

    def objective(*, closes: bool) -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = Named(model.parameters())
        for x, y in itertools.chain(*[rows(200, 50)] * 2):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
                loss.backward()
                return loss

            if not closes:
                closure()
            optimizer.step(closure if closes else None)

    for closes in (True, False):
        captured = capture(partial(objective, closes=closes), A100)
        assert (captured.steps, captured.num_optimizers, captured.graph.kinds >= {"matmul"}) == (8, 1, True)


def test_shapes_on_meta_take_no_memory_and_marks_for_a_profiler_cost_nothing() -> None:
    def objective(*, marks: bool) -> None:
        model = nn.Linear(20, 3).cuda()
        shapes = [torch.empty(1000, 1000, device="meta")] if marks else []
        assert not marks or model.weight.to(device="meta") is model.weight  # and it is still there
        optimizer = torch.optim.Adam(model.parameters())
        for x, _ in images():
            if marks:
                torch.cuda.nvtx.range_push("a step")
                shapes.append(torch.zeros_like(shapes[0], device="meta"))
            model(x.flatten()[:20].cuda()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if marks:
                torch.cuda.nvtx.range_pop()

    plain, marked = (capture(lambda: objective(marks=marks), A100).graph for marks in (False, True))  # noqa: B023
    assert marked.peak_live_bytes == plain.peak_live_bytes


def test_a_parameter_that_is_assigned_takes_memory_once() -> None:
    def objective() -> None:
        model = nn.Linear(1000, 1000).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for x in torch.randn(10, 32, 1000):
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
            model(x.cuda()).mean().backward()
            optimizer.step()

    peak = capture(objective, A100).graph.peak_live_bytes
    assert 2 * 4_000_000 < peak < 2.3 * 4_000_000  # the old weights and the new, or weights and gradients


@pytest.mark.parametrize(
    "make",
    [lambda: torch.nn.utils.skip_init(nn.Linear, 20, 3), lambda: nn.Linear(20, 3, device="meta").to_empty(device="cpu")],
)
def test_a_model_made_on_meta_takes_memory_once_it_is_made_of_that(make: Callable[[], nn.Module]) -> None:
    def held(make: Callable[[], nn.Module]) -> tuple[int, int]:
        graph = capture(lambda: train(rows(), model=make().cuda()), A100).graph
        return graph.live_bytes_of(StorageKind.PARAMETER)[0], graph.peak_live_bytes

    assert held(make) == held(partial(nn.Linear, 20, 3))
    assert held(make)[0] == 4 * 63


def test_batches_that_are_cut_by_hand_have_a_steady_step_however_slow() -> None:
    """Without a loader, the dry run once ended after its first step, where Adam has no states yet."""

    def objective() -> None:
        x, model = torch.randn(1000, 20), nn.Linear(20, 3).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for chosen in torch.arange(1000).split(50):
            optimizer.zero_grad()
            model(x[chosen].cuda()).mean().backward()
            optimizer.step()

    captured = capture(objective, A100, spares=False)
    assert captured.graph.live_bytes_of(StorageKind.OPTIMIZER_STATE)[0] == 2 * 4 * 63


def test_models_of_earlier_folds_are_gone_and_their_steps_are_phases() -> None:
    def objective() -> None:
        for batch in (64, 16):
            model = nn.Linear(20, 3).cuda()
            fit(model, rows(640, batch=batch), torch.optim.Adam(model.parameters()), epochs=2)

    captured = capture(objective, A100)
    assert captured.graph.live_bytes_of(StorageKind.PARAMETER)[0] == 4 * 63
    earlier = captured.phases["a step of stage 1"]
    assert next(op for op in earlier.ops if op.name == "addmm").shape == (64, 3)
    assert captured.steps is None  # the stages have other loaders


def test_an_optimizer_at_the_address_of_one_that_is_gone_is_another() -> None:
    def objective() -> None:
        fit(nn.Linear(20, 3).cuda(), rows(640), optimizer := torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), epochs=1)
        address = id(optimizer)
        del optimizer
        made = [torch.optim.SGD.__new__(torch.optim.SGD)]
        while id(made[-1]) != address and len(made) < 100_000:  # until the free places before it are taken
            made.append(torch.optim.SGD.__new__(torch.optim.SGD))
        assert id(made[-1]) == address
        model = nn.Linear(20, 3).cuda()
        made[-1].__init__(model.parameters(), lr=0.1)  # type: ignore[misc]
        fit(model, rows(640), made.pop(), epochs=1)

    captured = capture(objective, A100)
    assert captured.num_optimizers == 2
    assert "a step of stage 1" in captured.phases


def test_evaluation_within_the_first_steps_is_not_in_each_step() -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, batch in enumerate(rows(640)):
            fit(model, [batch], optimizer, epochs=1)
            if number % 100 == 0:
                evaluate(model, rows(3200, batch=800))

    captured = capture(objective, A100)
    assert len([op for op in captured.graph.ops if op.name == "addmm"]) == 1
    assert {op.shape for op in captured.phases["an evaluation"].ops if op.name == "addmm"} == {(800, 3)}


def test_objective_that_counts_to_a_number_of_steps_ends_there() -> None:
    def objective() -> None:
        model, number = nn.Linear(20, 3).cuda(), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            for x, y in rows(3200):
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                optimizer.step()
                number += 1
                if number == 30:
                    return

    assert capture(objective, A100, spares=False).steps == 30


class Sentences(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """500 samples of 10 to 99 tokens."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(10 + index * 7 % 90, dtype=torch.int64), index % 2


def padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


@pytest.mark.parametrize("fetch", [iter, ahead])
def test_the_longest_batch_is_a_phase_of_its_own(fetch: Callable[[Any], Iterator[Any]]) -> None:
    """Where samples vary in length, the batch that the loader happens to give first says little of what memory must hold."""

    def objective() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for tokens, labels in fetch(DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=padded)):
                optimizer.zero_grad()
                F.cross_entropy(model(tokens.cuda()).mean(1), labels.cuda()).backward()
                optimizer.step()

    captured = capture(objective, A100)
    longest = captured.phases["the longest batch of 500 samples"]
    assert next(op for op in longest.ops if op.name == "embedding").shape == (4, 99, 8)
    assert captured.steps == 2 * 125


def test_a_sampler_that_does_not_know_how_many_batches_it_makes() -> None:
    """Its `len` raises a ValueError."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.loader import DynamicBatchSampler

    graphs = [Data(x=torch.zeros(5 + number % 7, 20)) for number in range(80)]
    sampler = DynamicBatchSampler(graphs, max_num=64)

    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for graph in GraphLoader(graphs, batch_sampler=sampler):
                optimizer.zero_grad()
                model(graph.to("cuda").x).square().mean().backward()
                optimizer.step()

    captured = capture(objective, A100)
    number = sum(1 for _ in sampler)
    assert (captured.steps_per_epoch, captured.steps, captured.unseen) == (number, 3 * number, "")


class Attention(nn.Module):
    """Written out, so that its memory grows as the square of the length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_of_a_sampler_with_a_budget_of_tokens_the_largest_batches_are_a_phase() -> None:
    """fairseq's way: fewer samples where they are longer, the short ones first."""
    lengths = [10 + index * 7 % 90 for index in range(500)]
    by_length = sorted(range(500), key=lengths.__getitem__)
    batches = [by_length[at : at + 20] for at in range(0, 400, 20)] + [by_length[at : at + 15] for at in range(400, 500, 15)]

    def objective(attention: nn.Module) -> None:
        model = nn.Sequential(nn.Embedding(100, 8), attention).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for tokens, _ in DataLoader(Sentences(), batch_sampler=batches, collate_fn=padded):
                optimizer.zero_grad()
                model(tokens.cuda()).mean().backward()
                optimizer.step()

    for attention, power in ((nn.Linear(8, 8), 1), (Attention(), 2)):
        captured = capture(partial(objective, attention), A100)
        largest = max(batches, key=lambda batch: len(batch) * max(lengths[index] for index in batch) ** power)
        graph = captured.phases[f"the longest of {len(batches)} batches"]
        shape = len(largest), max(lengths[index] for index in largest), 8
        assert next(op for op in graph.ops if op.name == "embedding").shape == shape
        assert captured.steps == 2 * len(batches)


# --- Evaluation -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_an_evaluation_with_a_larger_batch_has_its_own_peak(before: bool) -> None:
    def objective() -> None:
        model, validation = convolutional().cuda(), images(512, batch=256)
        optimizer = torch.optim.AdamW(model.parameters())
        if before:
            evaluate(model, validation)
        for _ in range(3):
            fit(model, images(), optimizer, epochs=1)
            evaluate(model, validation)

    captured = capture(objective, A100)
    alone = trace(classifies(), target=A100)
    assert captured.graph.content_hash == alone.content_hash  # the evaluation is not in the step
    evaluation = captured.phases["the evaluation"]
    assert evaluation.mode == "infer"
    assert evaluation.peak_live_bytes > 256 * 16 * 30 * 30 * 4
    assert evaluation.peak_live_bytes > captured.graph.peak_live_bytes
    assert not any(op.phase is Phase.BACKWARD for op in evaluation.ops)
    # The optimizer's state stays where it is meanwhile.
    assert evaluation.live_bytes_of(StorageKind.OPTIMIZER_STATE).min() == 2 * 4 * sum(
        parameter.numel() for parameter in convolutional().parameters()
    )
    assert captured.steps == 30


# --- The largest moment ---------------------------------------------------------------------------------------------------------


def test_layers_that_are_trained_later_are_a_phase() -> None:
    def objective() -> None:
        model: Any = perceptron().cuda()
        model[2].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters())
        fit(model, rows(), optimizer, epochs=1)
        model[2].requires_grad_(True)
        fit(model, rows(), optimizer, epochs=2)

    captured = capture(objective, A100)
    later = captured.phases["a later step"]
    num_bytes = 4 * (256 * 256 + 256)
    assert later.peak_live_bytes - captured.graph.peak_live_bytes >= 3 * num_bytes  # a gradient and two states


@pytest.mark.parametrize("before", [True, False])
def test_an_evaluation_apart_from_the_first_epoch_is_a_phase(before: bool) -> None:
    def objective() -> None:
        model = perceptron().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in (9000, 64) if before else (64, 64):
            evaluate(model, rows(size, size))
            fit(model, rows(), optimizer, epochs=1)
        evaluate(model, rows(9000, 9000))

    found = capture(objective, A100).phases["an evaluation"]
    assert (found.mode, found.peak_live_bytes > 2 * 4 * 9000 * 256) == ("infer", True)


@pytest.mark.filterwarnings("ignore:for .*non-meta parameter")
@pytest.mark.parametrize(
    ("place", "copies"), [("cuda", 1), (torch.device("cuda", 0), 1), ({"cpu": "cuda:0"}, 1), ("cpu", 0), (None, 0)]
)
def test_a_file_that_is_loaded_onto_the_device_is_there_beside_the_model(place: Any, copies: int, tmp_path: Path) -> None:
    weights = perceptron().state_dict()
    torch.save({"model": weights}, tmp_path / "model.pt")

    def objective(loads: bool) -> None:
        model = perceptron().cuda()
        found = torch.load(tmp_path / "model.pt", map_location=place) if loads else {"model": model.state_dict()}
        model.load_state_dict(found["model"])
        fit(model, rows(), torch.optim.AdamW(model.parameters()))

    with_file, without = (capture(partial(objective, loads), A100).graph.peak_live_bytes for loads in (True, False))
    assert with_file - without == copies * sum(weight.nbytes for weight in weights.values())


# --- Beside a real run ----------------------------------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 3))


def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - y).square().mean()  # mse_loss keeps more than its scalar, which PyTorch's meta kernel does not know


@pytest.mark.parametrize("case", ["perceptron", "convolutional", "encoder"])
def test_the_peak_of_live_bytes_is_that_of_the_real_step_to_the_byte(case: str) -> None:
    cases: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor, Any]] = {
        "perceptron": (perceptron, torch.randn(512, 20), torch.randint(0, 3, (512,)), F.cross_entropy),
        "convolutional": (convolutional, torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)), F.cross_entropy),
        "encoder": (encoder, torch.randn(8, 16, 64), torch.randn(8, 16, 64), squares),
    }
    make, x, y, loss_of = cases[case]
    real = RealBytes()

    def objective(watch: Any = contextlib.nullcontext) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            with watch() if step > 1 else contextlib.nullcontext():
                optimizer.zero_grad()
                output = model(x)
                loss = loss_of(output, y)
                loss.backward()
                optimizer.step()

    captured = capture(objective, CPU).graph
    objective(lambda: real)
    assert captured.peak_live_bytes == real.most


# --- What a capture leaves behind -----------------------------------------------------------------------------------------------


def _patchable() -> dict[Any, Any]:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    owners: list[Any] = [
        torch, torch.cuda, nn.Module, nn.Parameter, nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer,
        DataLoader, _BaseDataLoaderIter, torch.optim.Optimizer, torch.amp.GradScaler, sys.modules["torch.optim.optimizer"],
        sys.modules["torch.utils._foreach_utils"],
    ]  # fmt: skip
    return {(index, name): value for index, owner in enumerate(owners) for name, value in vars(owner).items() if callable(value)}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("device", [A100, CPU], ids=["gpu", "cpu"])
def test_after_a_capture_pytorch_is_as_it_was(device: Any, fails: bool) -> None:
    def objective() -> None:
        model = convolutional().to("cuda" if device is A100 else "cpu")
        random.random(), np.random.rand(), torch.rand(1)
        if fails:
            raise RuntimeError("before the first step")
        fit(model, images(), torch.optim.AdamW(model.parameters()), device="cuda" if device is A100 else "cpu")

    before, states = _patchable(), (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())  # type: ignore[index]
    with pytest.raises(RuntimeError, match="before the first step") if fails else contextlib.nullcontext():
        capture(objective, device)
    after = _patchable()
    assert [key for key in {*before, *after} if before.get(key) is not after.get(key)] == []
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.get_rng_state())
    assert states[2] == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert not torch.cuda.is_initialized()
    assert sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks == {}
    assert not nn.modules.module._has_any_global_hook()

    model = convolutional()  # a real step
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    fit(model, images(32), torch.optim.AdamW(model.parameters()), device="cpu", epochs=1)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))


# --- What cannot be captured ----------------------------------------------------------------------------------------------------


def test_an_error_after_the_second_step_says_why_the_end_is_unseen() -> None:
    def objective() -> None:
        train(rows(64), epochs=1)
        raise ValueError("no such file")

    captured = capture(objective, A100)
    assert captured.unseen == "ValueError: no such file"
    assert (captured.steps_per_epoch, captured.steps) == (2, None)


@pytest.mark.parametrize("catches", [False, True])
def test_a_long_trial_is_cut_off(catches: bool) -> None:
    def objective() -> None:
        with contextlib.suppress(BaseException) if catches else contextlib.nullcontext():
            train(rows(64), epochs=10**9)

    captured = capture(objective, A100, most_seconds=0.1)
    assert "more than 0.1 s" in captured.unseen
    assert captured.steps == 2 * 10**9  # its head says it


# --- What a stranger found: memory that grows, and values that are not 0


def largest(found: CapturedTrial) -> int:
    return max(graph.peak_live_bytes for graph in (found.graph, *found.phases.values()))


@pytest.mark.parametrize("spares", [True, False])
@pytest.mark.parametrize(("most", "number"), [(math.inf, 20), (8, 8), (0, 0)])
def test_what_training_keeps_counts_to_the_end(most: float, number: int, spares: bool) -> None:
    """A list that is full after some batches goes on no longer."""
    outputs: list[torch.Tensor] = []

    def objective() -> None:
        model = nn.Linear(20, 5000).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            outputs.clear()
            for x, _ in rows(20 * 32):
                optimizer.zero_grad()
                output = model(x.cuda())
                output.sum().backward()
                optimizer.step()
                if len(outputs) < most:
                    outputs.append(output.detach())

    kept = 32 * 5000 * 4
    found = capture(objective, A100, spares=spares)
    assert number * kept < largest(found) < (number + 4) * kept
    assert found.graph.unmodelled == ((KEPT,) if number == 20 else ())


@pytest.mark.parametrize("spares", [True, False])
def test_a_bounded_buffer_holds_no_more_than_its_bound(spares: bool) -> None:
    """A dry run that sees few batches of an epoch would take it to grow to the end."""
    outputs: collections.deque[torch.Tensor] = collections.deque(maxlen=8)

    def objective() -> None:
        model = nn.Linear(20, 5000).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            for x, _ in rows(40 * 32):
                optimizer.zero_grad()
                output = model(x.cuda())
                output.sum().backward()
                optimizer.step()
                outputs.append(output.detach())

    kept = 32 * 5000 * 4
    assert 8 * kept < largest(capture(objective, A100, spares=spares)) < 12 * kept


def test_evaluation_within_an_epoch_and_larger_inputs_of_later_epochs_count() -> None:
    def objective(sizes: tuple[int, ...], evaluates: bool) -> None:
        model = convolutional().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for size in sizes:
            for step, batch in enumerate(images(size=size)):
                fit(model, [batch], optimizer, epochs=1)
                if evaluates and step == 7:
                    evaluate(model, images(batch=160))

    plain, larger = (capture(partial(objective, sizes, False), A100) for sizes in ((32, 32), (32, 32, 32, 32, 64)))
    assert largest(larger) > 3 * largest(plain)
    assert set(larger.phases) == {"a later step"}
    evaluating = capture(partial(objective, (32, 32), True), A100)
    assert set(evaluating.phases) == {"an evaluation"}
    assert evaluating.phases["an evaluation"].peak_live_bytes > 2 * plain.graph.peak_live_bytes


def test_model_of_the_fold_before_is_gone() -> None:
    def objective() -> None:
        for _ in range(3):
            model = nn.Sequential(nn.Linear(20, 4000), nn.Linear(4000, 3)).cuda()
            fit(model, rows(), torch.optim.Adam(model.parameters()))

    found = capture(objective, A100)
    assert largest(found) < 1.1 * found.graph.peak_live_bytes


def test_bare_next_is_given_all_that_it_asks_for() -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        batches = iter(rows())
        for _ in range(9):
            fit(model, [next(batches)], optimizer, epochs=1)
        fit(model, rows(), torch.optim.Adam(model.parameters()))

    found = capture(objective, A100, spares=False)
    assert found.unseen == ""
    assert found.num_optimizers == 2


class Experts(nn.Module):
    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.router = nn.Linear(20, 4)
        self.experts = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if not self.asks or mask.any():
                out[mask] = expert(x[mask])
        return out


def test_expert_that_is_asked_whether_it_has_tokens_has_some() -> None:
    def products(asks: bool) -> int:
        graph = capture(lambda: train(rows(), model=Experts(asks=asks).cuda()), A100).graph
        return sum(op.kind == "matmul" for op in graph.ops)

    assert products(asks=True) == products(asks=False)


@pytest.mark.parametrize("device", [A100, CPU])
def test_counters_and_labels_that_are_changed_in_place_keep_their_values(device: Any) -> None:
    place, seen = "cuda" if device is A100 else "cpu", []

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.norm = nn.LSTM(20, 8, batch_first=True), nn.BatchNorm1d(8, momentum=None)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            normed: torch.Tensor = self.norm(self.rnn(packed)[1][0][0])
            return normed

    def objective() -> None:
        data = TensorDataset(torch.randn(64, 5, 20), torch.arange(64) % 5 + 1, torch.arange(64) % 3)
        model = Packed().to(place)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            for x, lengths, labels in DataLoader(data, 16):
                labels = labels.to(place)
                labels[labels == 2] = 6
                one_hot = F.one_hot(labels)
                seen.append(one_hot.shape[1])
                optimizer.zero_grad()
                model(x.to(place), lengths).sum().backward()
                optimizer.step()

    found = capture(objective, device)
    assert found.unseen == ""
    assert set(seen) == {7}


def test_what_the_host_writes_into_a_tensor_is_known() -> None:
    seen = []

    def objective() -> None:
        numbers = torch.zeros(4, dtype=torch.long, device="cuda")
        numbers.copy_(torch.tensor([1, 2, 3, 4]))
        numbers[:2].copy_(torch.tensor([8, 9]))
        seen.append(numbers.tolist())
        numbers += torch.randn(4, device="cuda").long()
        seen.append(numbers.tolist())
        train(rows())

    assert capture(objective, A100).unseen == ""
    assert seen == [[8, 9, 3, 4], [0, 0, 0, 0]]


def test_state_of_an_optimizer_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    def objective() -> None:
        model = nn.Linear(20, 3)
        optimizer = torch.optim.Adam(model.parameters())
        fit(model, rows(), optimizer, device="cpu")
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu"))

    assert capture(objective, CPU).unseen == ""


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_a_trial_that_is_resumed_goes_on_with_the_numbers_of_its_optimizer(place: str, tmp_path: Path) -> None:
    # Adam divides by a power of its number of steps, which is on the device after `torch.load(..., map_location="cuda")`.
    def objective() -> None:
        for _part in range(2):
            model = nn.Linear(20, 3).cuda()
            optimizer = torch.optim.Adam(model.parameters())
            if (tmp_path / place).exists():
                optimizer.load_state_dict(torch.load(tmp_path / place, map_location=place))
            for _ in range(2):
                fit(model, rows(), optimizer, epochs=1)
                torch.save(optimizer.state_dict(), tmp_path / place)

    captured = capture(objective, A100)
    assert (captured.unseen, captured.steps) == ("", 4 * captured.steps_per_epoch)  # type: ignore[operator]


def test_longest_samples_that_are_not_padded_hardly_ever_meet() -> None:
    data = [torch.zeros(500 if number == 0 else 10, dtype=torch.long) for number in range(320)]

    def objective(collate: Any) -> None:
        model = nn.EmbeddingBag(10, 50).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            for x in DataLoader(data, 16, collate_fn=collate):  # type: ignore[arg-type]
                model(x.cuda()).sum().backward()
                optimizer.step()

    def longest(collate: Any) -> int:
        graph = capture(partial(objective, collate), A100).phases["the longest batch of 320 samples"]
        return max(storage.num_bytes for storage in graph.storages if storage.kind is StorageKind.INPUT)

    padded = longest(partial(nn.utils.rnn.pad_sequence, batch_first=True))
    joined = longest(lambda samples: torch.cat(samples)[None])
    assert padded == 8 * 16 * 500
    assert 8 * 16 * 10 < joined <= 8 * (3 * 500 + 13 * 10)


def test_step_that_depends_on_a_value_is_named() -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for x, y in rows():
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0:
                optimizer.step()

    dry_runs = DryRuns(lambda _: objective(), A100)  # the first dry run takes the steps for micro-batches
    with pytest.raises(CaptureError, match="a step that depends on one, as in `if norm > 0`, is left out"):
        dry_runs.capture(lambda *_: pytest.fail("it has no parameters"), {})
    dry_runs.close()


class Windowed(nn.Module):
    """A transform of a data set, as those of torchvision and torchaudio: it reads values, and has a buffer."""

    window: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deviation = torch.as_tensor([2.0], device=x.device)
        if (deviation == 0).any():
            raise ValueError("it divides by zero")
        return x * self.window / deviation


@pytest.mark.parametrize("device", [A100, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("moves", [False, True])
def test_transforms_of_a_data_set_compute(device: Any, moves: bool) -> None:
    """What a loader runs is no work of the device, even where it names it."""
    name, outer = ("cpu" if device is CPU else "cuda"), Windowed()

    def objective() -> None:
        if not moves:
            assert outer(torch.ones(20)).shape == (20,)  # without a loader, too
        transform = outer if moves else Windowed()

        def collate(samples: Any) -> Any:
            x, lengths = torch.stack([transform(x) for (x,) in samples]), torch.tensor([12] * len(samples))
            return (x.to(name), lengths.to(name)) if moves else (x, lengths)

        model = nn.Linear(12, 3).to(name)
        optimizer = torch.optim.SGD(model.parameters())
        for x, lengths in DataLoader(TensorDataset(torch.randn(64, 20)), 16, collate_fn=collate):
            model(x.to(name)[:, : int(lengths.max())]).mean().backward()
            optimizer.step()

    captured = capture(objective, device)
    assert (captured.steps, captured.unseen) == (4, "")
    assert all(op.name not in ("mul", "div", "stack") for op in captured.graph.ops if op.phase is Phase.FORWARD)


@pytest.mark.parametrize("inner", [False, True])
def test_data_parallel_is_judged_as_one_module(inner: bool) -> None:
    def objective(wrap: Any = nn.DataParallel) -> None:
        model = nn.Sequential(wrap(nn.Linear(20, 30)), nn.Linear(30, 3)) if inner else wrap(nn.Linear(20, 3))
        train(rows(), model=model.cuda())

    captured, alone = capture(objective, A100), capture(partial(objective, lambda module: module), A100)
    assert captured.graph.unmodelled == (DATA_PARALLEL,)
    assert captured.steps == alone.steps
    assert [(op.name, op.shape) for op in captured.graph.ops] == [(op.name, op.shape) for op in alone.graph.ops]
    assert captured.graph.peak_live_bytes == alone.graph.peak_live_bytes


@pytest.mark.parametrize("device", [A100, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("is_made_there", [False, True])
def test_sparse_tensors_on_the_device_are_named(device: Any, is_made_there: bool) -> None:
    name = "cpu" if device is CPU else "cuda"

    def objective() -> None:
        place = name if is_made_there else "cpu"
        adjacency = torch.sparse_coo_tensor(
            torch.arange(8).repeat(2, 1), torch.ones(8), (8, 8), device=place, check_invariants=True
        ).to(name)
        model = nn.Bilinear(8, 8, 3).to(name)
        model.forward = lambda x: torch.mm(adjacency, x @ model.weight[0]).mean()  # type: ignore[method-assign,assignment,misc]
        model(torch.randn(8, 8, device=name)).backward()

    with pytest.raises(CaptureError, match=r"layout torch.sparse_coo cannot be dry-run.*index_add"):
        capture(objective, device)


@pytest.mark.parametrize("mode", ["embedding", "bag"])
def test_sparse_gradients_are_named_with_the_line_of_the_embedding(mode: str) -> None:
    def objective(*, sparse: bool) -> None:
        kind = nn.Embedding if mode == "embedding" else nn.EmbeddingBag
        model = kind(100, 8, sparse=sparse).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _step in range(5):
            optimizer.zero_grad()
            model(torch.randint(0, 100, (4, 3), device="cuda")).sum().backward()
            optimizer.step()

    with pytest.raises(CaptureError, match=r"The embedding at test_trial.py:\d+ has sparse gradients.*sparse=False"):
        capture(partial(objective, sparse=True), A100)
    assert capture(partial(objective, sparse=False), A100).steps == 5


def test_a_model_in_shared_memory_trains_as_it_is() -> None:
    def objective(*, shares: bool) -> None:
        model = nn.Linear(20, 3)
        if shares:
            model.share_memory()
        train(rows(), model=model.cuda())

    shared, alone = (capture(partial(objective, shares=shares), A100) for shares in (True, False))
    assert (shared.steps, shared.graph.peak_live_bytes) == (alone.steps, alone.graph.peak_live_bytes)


def test_a_process_that_trains_a_shared_model_is_named_with_its_line() -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).share_memory()
        multiprocessing.get_context("fork").Process(target=train, args=(rows(),), kwargs={"model": model}).start()

    with pytest.raises(CaptureError, match=r"test_trial.py:\d+ starts a process with a model in shared memory"):
        capture(objective, A100)


def _first_order(model: nn.Module, optimizer: torch.optim.Optimizer, num_tasks: int) -> None:
    optimizer.zero_grad()
    for _task in range(num_tasks):
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _step in range(2):
            inner.zero_grad()
            fast(torch.randn(5, 20, device="cuda")).square().mean().backward()
            inner.step()
        for parameter, other in zip(model.parameters(), fast.parameters(), strict=True):
            parameter.grad = other.grad
    optimizer.step()


@pytest.mark.parametrize("num_tasks", [1, 3])
def test_an_optimizer_that_each_step_makes_for_its_tasks_is_no_stage(num_tasks: int) -> None:
    def objective() -> None:
        model = nn.Linear(20, 3).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _step in range(12):
            _first_order(model, optimizer, num_tasks)

    found = capture(objective, A100)
    assert found.steps == 12
    assert not any("stage" in name for name in found.phases)


def test_the_steps_of_stages_that_no_loader_feeds_are_not_known() -> None:
    def objective() -> None:
        for _stage in range(3):
            model = nn.Linear(20, 3).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            for _step in range(4):
                optimizer.zero_grad()
                model(torch.randn(5, 20, device="cuda")).sum().backward()
                optimizer.step()

    assert capture(objective, A100).steps is None


@pytest.mark.parametrize(("gpu", "capability"), [("t4", (7, 5)), ("h100", (9, 0))])
def test_a_script_that_asks_for_its_accelerator_finds_the_guarded_one(gpu: str, capability: tuple[int, int]) -> None:
    """The first lines of PyTorch's own tutorial. Nothing of it may reach a driver, which would start a context."""
    seen: list[Any] = []

    def objective() -> None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        assert device is not None
        seen.append((device.type, torch.accelerator.device_count(), torch.cuda.get_device_capability()))
        assert not torch.cuda.is_current_stream_capturing()
        assert not torch.accelerator.current_stream().is_capturing()
        model = nn.Linear(20, 3).to(device)
        fit(model, rows(), torch.optim.Adam(model.parameters()), device=device.type)

    assert capture(objective, resolve_device(gpu)).graph.mode == "train"
    assert seen == [("cuda", 1, capability)]

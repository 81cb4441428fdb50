"""A trial whose set-up cannot be dry-run is dry-run from its first training forward pass on, in the middle of its real run."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard import resolve_device
from perfguard.capture.first_forward import FirstForward
from perfguard.capture.trial import capture
from perfguard.exceptions import CaptureError, TooLargeError
from perfguard.workload import CapturedTrial

CPU = resolve_device("cpu")
MAIN = os.getpid()
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Ended(Exception):
    """Ends a trial where it is judged."""


def judged(objective: Callable[[], object], **settings: Any) -> CapturedTrial | Exception:
    """What the guard gets of an objective that then ends."""
    found: list[CapturedTrial | Exception] = []

    def judge(seen: CapturedTrial | Exception) -> None:
        found.append(seen)
        raise Ended

    with pytest.raises(Ended), FirstForward(CPU, judge, lambda: None, problem=CaptureError("why"), **settings):
        objective()
    assert len(found) == 1
    return found[0]


def train(step: Callable[..., None], *, epochs: int = 2, **loading: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(96, 20), torch.randint(0, 3, (96,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, **loading)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            step(model, optimizer, x, y)
        with torch.no_grad():
            model.eval()(data.tensors[0])
    return model


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def with_autocast(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain(model, optimizer, x, y)


@pytest.mark.parametrize(
    ("step", "loading"),
    [
        (plain, {"num_workers": 1}),
        (plain, {"num_workers": 1, "persistent_workers": True}),
        (with_a_closure, {}),
        (with_autocast, {}),
    ],
)
def test_what_is_seen_is_what_a_dry_run_from_the_first_line_sees(step: Callable[..., None], loading: dict[str, Any]) -> None:
    seen, whole = judged(lambda: train(step, **loading)), capture(lambda: train(step, **loading), CPU)
    assert isinstance(seen, CapturedTrial)
    assert seen.graph.content_hash == whole.graph.content_hash
    assert (seen.steps, seen.steps_per_epoch, seen.samples_per_step) == (24, 12, 8)
    assert seen.phases.keys() == whole.phases.keys() == {"the evaluation"}
    assert seen.source != whole.source


def test_the_trial_goes_on_as_if_nothing_had_happened() -> None:
    def weights(judge: Callable[[Any], object] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        if judge is None:
            return list(train(plain, num_workers=1).state_dict().values())
        with FirstForward(CPU, judge, lambda: None, problem=CaptureError("why")):
            return list(train(plain, num_workers=1).state_dict().values())

    found: list[Any] = []
    for guarded, alone in zip(weights(found.append), weights(None), strict=True):
        assert torch.equal(guarded, alone)
    assert isinstance(found[0], CapturedTrial)


def read_lines(folder: Path) -> Iterator[torch.Tensor]:
    """Reads a file while it trains."""
    (folder / "rows.csv").write_text("".join(f"{row:100}\n" for row in range(2000)))  # more than a buffer
    with (folder / "rows.csv").open() as rows:
        for row in itertools.islice(rows, 0, None, 100):
            yield torch.full((4, 8), float(row))


def map_a_file(folder: Path) -> Iterator[torch.Tensor]:
    """Writes into shared memory while it trains."""
    seen = np.memmap(folder / "seen.bin", dtype=np.float32, mode="w+", shape=(20,))
    for number in range(20):
        assert seen[number] == 0
        seen[number] = 1
        yield torch.ones(4, 8)


def keep_a_temporary_file(folder: Path) -> Iterator[torch.Tensor]:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(20):
            yield torch.ones(4, 8)
        assert Path(file.name).exists()


def write_a_log(folder: Path) -> Iterator[torch.Tensor]:
    with (folder / "log").open("w") as log:
        for number in range(20):
            log.write(f"{number}\n")
            log.flush()
            yield torch.ones(4, 8)
    assert (folder / "log").read_text().split() == [str(number) for number in range(20)]


def ask_another_process(folder: Path) -> Iterator[torch.Tensor]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for number in range(20):
            child.stdin.write(f"{number}\n")
            if os.getpid() == MAIN:  # a dry run hears nothing
                assert child.stdout.readline() == f"{number}\n"
            yield torch.ones(4, 8)


@pytest.mark.parametrize("batches", [read_lines, map_a_file, keep_a_temporary_file, write_a_log, ask_another_process])
def test_what_the_set_up_has_opened_is_out_of_reach(batches: Callable[[Path], Iterator[torch.Tensor]], tmp_path: Path) -> None:
    def objective() -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        losses = []
        for x in batches(tmp_path):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    alone, found = objective(), list[Any]()
    with FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")):
        assert objective() == alone
    assert isinstance(found[0], CapturedTrial), found[0]


def test_parameters_of_no_module_are_counted() -> None:
    def objective() -> None:
        weight = nn.Parameter(torch.randn(20, 300))
        optimizer = torch.optim.Adam([weight])
        for _ in range(4):
            optimizer.zero_grad()
            (torch.ones(8, 20) @ weight).square().mean().backward()
            optimizer.step()

    seen, whole = judged(objective), capture(objective, CPU)
    assert isinstance(seen, CapturedTrial)
    assert seen.graph.content_hash == whole.graph.content_hash


def test_a_loader_that_nobody_else_holds_is_followed() -> None:
    def objective() -> None:
        model = nn.Linear(20, 3)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            for (x,) in DataLoader(TensorDataset(torch.randn(96, 20)), batch_size=8):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    seen = judged(objective)
    assert isinstance(seen, CapturedTrial)
    assert (seen.steps, seen.steps_per_epoch, seen.samples_per_step) == (24, 12, 8)


def test_another_thread_is_another_trial() -> None:
    found: list[Any] = []
    with FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")):
        other = threading.Thread(target=train, args=(plain,))
        other.start()
        other.join()
        assert not found
        train(plain)
    assert [type(each) for each in found] == [CapturedTrial]


def test_a_verdict_that_the_objective_catches_is_raised_again() -> None:
    steps: list[int] = []

    def judge(seen: Any) -> None:
        raise Ended

    def careless(*args: Any) -> None:
        with suppress(Exception):
            plain(*args)
            steps.append(1)

    with pytest.raises(Ended), FirstForward(CPU, judge, lambda: None, problem=CaptureError("why")):
        train(careless)
    assert not steps


def test_a_model_of_the_set_up_is_not_taken_for_the_trained_one() -> None:
    def objective() -> None:
        features = nn.Linear(20, 4)(torch.randn(8, 20))
        if not features.any():  # on the stage it is nothing but zeros
            raise ValueError("degenerate")
        train(plain)

    seen = judged(objective)
    assert isinstance(seen, CapturedTrial)
    assert seen.steps == 24


@pytest.mark.parametrize(
    ("hangs", "message"),
    [
        (False, "why; from a first forward pass on, the dry run of the objective ends at"),
        (True, "did not end within 3 s"),
    ],
)
def test_a_dry_run_that_fails_or_hangs_is_said_at_the_first_step(hangs: bool, message: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        while loss.item() < 1e-6:  # as it is in a dry run
            assert hangs
            time.sleep(0.01)
        loss.backward()
        optimizer.step()

    assert message in str(judged(lambda: train(step), most_seconds=3))


def test_a_trial_without_training_is_judged_at_its_end() -> None:
    found: list[Any] = []
    with FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")), torch.no_grad():
        nn.Linear(2, 2)(torch.ones(2))
    assert [str(error) for error in found] == ["why"]


def test_a_trial_that_fails_before_is_not_judged() -> None:
    found: list[Any] = []
    with pytest.raises(ValueError, match="its own"), FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")):
        raise ValueError("its own")
    assert not found


def test_a_trial_out_of_memory_before_its_first_step_says_why_it_was_launched() -> None:
    found: list[Any] = []
    with pytest.raises(MemoryError), FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")):
        raise MemoryError
    assert [str(error) for error in found] == ["why"]


def test_data_made_after_the_first_forward_pass_take_no_memory() -> None:
    """The set-up depends on values; what the training makes for itself is too large for the host."""

    def objective() -> None:
        assert nn.Linear(8, 8).weight.square().sum().item() > 0
        model = nn.Linear(256, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(8, 256)).sum().backward()
            model(torch.randn(500_000_000, 256)).sum().backward()
            optimizer.step()

    found = judged(objective)
    assert isinstance(found, TooLargeError) or (
        isinstance(found, CapturedTrial) and found.graph.peak_live_bytes > 4 * 500_000_000 * 256
    )

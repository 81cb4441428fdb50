"""fastai's Learner is dry-run as it stands, though neither its loader nor its optimizer is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from perfguard import resolve_device
from perfguard.capture.first_forward import FirstForward
from perfguard.exceptions import CaptureError
from perfguard.graph import StorageKind
from perfguard_optuna import PerfGuardPruner, create_study
from tests.perfguard.capture.toy_ranks import bytes_of, in_a_child

pytest.importorskip("fastai.callback.schedule")  # with which a Learner has fit_one_cycle
core, learning, losses, metrics, tracker, training = (
    pytest.importorskip(f"fastai.{name}")
    for name in ("data.core", "learner", "losses", "metrics", "callback.tracker", "callback.training")
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
BATCHES = 100


def learner(*callbacks: Any, width: int = 1000, batch: int = 8, data: Any = None) -> Any:
    def rows(number: int) -> TensorDataset:
        return TensorDataset(torch.randn(number, 20), torch.randint(0, 3, (number,)))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaders = core.DataLoaders.from_dsets(data or rows(batch * BATCHES), rows(50), bs=batch, num_workers=2, device=device)
    model = nn.Sequential(nn.Linear(20, width), nn.Sequential(nn.ReLU(), nn.Linear(width, 3)))

    def split(model: Any) -> list[Any]:
        return [[*model[0].parameters()], [*model[1].parameters()]]

    return learning.Learner(
        loaders, model, losses.CrossEntropyLossFlat(), metrics=metrics.accuracy, cbs=[*callbacks], splitter=split
    )


def test_training_is_seen_to_the_byte() -> None:
    parameters = 4 * (21 * 1000 + 1001 * 3)
    found = in_a_child(lambda: learner().fit_one_cycle(3))
    assert (found.steps, found.steps_per_epoch, found.samples_per_step, found.unseen) == (3 * BATCHES, BATCHES, 8, "")
    assert bytes_of(found, StorageKind.PARAMETER) == bytes_of(found, StorageKind.GRADIENT) == parameters
    assert bytes_of(found, StorageKind.OPTIMIZER_STATE) == 2 * parameters
    assert "the evaluation" in found.phases


@pytest.mark.slow
def test_layers_that_are_trained_later_count() -> None:
    whole, tuned = in_a_child(lambda: learner().fit(3)), in_a_child(lambda: learner().fine_tune(3))
    assert tuned.graph.peak_live_bytes < whole.graph.peak_live_bytes / 2
    assert tuned.phases["a later step"].peak_live_bytes == whole.graph.peak_live_bytes
    assert tuned.steps == 4 * BATCHES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "steps"),
    [
        (lambda: learner(tracker.EarlyStoppingCallback()).fit(9), None),
        (lambda: learner(training.GradientAccumulation(32)).fit(4), BATCHES),
        (lambda: learner().to_fp16().fit(2), 2 * BATCHES),
        (lambda: learner().fit(1000), 1000 * BATCHES),
        (lambda: (one := learner()).fit_one_cycle(2, one.lr_find(show_plot=False).valley), 2 * BATCHES),
    ],
    ids=["early stopping", "accumulation", "half precision", "many epochs", "lr_find"],
)
def test_steps_are_known(train: Callable[[], None], steps: int | None) -> None:
    assert in_a_child(train).steps == steps


@pytest.mark.slow
def test_the_longest_batch_is_judged() -> None:
    class Texts:
        def __len__(self) -> int:
            return 800

        def __getitem__(self, index: int) -> Any:
            return torch.randn(1 + index % 7, 20).sum(0, keepdim=True).expand(1 + index % 7, 20), torch.tensor(index % 3)

    def train() -> None:
        made = learner(data=Texts(), width=10)
        padded = nn.utils.rnn.pad_sequence
        made.dls.train.before_batch = lambda rows: [
            (x, y) for x, (_, y) in zip(padded([x for x, _ in rows], batch_first=True), rows, strict=True)
        ]
        made.model = nn.Sequential(made.model[0], nn.AdaptiveAvgPool2d((1, 10)), nn.Flatten(), nn.Linear(10, 3))
        made.splitter = lambda model: [[*model.parameters()]]
        made.dls.valid = made.dls.train
        made.fit(2)

    found = in_a_child(train)
    assert found.phases["the longest batch of 800 samples"].peak_live_bytes > 0


@pytest.mark.slow
def test_a_trial_is_judged_at_its_first_forward_pass() -> None:
    class Ended(Exception): ...

    found: list[Any] = []

    def judge(seen: Any) -> None:
        found.append(seen)
        raise Ended

    with pytest.raises(Ended), FirstForward(resolve_device("cpu"), judge, lambda: None, problem=CaptureError("why")):
        learner().fit(3)
    whole = in_a_child(lambda: learner().fit(3), "cpu")
    assert found[0].graph.peak_live_bytes == pytest.approx(whole.graph.peak_live_bytes, rel=0.01)
    assert found[0].steps_per_epoch == BATCHES


@pytest.mark.slow
def test_a_study_is_guarded_and_measured(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        made = learner(width=trial.suggest_categorical("width", [10, 10**8]))
        with made.no_bar(), made.no_logging():
            made.fit_one_cycle(1, 1e-3)
        return float(made.validate()[1])

    study = create_study()
    for width in (10, 10**8):
        study.enqueue_trial({"width": width})
    study.optimize(objective, n_trials=2, pruner=PerfGuardPruner(gpu="cpu", memory_budget="1GiB", log=False), count="proposed")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert study.trials[0].user_attrs["perfguard:step_time_measured_s"] > 0

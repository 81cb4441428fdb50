"""PerfGuardCallback in real Lightning trainers, on the CPU, judged for an A100."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import lightning.pytorch as pl
import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

import perfguard_optuna
from perfguard import TensorSpec, Workload, trace
from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard_optuna import OptunaGuard, PerfGuardPruner, record_of
from perfguard_optuna.lightning import PerfGuardCallback, workload_of
from tests.doubles import BARE_A100, ReplayPredictor

pytestmark = [
    pytest.mark.usefixtures("pretended_gpu"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.rank_zero.LightningDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
]
SMALL, LARGE = 8, 4096
"""Widths that need about 15 KiB and 5 MiB."""
BATCH = 16
COMPLETE, PRUNED = TrialState.COMPLETE, TrialState.PRUNED
TARGETS = torch.arange(4 * BATCH) % SMALL


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return len(TARGETS)

    def __getitem__(self, index: int) -> Any:
        return torch.linspace(0, index, 64), TARGETS[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Samples()[index] for index in range(len(TARGETS)))


class Net(pl.LightningModule):
    """``seen`` is the devices of the batches of each kind of module, the twins that are traced among them."""

    seen: ClassVar[list[str]] = []

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(64, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        self.seen.append(images.device.type)
        output = self.layer(images)
        loss = nn.functional.cross_entropy(output, labels)
        self.log("loss", loss)
        return {"loss": loss, "output": output.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Scored(Net):
    """With a metric of torchmetrics, which looks at values that a trace does not have."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.accuracy = MulticlassAccuracy(width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = super().training_step(batch, batch_idx)
        self.accuracy(step["output"], batch[1])
        self.log_dict({"accuracy": self.accuracy})
        return step["loss"]


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Net.seen = []


def make_guard(**options: Any) -> OptunaGuard:
    settings: dict[str, Any] = {"memory_budget": "1MiB", "predictor": ReplayPredictor(), "log": False}
    return OptunaGuard(BARE_A100, **(settings | options))


def make_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu"}
    return pl.Trainer(**(defaults | quiet | options), callbacks=list(callbacks))


def make_loader() -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=BATCH, shuffle=True)


def study_of(
    guard: OptunaGuard,
    widths: list[int],
    make: Callable[[int], pl.LightningModule] = Net,
    *,
    loader: Any = None,
    batch: Any = None,
    **trainer: Any,
) -> optuna.Study:
    """A plain study that has trained ``widths``, in order."""

    def objective(trial: optuna.Trial) -> float:
        module = make(trial.suggest_int("width", SMALL, LARGE))
        fit = make_trainer(PerfGuardCallback(guard, trial, batch=batch), **trainer)
        fit.fit(module, make_loader() if loader is None else loader)
        return 0.0

    study = optuna.create_study()
    for width in widths:
        study.enqueue_trial({"width": width})
    study.optimize(objective, n_trials=len(widths))
    return study


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def predicted_bytes(study: optuna.Study) -> float:
    return record_of(study.trials[0]).predicted["memory"].median


def by_hand(guard: OptunaGuard, **fields: Any) -> float:
    """Bytes at the peak of what Net of width SMALL runs, without Lightning."""
    defaults: dict[str, Any] = {
        "optimizer": torch.optim.Adam,
        "targets": TensorSpec((BATCH,), "int64"),
        "zero_grad": "before-backward",
        "retain": "nothing",
    }
    model = nn.Linear(64, SMALL)
    workload = Workload(model, inputs=(BATCH, 64), loss=nn.functional.cross_entropy, **(defaults | fields))
    return float(guard.guard.trace(workload).peak_live_bytes)


class Placed(Net):
    """Says when it is moved to a device."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append("moved")
        return super().to(*args, **kwargs)


def test_callback_prunes_before_moving_to_device() -> None:
    study = study_of(make_guard(), [LARGE], Placed)
    assert states(study) == [PRUNED]
    assert record_of(study.trials[0]).reason.startswith("needs at least 5.")
    assert Net.seen == ["meta"]


def test_callback_judges_once_measures_and_learns() -> None:
    guard = make_guard()
    study = study_of(guard, [SMALL, LARGE, SMALL], Scored, accumulate_grad_batches=2, max_epochs=3)
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]
    assert [(record.in_words, record.status) for record in guard.log.records()] == [
        ("launched", "ok"),
        ("pruned", None),
        ("launched", "ok"),
    ]
    assert record_of(study.trials[0]).predicted["time"].median == pytest.approx(6 * 0.01)
    observations = guard.guard.predictor.learnt  # type: ignore[attr-defined]
    assert [observation.measurement.num_steps for observation in observations] == [6, 6]


@pytest.mark.parametrize(
    ("precision", "ours"), [("32-true", "fp32"), ("bf16-mixed", "amp-bf16"), ("bf16-true", "bf16"), ("16-true", "fp16")]
)
def test_the_trainers_precision_is_judged(precision: str, ours: str) -> None:
    guard = make_guard()

    def objective(trial: optuna.Trial) -> float:
        make_trainer(PerfGuardCallback(guard, trial), precision=precision, max_steps=0).fit(Net(SMALL), make_loader())
        return 0.0

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    assert predicted_bytes(study) == by_hand(guard, precision=ours)


def test_accumulation_is_judged() -> None:
    guard = make_guard()
    predicted = predicted_bytes(study_of(guard, [SMALL], accumulate_grad_batches=4, max_steps=0))
    assert predicted == by_hand(guard, accumulation=4)
    assert by_hand(guard, accumulation=4) > by_hand(guard)


class Configured(Net):
    """``configure_optimizers`` in one of the forms that Lightning takes."""

    form = "optimizer"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(self.trainer.estimated_stepping_batches))
        forms = {
            "optimizer": optimizer,
            "list": [optimizer],
            "lists": ([optimizer], [{"scheduler": scheduler, "interval": "step"}]),
            "dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}},
            "dicts": [{"optimizer": optimizer}],
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["optimizer", "list", "lists", "dict", "dicts"])
def test_every_form_of_configure_optimizers_is_judged(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Configured, "form", form)
    guard = make_guard()
    predicted = predicted_bytes(study_of(guard, [SMALL], Configured, limit_train_batches=1))
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # which the schedule cycles
    assert predicted == by_hand(guard, optimizer=momentum) < by_hand(guard)


def test_callback_keeps_training_bitwise_the_same() -> None:
    def train(*callbacks: pl.Callback) -> dict[str, torch.Tensor]:
        pl.seed_everything(0, verbose=False)
        module = Scored(SMALL)
        make_trainer(*callbacks, max_epochs=2).fit(module, make_loader())
        return module.state_dict()

    plain = train()
    guarded = train(PerfGuardCallback(make_guard(), optuna.create_study().ask()))
    assert Net.seen.count("meta") == 1
    assert all(torch.equal(plain[name], guarded[name]) for name in plain)


def attribute_names(module: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(child)) for name, child in module.named_modules()}


def test_the_trace_leaves_nothing_in_the_module() -> None:
    def fitted(*callbacks: pl.Callback) -> Scored:
        module = Scored(SMALL)
        make_trainer(*callbacks, max_steps=0).fit(module, make_loader())
        return module

    guarded = fitted(PerfGuardCallback(make_guard(), optuna.create_study().ask()))
    assert Net.seen == ["meta"]
    assert attribute_names(guarded) == attribute_names(fitted())
    assert not guarded.trainer.callback_metrics
    assert not guarded.accuracy.update_called


class Sketch(Scored):
    def configure_model(self) -> None:
        self.to_empty(device="cpu")


def test_a_module_on_the_meta_device_is_put_back() -> None:
    def fitted(*callbacks: pl.Callback) -> Sketch:
        with torch.device("meta"):
            module = Sketch(SMALL)
        make_trainer(*callbacks, max_steps=0).fit(module, make_loader())
        return module

    guarded = fitted(PerfGuardCallback(make_guard(), optuna.create_study().ask()))
    assert set(Net.seen) == {"meta"}
    assert attribute_names(guarded) == attribute_names(fitted())


def test_a_compiled_module_is_judged_as_it_was_written() -> None:
    guard = make_guard(step_time_budget="1ms")  # which no trial holds, so that nothing need be compiled
    compiled: Any = lambda width: torch.compile(Net(width), backend="eager")  # noqa: E731
    study = study_of(guard, [SMALL], compiled)
    assert states(study) == [PRUNED]
    assert predicted_bytes(study) == by_hand(guard)
    assert Net.seen == ["meta"]


class Seen(pl.Callback):
    """Keeps the workload of the trainer."""

    workload: Workload

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.workload = workload_of(trainer, pl_module)


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("compiled", [functools.partial(torch.compile, backend="eager"), in_place])
def test_a_compiled_module_is_seen_as_such(compiled: Callable[..., Any]) -> None:
    seen = Seen()
    make_trainer(seen, max_steps=0).fit(compiled(Net(SMALL)), make_loader())
    assert seen.workload.compiled
    assert trace(seen.workload).options == ("compiled",)


def test_compiled_layers_of_a_module_are_named() -> None:
    module, seen = Scored(SMALL), Seen()
    in_place(module.layer)
    make_trainer(seen, max_steps=0).fit(module, make_loader())
    assert not seen.workload.compiled
    assert trace(seen.workload).unmodelled == ("torch.compile: compiled parts are predicted as eager: module.layer",)


class MadeLater(Net):
    """Makes its layer in the hook called ``hook``."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.layer


class MadeInConfigureModel(MadeLater):
    def configure_model(self) -> None:
        self.layer = nn.Linear(64, self.width)


class MadeInSetup(MadeLater):
    def setup(self, stage: str) -> None:
        self.layer, self.data = nn.Linear(64, self.width), Samples()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=BATCH)


@pytest.mark.parametrize("make", [MadeInConfigureModel, MadeInSetup])
def test_lazy_module_is_judged_once_configured(make: type[MadeLater]) -> None:
    """A module that makes its layers in a hook is judged when they are there."""

    def objective(trial: optuna.Trial) -> float:
        module = make(trial.suggest_categorical("width", [LARGE]))
        loaders = None if make is MadeInSetup else make_loader()
        make_trainer(PerfGuardCallback(make_guard(), trial)).fit(module, loaders)
        return 0.0

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    assert states(study) == [PRUNED]
    assert set(Net.seen) == {"meta"}


def test_a_stream_needs_an_example_batch() -> None:
    guard = make_guard()
    stream = DataLoader(Stream(), batch_size=BATCH)
    with pytest.warns(UnguardedTrialWarning, match="Give `batch=`") as caught:
        study = study_of(guard, [LARGE, LARGE], loader=stream, max_steps=2)
    assert states(study) == [COMPLETE, COMPLETE]
    assert len([warning for warning in caught if warning.category is UnguardedTrialWarning]) == 1
    assert [decision.status for decision in guard.log.records()] == ["ok", "ok"]


def test_an_example_batch_may_be_described() -> None:
    batch = (TensorSpec((BATCH, 64)), TensorSpec((BATCH,), "int64"))
    stream = DataLoader(Stream(), batch_size=BATCH)
    study = study_of(make_guard(), [SMALL, LARGE], loader=stream, batch=batch, max_steps=2)
    assert states(study) == [COMPLETE, PRUNED]
    assert record_of(study.trials[0]).predicted["time"].median == pytest.approx(0.02)


class Manual(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


class Peeking(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.max_epochs
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "words"), [(Manual, "with manual optimization"), (Peeking, r"Peeking is not attached to a `Trainer`")]
)
def test_unjudgeable_module_launches_with_one_warning(make: type[Net], words: str) -> None:
    guard = make_guard()
    with pytest.warns(UnguardedTrialWarning, match=words) as caught:
        study = study_of(guard, [LARGE, LARGE], make, max_steps=2)
    assert states(study) == [COMPLETE, COMPLETE]
    assert len([warning for warning in caught if warning.category is UnguardedTrialWarning]) == 1
    assert [decision.status for decision in guard.log.records()] == ["ok", "ok"]


class Crashing(Net):
    """Runs out of memory where real data come in."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].device.type != "meta":
            raise self.error
        return super().training_step(batch, batch_idx)


def test_oom_prunes_the_trial_and_the_study_goes_on() -> None:
    guard = make_guard()
    study = study_of(guard, [SMALL, SMALL], Crashing)
    assert states(study) == [PRUNED, PRUNED]
    assert [record_of(trial).status for trial in study.trials] == ["oom", "oom"]
    assert all(trial.constraints["perfguard:memory"] > 0 for trial in study.trials)


def test_another_error_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crashing, "error", ValueError("a mistake of the user"))
    guard = make_guard()
    with pytest.raises(ValueError, match="a mistake of the user"):
        study_of(guard, [SMALL], Crashing)
    assert [decision.status for decision in guard.log.records()] == ["failed"]


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.03)
        return super().training_step(batch, batch_idx)


def test_pace_over_time_budget_prunes_trial() -> None:
    guard = make_guard(time_budget="1s")
    study = study_of(guard, [SMALL], Slow, max_steps=90, max_epochs=-1)  # predicted: 0.9 s; in fact 2.7 s
    assert states(study) == [PRUNED]
    assert "the budget is 1.00 s" in study.trials[0].user_attrs["perfguard:stopped"]
    assert record_of(study.trials[0]).status == "ok"
    assert 2 < len(Net.seen) < 60


def test_inner_pruner_prunes_on_reported_metric() -> None:
    """A metric that is reported prunes as it does without the guard."""
    guard = make_guard()

    def objective(trial: optuna.Trial) -> float:
        class Report(pl.Callback):
            def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                trial.report(float(trial.number), trainer.current_epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned("worse than the others")

        trainer = make_trainer(PerfGuardCallback(guard, trial), Report(), max_epochs=2)
        trainer.fit(Net(SMALL), make_loader())
        return float(trial.number)

    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0))
    study.optimize(objective, n_trials=2)
    assert states(study) == [COMPLETE, PRUNED]
    assert [decision.status for decision in guard.log.records()] == ["ok", "ok"]


def test_callback_does_not_judge_a_guarded_trial_again() -> None:
    guard = make_guard(build=lambda params: Workload(nn.Linear(64, params["width"]), inputs=(BATCH, 64), loss=torch.mean))

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", [SMALL])
        make_trainer(PerfGuardCallback(guard, trial)).fit(Net(width), make_loader())
        return 0.0

    study = perfguard_optuna.create_study()
    study.optimize(objective, n_trials=1, pruner=PerfGuardPruner(guard=guard))
    assert [(record.in_words, record.status) for record in guard.log.records()] == [("launched", "ok")]
    assert "meta" not in Net.seen


def test_validation_alone_is_not_judged() -> None:
    class Validated(Net):
        def validation_step(self, batch: Any) -> None:
            self.log("val_loss", self.layer(batch[0]).mean())

    guard = make_guard()
    trainer = make_trainer(PerfGuardCallback(guard, optuna.create_study().ask()))
    trainer.validate(Validated(LARGE), DataLoader(Samples(), batch_size=BATCH), verbose=False)
    assert not guard.log.records()


@pytest.mark.parametrize(
    ("guard", "trial", "words"),
    [
        (make_guard(on_violation="repair"), None, "cannot be repaired"),
        (make_guard(), 3, "trial must be what Optuna hands to the objective, but got 3"),
        ("a100", None, "guard must be a perfguard_optuna.OptunaGuard, but got 'a100'"),
    ],
)
def test_a_wrong_argument_is_named(guard: Any, trial: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PerfGuardCallback(guard, optuna.create_study().ask() if trial is None else trial)

"""PerfGuard in Hugging Face's own Trainer, on the CPU, judged for an A100."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from perfguard import TensorSpec, Workload, trace
from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning, WorkloadError
from perfguard_optuna import OptunaGuard, record_of
from perfguard_optuna.transformers import PerfGuardCallback, guard_search, workload_of
from tests.doubles import BARE_A100, ReplayPredictor

pytestmark = pytest.mark.usefixtures("pretended_gpu")

SMALL, LARGE = 8, 1024
"""Widths that need about 40 KiB and 17 MiB."""
BATCH, LENGTH = 4, 16
COMPLETE, PRUNED = TrialState.COMPLETE, TrialState.PRUNED
SPECS = {"input_ids": TensorSpec((BATCH, LENGTH), "int64"), "labels": TensorSpec((BATCH,), "int64")}


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((LENGTH,), index), "labels": torch.tensor(index % 2)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Sentences()[index] for index in range(len(Sentences())))


class Net(nn.Module):
    """Returns its loss, as models of Transformers do; ``delay_s`` is what a step on real data takes, and ``error`` its end."""

    delay_s = 0.0
    error: Exception | None = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4 * BATCH, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if not input_ids.is_meta:
            time.sleep(self.delay_s)
            if self.error is not None:
                raise self.error
        logits = self.head(self.hidden(self.embedding(input_ids)).mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def bert(width: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=4 * BATCH,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return BertForSequenceClassification(config)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def arguments(folder: str, **options: Any) -> TrainingArguments:
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    defaults: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": BATCH,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(folder, **(quiet | defaults | options))


def make_guard(**options: Any) -> OptunaGuard:
    settings: dict[str, Any] = {"memory_budget": "1MiB", "predictor": ReplayPredictor(), "log": False}
    return OptunaGuard(BARE_A100, **(settings | options))


def study_of(
    guard: OptunaGuard,
    args: TrainingArguments,
    widths: list[int],
    make: Any = Net,
    *,
    batch: Any = None,
    data: Any = None,
) -> optuna.Study:
    """A plain study that has trained ``widths``, in order."""

    def objective(trial: optuna.Trial) -> float:
        model = make(trial.suggest_int("width", SMALL, LARGE))
        with PerfGuardCallback(guard, trial, batch=batch) as callback:
            Trainer(model, args, train_dataset=Sentences() if data is None else data, callbacks=[callback]).train()
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


def by_hand(guard: OptunaGuard, model: nn.Module, **fields: Any) -> float:
    """Bytes at the peak, without the Trainer, by the optimizer that Transformers takes by default."""
    fused = functools.partial(torch.optim.AdamW, fused=True)
    defaults: dict[str, Any] = {"optimizer": fused, "zero_grad": "after-step", "retain": "nothing"}
    return float(guard.guard.trace(Workload(model, inputs=SPECS, **(defaults | fields))).peak_live_bytes)


def test_callback_prunes_or_measures_and_learns(folder: str) -> None:
    guard = make_guard()
    args = arguments(folder, max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=2)
    study = study_of(guard, args, [SMALL, LARGE, SMALL])
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]
    assert [(record.in_words, record.status) for record in guard.log.records()] == [
        ("launched", "ok"),
        ("pruned", None),
        ("launched", "ok"),
    ]
    assert record_of(study.trials[0]).predicted["time"].median == pytest.approx(6 * 0.01)
    observations = guard.guard.predictor.learnt  # type: ignore[attr-defined]
    assert [observation.measurement.num_steps for observation in observations] == [6, 6]
    assert predicted_bytes(study) == by_hand(guard, Net(SMALL), accumulation=2)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"bf16": True}, {"precision": "amp-bf16"}),
        ({"optim": "sgd"}, {"optimizer": torch.optim.SGD}),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, {"compiled": True}),
    ],
)
def test_the_trainers_arguments_are_judged(folder: str, options: dict[str, Any], fields: dict[str, Any]) -> None:
    guard = make_guard(step_time_budget="1ms")  # which no trial holds, so that none need be trained
    study = study_of(guard, arguments(folder, **options), [SMALL], bert)
    assert states(study) == [PRUNED]
    assert predicted_bytes(study) == pytest.approx(by_hand(guard, bert(SMALL), **fields), rel=0.02)
    assert predicted_bytes(study) == pytest.approx(
        guard_bytes(guard, workload_of(arguments(folder, **options), bert(SMALL), SPECS)), rel=0.02
    )


def guard_bytes(guard: OptunaGuard, workload: Workload) -> float:
    return float(guard.guard.trace(workload).peak_live_bytes)


def test_checkpointed_activations_are_judged(folder: str) -> None:
    guard = make_guard(memory_budget="1GiB")
    specs = {"input_ids": TensorSpec((64, LENGTH), "int64"), "labels": TensorSpec((64,), "int64")}
    plain = guard_bytes(guard, workload_of(arguments(folder), bert(64), specs))
    checkpointed = guard_bytes(guard, workload_of(arguments(folder, activation_checkpointing=True), bert(64), specs))
    assert checkpointed < 0.8 * plain


def test_trial_is_judged_before_the_trainer_is_made(folder: str) -> None:
    guard = make_guard()
    made: list[Trainer] = []

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", SMALL, LARGE)
        with torch.device("meta"):
            sketch = bert(width)
        args = arguments(folder)
        with guard.trial(trial, workload_of(args, sketch, SPECS)):
            trainer = Trainer(bert(width), args, train_dataset=Sentences())
            made.append(trainer)
            trainer.train()
        return 0.0

    study = optuna.create_study()
    for width in (LARGE, SMALL):
        study.enqueue_trial({"width": width})
    study.optimize(objective, n_trials=2)
    assert states(study) == [PRUNED, COMPLETE]
    assert len(made) == 1
    (observation,) = guard.guard.predictor.learnt  # type: ignore[attr-defined]
    assert observation.measurement.num_steps == 2
    assert record_of(study.trials[1]).predicted["time"].median == pytest.approx(0.02)


def test_compiled_model_is_seen_as_such(folder: str) -> None:
    """Whether the trainer compiles it or the user."""
    args = arguments(folder)
    by_trainer = arguments(folder, torch_compile=True, torch_compile_backend="eager")
    assert not workload_of(args, bert(SMALL), SPECS).compiled
    compiled: Any = torch.compile(bert(SMALL), backend="eager")
    seen = [workload_of(by_trainer, bert(SMALL), SPECS), workload_of(args, compiled, SPECS)]
    assert [trace(workload).options for workload in seen] == [("compiled",)] * 2
    assert trace(seen[0]).content_hash == trace(seen[1]).content_hash


def test_callback_keeps_training_bitwise_the_same(folder: str) -> None:
    def train(*callbacks: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Net(SMALL)
        Trainer(model, arguments(folder), train_dataset=Sentences(), callbacks=list(callbacks)).train()
        return model.state_dict()

    guard = make_guard()
    plain, guarded = train(), train(PerfGuardCallback(guard, optuna.create_study().ask()))
    assert all(torch.equal(plain[name], guarded[name]) for name in plain)
    assert [decision.status for decision in guard.log.records()] == ["ok"]  # without the block


def test_oom_prunes_the_trial(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "error", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    study = study_of(make_guard(), arguments(folder), [SMALL, SMALL])
    assert states(study) == [PRUNED, PRUNED]
    assert [record_of(trial).status for trial in study.trials] == ["oom", "oom"]


def test_another_error_is_the_users(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "error", ValueError("a mistake of the user"))
    guard = make_guard()
    with pytest.raises(ValueError, match="a mistake of the user"):
        study_of(guard, arguments(folder), [SMALL])
    assert [decision.status for decision in guard.log.records()] == ["failed"]


def test_pace_over_time_budget_prunes_trial(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "delay_s", 0.03)
    study = study_of(make_guard(time_budget="1s"), arguments(folder, max_steps=90), [SMALL])  # predicted: 0.9 s
    assert states(study) == [PRUNED]
    assert "the budget is 1.00 s" in study.trials[0].user_attrs["perfguard:stopped"]
    assert record_of(study.trials[0]).status == "ok"


def test_a_stream_needs_an_example_batch(folder: str) -> None:
    with pytest.warns(UnguardedTrialWarning, match="Give `batch=`") as caught:
        unguarded = study_of(make_guard(), arguments(folder), [LARGE, LARGE], data=Stream())
    assert states(unguarded) == [COMPLETE, COMPLETE]
    assert len([warning for warning in caught if warning.category is UnguardedTrialWarning]) == 1
    assert states(study_of(make_guard(), arguments(folder), [LARGE], data=Stream(), batch=SPECS)) == [PRUNED]


def test_auto_find_batch_size_is_left_to_the_trainer(folder: str) -> None:
    with pytest.warns(UnguardedTrialWarning, match="with auto_find_batch_size"):
        study = study_of(make_guard(), arguments(folder, auto_find_batch_size=True), [LARGE])
    assert states(study) == [COMPLETE]


def test_custom_optimizer_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer makes it in a way of its own, which the guard cannot judge."""
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda *_: (object, {})))
    with pytest.raises(WorkloadError, match="is not a plain optimizer class"):
        workload_of(arguments(folder), Net(SMALL), SPECS)


def search(trainer: Trainer, num_trials: int) -> optuna.Study:
    """The study of ``trainer.hyperparameter_search``, which keeps it to itself."""
    storage = optuna.storages.InMemoryStorage()
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        backend="optuna",
        n_trials=num_trials,
        storage=storage,
        study_name="search",
        sampler=optuna.samplers.GridSampler({"width": [SMALL, LARGE], "learning_rate": [1e-3]}, seed=0),
    )
    return optuna.load_study(study_name="search", storage=storage)


def searching_trainer(folder: str) -> Trainer:
    def model_init(trial: optuna.Trial | None) -> Any:
        return Net(SMALL if trial is None else trial.suggest_categorical("width", [SMALL, LARGE]))

    return Trainer(args=arguments(folder), model_init=model_init, train_dataset=Sentences(), eval_dataset=Sentences())


def test_a_hyperparameter_search_is_guarded(folder: str) -> None:
    guard, trainer = make_guard(), searching_trainer(folder)
    num_callbacks = len(trainer.callback_handler.callbacks)
    guard_search(trainer, guard)
    study = search(trainer, 2)
    assert {trial.params["width"]: trial.state for trial in study.trials} == {SMALL: COMPLETE, LARGE: PRUNED}
    assert sorted(record.in_words for record in guard.log.records()) == ["launched", "pruned"]
    assert len(guard.guard.predictor.learnt) == 1  # type: ignore[attr-defined]
    assert len(trainer.callback_handler.callbacks) == num_callbacks


def test_search_goes_on_after_oom(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = searching_trainer(folder)
    guard_search(trainer, make_guard(memory_budget="1GiB"))
    forward = Net.forward

    @functools.wraps(forward)  # the trainer looks at the signature
    def crashing(model: Net, *inputs: Any, **named: Any) -> Any:
        if model.hidden.out_features == LARGE and not named["input_ids"].is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, *inputs, **named)

    monkeypatch.setattr(Net, "forward", crashing)
    study = search(trainer, 2)
    assert {trial.params["width"]: trial.state for trial in study.trials} == {SMALL: COMPLETE, LARGE: PRUNED}
    assert {record_of(trial).status for trial in study.trials} == {"ok", "oom"}


def test_a_guard_that_repairs_is_refused(folder: str) -> None:
    guard = make_guard(on_violation="repair")
    with pytest.raises(ConfigurationError, match="cannot be repaired"):
        PerfGuardCallback(guard, optuna.create_study().ask())
    with pytest.raises(ConfigurationError, match="cannot repair a trial"):
        guard_search(searching_trainer(folder), guard)

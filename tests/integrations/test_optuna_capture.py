"""Any ordinary objective runs guarded as it stands: scripts as in optuna-examples, trainers, models and trials of all kinds."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfguard_optuna
from perfguard import Device, resolve_device
from perfguard.capture.first_forward import FirstForward
from perfguard.exceptions import CaptureError, DriftWarning, UnguardedTrialError, UnguardedTrialWarning
from perfguard.guard_time import GuardClock
from perfguard.log import MeasurementStore
from perfguard.verdict import ALIKE
from perfguard.workload import CapturedTrial
from perfguard_optuna import PerfGuardPruner, PerfGuardSampler, record_of, repair_of, summarize
from perfguard_optuna.capture import ObjectiveBuild, leave_study

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its objectives really train where there is a GPU"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::perfguard.exceptions.MeasurementWarning"),
]
Objective = Callable[[optuna.Trial], Any]
A100, CPU = resolve_device("a100"), resolve_device("cpu")


def study_of(directions: Sequence[Any] = ("minimize",)) -> optuna.Study:
    return optuna.create_study(directions=directions, sampler=optuna.samplers.RandomSampler(seed=0))


def captured(objective: Objective, device: Device = A100, directions: Sequence[Any] = ("minimize",)) -> CapturedTrial:
    """What the objective would run on ``device``. Nothing is run."""
    study = study_of(directions)
    build = ObjectiveBuild(objective, device, study.directions)
    try:
        return build.ask(study.ask())
    finally:
        build.close()


def run_guarded(objective: Objective, directions: Sequence[Any] = ("minimize",), **settings: Any) -> list[FrozenTrial]:
    study = study_of(directions)
    study.optimize(perfguard_optuna.guarded(objective, gpu="cpu", log=False, **settings), n_trials=2)
    return study.trials


def assert_judged(trials: Sequence[FrozenTrial]) -> None:
    """Each trial has run, after a verdict with a prediction."""
    for trial in trials:
        verdict = record_of(trial).verdict
        assert verdict is not None
        assert (trial.state, verdict.action, verdict.unjudged) == (TrialState.COMPLETE, "launch", "")
        assert verdict.predicted["memory"].median > 0


def test_a_trial_without_a_study_runs_the_objective_as_it_is() -> None:
    def objective(trial: optuna.Trial) -> float:
        return trial.suggest_float("x", 0, 1) * repair_of(trial).accumulation

    guarded, study = perfguard_optuna.guarded(objective, gpu="cpu", log=False), study_of()
    assert guarded(optuna.trial.FixedTrial({"x": 0.5})) == 0.5
    study.add_trial(optuna.create_trial(params={"x": 0.5}, distributions={"x": FloatDistribution(0, 1)}, value=0.5))
    assert guarded(study.best_trial) == 0.5


# --- Scripts as in optuna-examples ----------------------------------------------------------------------------------------------

SCRIPTS: dict[str, tuple[str, int, int]] = {  # what it needs, steps of an epoch and of a trial
    "pytorch_simple": ("torch", 30, 90),
    "pytorch_checkpoint": ("torch", 10, 30),
    "pytorch_lightning_simple": ("lightning", 45, 135),
    "pytorch_ignite_simple": ("ignite", 20, 60),
    "skorch_simple": ("skorch", 13, 39),
    "transformers_simple": ("transformers", 20, 40),
    "multi_objective_pytorch_simple": ("torch", 10, 30),
}
TRAINERS = [name for name, (needed, _, _) in SCRIPTS.items() if needed != "torch"]


def script(name: str) -> ModuleType:
    needed = SCRIPTS[name][0]
    for package in {needed, *(("optuna_integration",) if needed in ("lightning", "ignite", "skorch") else ())}:
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "objectives" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def directions_of(name: str) -> Sequence[Any]:
    return ("minimize", "maximize") if name.startswith("multi") else ("maximize",)


parametrized = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in TRAINERS else ()) for name in SCRIPTS]
)


@parametrized
@pytest.mark.filterwarnings("ignore")
def test_script_of_a_plain_study_runs_guarded_as_it_stands(name: str) -> None:
    assert_judged(run_guarded(script(name).objective, directions_of(name)))


@parametrized
@pytest.mark.filterwarnings("ignore")
def test_script_shows_its_whole_trial_to_a_machine_without_the_gpu(name: str) -> None:
    found = captured(script(name).objective, A100, directions_of(name))
    assert found.unseen == ""
    assert (found.steps_per_epoch, found.steps) == SCRIPTS[name][1:]
    assert found.graph.peak_live_bytes > 100_000
    evaluates_in_epochs = not name.startswith("multi")  # its only evaluation comes after the last epoch
    assert ("the evaluation" in found.phases) == evaluates_in_epochs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["pytorch_lightning_simple", "transformers_simple"])
def test_script_shows_the_same_from_its_first_forward_pass_on(name: str) -> None:
    """Trainers have counted their steps by then, and made a tensor or two of a few bytes."""
    objective, found = script(name).objective, list[Any]()
    whole, trial = captured(objective, CPU, directions_of(name)), study_of(directions_of(name)).ask()
    with FirstForward(CPU, found.append, lambda: leave_study(trial), problem=CaptureError("why")):
        objective(trial)
    (seen,) = found
    assert [op.name for op in seen.graph.ops] == [op.name for op in whole.graph.ops]
    assert seen.graph.peak_live_bytes == pytest.approx(whole.graph.peak_live_bytes, abs=100)
    assert (seen.steps_per_epoch, seen.steps, seen.unseen) == (*SCRIPTS[name][1:], "")
    assert seen.phases.keys() == whole.phases.keys() == {"the evaluation"}


# --- Trainers -------------------------------------------------------------------------------------------------------------------


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 500, (32,))
        return {"input_ids": tokens, "labels": tokens}


def small_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=500, intermediate_size=128, **sizes))


def train_text(model: nn.Module, batch_size: int, folder: Path, **arguments: Any) -> None:
    from transformers import Trainer, TrainingArguments

    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 2}
    on_cpu = not torch.cuda.is_available()
    options = TrainingArguments(str(folder), per_device_train_batch_size=batch_size, use_cpu=on_cpu, **quiet, **arguments)
    Trainer(model=model, args=options, train_dataset=Texts()).train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer_with_accumulation_checkpointing_and_bf16(tmp_path: Path) -> None:
    def objective(trial: optuna.Trial) -> float:
        size = trial.suggest_categorical("batch_size", [4, 8])
        options = {"gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True}
        train_text(small_llama(), size, tmp_path, **options)
        return 0.0

    found = captured(objective)
    assert (found.graph.precision, found.unseen) == ("amp-bf16", "")
    assert found.steps == 2 * found.steps_per_epoch  # type: ignore[operator]
    assert found.steps_per_epoch in (4, 8)
    assert_judged(run_guarded(objective))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_runs_guarded(mixed_precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def objective(trial: optuna.Trial) -> float:
        accelerator = accelerate.Accelerator(mixed_precision=mixed_precision)
        model = make_network(trial.suggest_int("width", 8, 64))
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), make_loader(10))
        for _epoch in range(2):
            for images, labels in loader:
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
        return 0.0

    found = captured(objective)
    assert (found.steps_per_epoch, found.steps, found.unseen) == (10, 20, "")
    assert found.graph.precision == ("fp32" if mixed_precision == "no" else "amp-bf16")
    assert_judged(run_guarded(objective))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_pretrained_model_is_read_from_its_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small_llama().save_pretrained(tmp_path / "model")

    def objective(trial: optuna.Trial) -> float:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        train_text(model, trial.suggest_categorical("batch_size", [4, 8]), tmp_path)
        return 0.0

    def from_nothing(trial: optuna.Trial) -> float:
        train_text(small_llama(), trial.suggest_categorical("batch_size", [4, 8]), tmp_path)
        return 0.0

    assert captured(objective).graph.peak_live_bytes == captured(from_nothing).graph.peak_live_bytes
    assert_judged(run_guarded(objective))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_with_accumulation_validation_and_mixed_precision() -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.network = make_network(width)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def objective(trial: optuna.Trial) -> float:
        off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(max_epochs=3, accumulate_grad_batches=2, precision="bf16-mixed", **off)
        trainer.fit(Module(trial.suggest_int("width", 8, 64)), make_loader(10), make_loader(3))
        return float(trainer.callback_metrics["val_loss"])

    found = captured(objective)
    assert (found.steps_per_epoch, found.steps, found.unseen) == (5, 15, "")
    assert found.graph.precision == "amp-bf16"
    assert found.phases.get("the evaluation") is not None
    assert_judged(run_guarded(objective))


# --- Objectives of all kinds ----------------------------------------------------------------------------------------------------


def make_network(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def make_loader(num_batches: int, batch_size: int = 4) -> DataLoader[Any]:
    number = num_batches * batch_size
    return DataLoader(TensorDataset(torch.randn(number, 3, 16, 16), torch.randint(0, 10, (number,))), batch_size)


def train(model: nn.Module, loader: DataLoader[Any], epochs: int = 2) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
    return float(loss.detach())


def plain(trial: optuna.Trial) -> float:
    return train(make_network(trial.suggest_int("width", 8, 64)), make_loader(5))


class Tuned:
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def __call__(self, trial: optuna.Trial) -> float:
        return train(make_network(trial.suggest_int("width", 8, 64)), make_loader(5), self.epochs)


@perfguard_optuna.guarded(gpu="cpu", log=False)  # type: ignore[untyped-decorator]
def decorated(trial: optuna.Trial) -> float:
    """Keeps its docstring."""
    return plain(trial)


OUTSIDE, OUTSIDE_LOADER = make_network(16), make_loader(5)


def with_a_model_from_outside(trial: optuna.Trial) -> float:
    trial.suggest_float("lr", 1e-4, 1e-2, log=True)
    return train(OUTSIDE, OUTSIDE_LOADER)


def with_a_conditional_space(trial: optuna.Trial) -> float:
    if trial.suggest_categorical("kind", ["wide", "deep"]) == "wide":
        return train(make_network(trial.suggest_int("width", 32, 64)), make_loader(5))
    layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(trial.suggest_int("depth", 1, 3))]
    return train(nn.Sequential(*layers, make_network(8)), make_loader(5))


KINDS: dict[str, Objective] = {
    "function": plain,
    "lambda": lambda trial: train(make_network(trial.suggest_int("width", 8, 64)), make_loader(5)),
    "object": Tuned(epochs=2),
    "partial": functools.partial(lambda epochs, trial: Tuned(epochs)(trial), 2),
    "model_from_outside": with_a_model_from_outside,
    "conditional_space": with_a_conditional_space,
}


@pytest.mark.parametrize("kind", KINDS)
def test_objective_of_any_kind_runs_guarded(kind: str) -> None:
    found = captured(KINDS[kind])
    assert (found.steps_per_epoch, found.steps, found.unseen) == (5, 10, "")
    assert_judged(run_guarded(KINDS[kind]))


def test_guarded_is_a_decorator() -> None:
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Keeps its docstring.")
    study = study_of()
    study.optimize(decorated, n_trials=2)
    assert_judged(study.trials)


# --- Verdicts -------------------------------------------------------------------------------------------------------------------


def test_tensor_that_fits_into_no_memory_is_pruned_and_never_made() -> None:
    widths, launched = (2**62, 10 * 2**40 // 3072), []  # more bytes than PyTorch counts, and 10 TiB

    def objective(trial: optuna.Trial) -> float:
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, trial.suggest_categorical("width", widths)))
        launched.append(trial.number)
        return train(model, make_loader(5))

    study = study_of()
    for width in widths:
        study.enqueue_trial({"width": width})
    study.optimize(perfguard_optuna.guarded(objective, gpu="cpu", log=False), n_trials=2)
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED] * 2
    assert launched == []
    assert [record_of(trial).verdict.action for trial in study.trials] == ["prune"] * 2  # type: ignore[union-attr]


def test_sampler_captures_a_proposal_before_it_is_a_trial() -> None:
    """After the first trial, what does not fit is recorded by the sampler, and each launched trial fits."""
    widths: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", [8, 2**24])
        model = make_network(width)
        widths.append(width)
        return train(model, make_loader(5))

    pruner = PerfGuardPruner(gpu="a100", log=False)
    sampler = PerfGuardSampler(optuna.samplers.RandomSampler(seed=1), pruner)
    study = perfguard_optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=5, pruner=pruner)
    assert widths == [8] * 5
    proposed = [trial for trial in study.trials if "perfguard:proposed_for" in trial.user_attrs]
    assert proposed
    assert {trial.params["width"] for trial in proposed} == {2**24}


def test_objective_that_describes_itself_is_judged_by_its_own_description() -> None:
    pruner = PerfGuardPruner(gpu="cpu", log=False)

    def objective(trial: optuna.Trial) -> float:
        model = make_network(trial.suggest_int("width", 8, 64))
        with pruner.trial(trial, model, (4, 3, 16, 16), loss=torch.mean, optimizer=torch.optim.AdamW):
            return train(model, make_loader(5))

    study = perfguard_optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=2, pruner=pruner)
    assert_judged(study.trials)
    with pytest.raises(CaptureError, match="describes its step by itself"):
        captured(objective)


def test_objective_that_shows_no_step_runs_unguarded_with_its_cause() -> None:
    def without_a_step(trial: optuna.Trial) -> float:
        return float(trial.suggest_int("width", 8, 64))

    with pytest.warns(UnguardedTrialWarning, match="no step of a torch optimizer"):
        trials = run_guarded(without_a_step)
    assert all(trial.state is TrialState.COMPLETE for trial in trials)
    assert all("no step" in record_of(trial).verdict.unjudged for trial in trials)  # type: ignore[union-attr]
    with pytest.raises(UnguardedTrialError, match="no step of a torch optimizer"):
        run_guarded(without_a_step, strict=True)


def needs_values_to_begin(trial: optuna.Trial) -> float:
    """Reads in its set-up what a model has computed, which is 0 in a dry run."""
    scale = 1 / (nn.Linear(4, 4)(torch.ones(4)).abs().sum().item() > 1e-6)
    loss = train(make_network(trial.suggest_categorical("width", [8, 4000])), make_loader(5))
    trial.report(scale * loss, trial.number)
    return loss


@pytest.mark.parametrize("strict", [False, True])
def test_trial_whose_set_up_needs_values_is_judged_where_its_training_begins(strict: bool) -> None:
    study = study_of()
    for width in (4000, 8):
        study.enqueue_trial({"width": width})
    guarded = perfguard_optuna.guarded(needs_values_to_begin, gpu="cpu", log=False, memory_budget="20MiB", strict=strict)
    study.optimize(guarded, n_trials=2)
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED, TrialState.COMPLETE]
    for trial in study.trials:
        verdict = record_of(trial).verdict
        assert verdict is not None
        assert verdict.source == "captured at the first forward pass"
        assert verdict.predicted["time"].median > verdict.predicted["step_time"].median
    assert [len(trial.intermediate_values) for trial in study.trials] == [0, 1]
    assert record_of(study.trials[1]).measured.keys() >= {"memory", "step_time"}
    assert "captured at the first forward pass 2" in str(summarize(study))


def test_trial_that_ends_before_its_training_begins_says_so() -> None:
    def objective(trial: optuna.Trial) -> float:
        trial.suggest_categorical("width", [8])
        raise optuna.TrialPruned if trial.number else RuntimeError("no data")

    study = study_of()
    study.optimize(perfguard_optuna.guarded(objective, gpu="cpu", log=False), n_trials=2, catch=(RuntimeError,))
    verdicts = [record_of(trial).verdict for trial in study.trials]
    assert [verdict and verdict.unjudged for verdict in verdicts] == [
        "it failed or was interrupted before PerfGuard could judge it.", "it pruned itself before PerfGuard could judge it."
    ]  # fmt: skip


def test_trial_out_of_memory_without_a_verdict_says_why_it_had_none() -> None:
    """Such a trial is what the guard is for, so the cause must not be lost."""

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_categorical("width", [8])
        raise MemoryError("can't allocate memory")

    with pytest.warns(UnguardedTrialWarning, match="with MemoryError: can't allocate memory"):
        trials = run_guarded(objective)
    assert [trial.state for trial in trials] == [TrialState.PRUNED, TrialState.PRUNED]
    assert all("with MemoryError" in record_of(trial).verdict.unjudged for trial in trials)  # type: ignore[union-attr]


# --- Steps that a dry run does not see ------------------------------------------------------------------------------------------


def dies_in_its_dry_run(trial: optuna.Trial) -> float:
    """Where losses are 0, it fails after its first epoch: the steps of an epoch are seen, and those of the trial are not."""
    loader = DataLoader(torch.randn(64, 512), trial.suggest_categorical("batch_size", [8, 16]))  # type: ignore[arg-type,var-annotated]
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(trial.suggest_int("epochs", 1, 10**9)):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
        trial.report(1 / (loss.item() > 1e-6), epoch)
        if trial.suggest_categorical("pruned", [False, True]) and epoch == 1:
            raise optuna.TrialPruned
    return 0.0


def run_enqueued(objective: Objective, trials: Sequence[dict[str, Any]], **settings: Any) -> list[Any]:
    study = study_of()
    for params in trials:
        study.enqueue_trial(params)
    study.optimize(perfguard_optuna.guarded(objective, gpu="cpu", log=False, **settings), n_trials=len(trials))
    return [record_of(trial) for trial in study.trials]


def test_time_budget_of_an_endless_loader_follows_from_the_trials_that_finish() -> None:
    """The first trial is not checked. One of a thousand times the work is never launched after it."""

    def objective(trial: optuna.Trial) -> float:
        size = trial.suggest_categorical("batch_size", [8, 8192])
        loader = DataLoader(torch.randn(8192, 512), size)  # type: ignore[arg-type,var-annotated]
        batches = (batch for _ in itertools.count() for batch in loader)
        model = nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, 41):
            optimizer.zero_grad()
            loss = model(next(batches)).square().mean()
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                trial.report(1 / (loss.item() > 1e-6), number)
        return 0.0

    with pytest.warns(UnguardedTrialWarning, match="time_budget needs the number of steps .*: ZeroDivisionError"):
        # 0.2 s more likely hold the budget than not, but from two trials that is far from sure.
        first, second, large = run_enqueued(objective, [{"batch_size": n} for n in (8, 8, 8192)], time_budget="1s", risk=0)
    assert "time" not in first.predicted
    assert second.verdict.action == "launch"
    assert second.predicted["time"].log_sigma > 0.4  # one trial says the steps up to a factor of two
    assert second.reason.endswith("steps: about 40, from 1 finished trial")
    assert large.is_pruned
    assert large.broken_limit == "time"
    assert "from 2 finished trials" in large.reason


def test_epochs_let_the_first_trial_be_checked() -> None:
    trials = [{"batch_size": 8, "epochs": epochs, "pruned": False} for epochs in (10**9, 2)]
    long, short = run_enqueued(dies_in_its_dry_run, trials, time_budget="1min", epochs="epochs")
    assert (long.is_pruned, long.broken_limit) == (True, "time")
    assert short.verdict.action == "launch"
    assert short.predicted["time"].median / short.predicted["epoch_time"].median == pytest.approx(2.0, rel=0.5)


def test_trial_that_a_pruner_has_stopped_does_not_say_how_long_others_are() -> None:
    trials = [{"batch_size": 8, "epochs": 4, "pruned": pruned} for pruned in (True, False, False)]
    with pytest.warns(UnguardedTrialWarning, match="They follow from epochs=..., or from the first trial that finishes"):
        stopped, first, second = run_enqueued(dies_in_its_dry_run, trials, time_budget="1h")
    assert "time" not in stopped.predicted
    assert "time" not in first.predicted
    assert second.reason.endswith("steps: about 32, from 1 finished trial")


def test_misspelt_name_of_the_epochs_is_corrected() -> None:
    trials = [{"batch_size": 8, "epochs": 2, "pruned": False}] * 2
    with (
        pytest.warns(UnguardedTrialWarning, match=r"reads 'epoch' \(did you mean 'epochs'\?\)"),
        pytest.warns(UnguardedTrialWarning, match="time_budget needs the number of steps"),
    ):
        run_enqueued(dies_in_its_dry_run, trials, time_budget="1h", epochs="epoch")


# --- The real step beside the dry run -------------------------------------------------------------------------------------------


def deeper_for_real(trial: optuna.Trial) -> float:
    """Twice the layers where something is computed."""
    width = trial.suggest_categorical("width", [64])
    depth = 4 if nn.Linear(1, 1).weight.is_meta else 8
    model = nn.Sequential(nn.Linear(20, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in DataLoader(TensorDataset(torch.randn(640, 20), torch.randint(0, 3, (640,))), 32):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_trial_that_runs_another_step_than_its_dry_run_warns_once_and_is_learnt_as_it_is() -> None:
    torch._dynamo.utils.counters.clear()  # another test of this process may have compiled something
    store, study = MeasurementStore(":memory:"), study_of()
    objective = perfguard_optuna.guarded(deeper_for_real, gpu="cpu", log=store)
    with pytest.warns(DriftWarning, match=r"runs 19 matrix products \(11 in the dry run\)") as warned:
        study.optimize(objective, n_trials=3)
    assert sum(issubclass(warning.category, DriftWarning) for warning in warned) == 1
    captured_graph = captured(deeper_for_real, CPU).graph
    observations = store.observations(CPU)
    assert len(observations) == 3
    assert {run.graph.flops for run in observations} == {observations[0].graph.flops}
    assert observations[0].graph.flops > 1.5 * captured_graph.flops
    first, *later = store.records()
    assert first.verdict is not None
    assert "the real step differs" in first.verdict.remark
    # Equal trials are judged by the real step, so nothing of theirs is corrected.
    assert [record.verdict.remark for record in later] == ["", ""]  # type: ignore[union-attr]


class SlowSampler(optuna.samplers.RandomSampler):
    """A sampler that takes 100 s for each parameter, by a clock that is moved by hand."""

    now_s = 0.0

    def sample_independent(self, *arguments: Any) -> Any:
        SlowSampler.now_s += 100
        return super().sample_independent(*arguments)


def test_guard_time_has_dry_runs_and_not_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = ObjectiveBuild.capture

    def slowly(*arguments: Any) -> CapturedTrial:
        SlowSampler.now_s += 5
        return capture(*arguments)

    def objective(trial: optuna.Trial) -> float:
        model = nn.Linear(8, trial.suggest_int("width", 8, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.1, 0.2))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        return 0.0

    monkeypatch.setattr(ObjectiveBuild, "capture", slowly)
    study = optuna.create_study(sampler=SlowSampler(seed=0))
    guarded = perfguard_optuna.guarded(objective, gpu="cpu", log=False)
    guarded.guard.guard.clock = GuardClock(lambda: SlowSampler.now_s)
    study.optimize(guarded, n_trials=2)
    assert_judged(study.trials)
    assert SlowSampler.now_s == 2 * (200 + 2 * 5), "a verdict asks for what was captured"
    assert [record_of(trial).guard_s for trial in study.trials] == [10.0, 10.0]


@pytest.mark.parametrize("varies", [False, True])
def test_costly_guard_makes_no_dry_run_of_a_trial_alike(varies: bool) -> None:
    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", 8, 600)
        rate = trial.suggest_float("momentum" if varies and width % 2 else "rate", 0.1, 0.2)
        model = nn.Linear(8, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        return 0.0

    study = study_of()
    for width in (100, 101, 110, 400, 410):
        study.enqueue_trial({"width": width})
    guarded = perfguard_optuna.guarded(objective, gpu="cpu", log=False)
    study.optimize(guarded, n_trials=2)
    guarded.guard.guard._costly = {study.study_name}
    study.optimize(guarded, n_trials=3)
    assert_judged(study.trials)
    sources = [trial.user_attrs["perfguard:source"].partition(",")[0] for trial in study.trials]
    # Where a value decides what is asked, nobody knows it without a dry run.
    assert sources == ["captured", "captured", "captured" if varies else ALIKE, "captured", "captured" if varies else ALIKE]
    assert [trial.params["width"] for trial in study.trials] == [100, 101, 110, 400, 410]
    assert all(len(trial.params) == 2 for trial in study.trials)

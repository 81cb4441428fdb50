"""PerfGuardCallback for Lightning: ``Trainer(callbacks=[PerfGuardCallback(guard, trial)])``."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import why_not_imported

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":
        raise
    try:
        import pytorch_lightning as pl  # type: ignore[no-redef]
        from pytorch_lightning.strategies import SingleDeviceStrategy  # type: ignore[assignment]
        from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
    except ImportError as older:
        needed = "perfguard_optuna.lightning needs Lightning: pip install 'perfguard[lightning]'."
        raise ImportError(why_not_imported(older, "pytorch_lightning", needed)) from older

import optuna
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from perfguard.exceptions import WorkloadError
from perfguard.pytorch import is_compiled, random_numbers_kept
from perfguard.workload import Precision, Workload
from perfguard_optuna._guard import OptunaGuard
from perfguard_optuna._training import GuardedTraining, first_batch

if TYPE_CHECKING:
    Optimizer = torch.optim.Optimizer

_ABSENT = object()
_PRECISIONS: dict[str, Precision] = {
    "32-true": "fp32",
    "16-mixed": "amp-fp16",
    "bf16-mixed": "amp-bf16",
    "16-true": "fp16",
    "bf16-true": "bf16",
}


class PerfGuardCallback(pl.Callback):
    """Judges a trial when ``trainer.fit`` begins, before the module is moved to the device, and measures it to its end.

    ``trainer.fit`` raises ``optuna.TrialPruned`` for a trial that would break a limit, whose pace will break its time budget, or
    that runs out of memory. The others train as they would without the callback.

        >>> guard = OptunaGuard("a100", memory_budget="38GiB")                                      # doctest: +SKIP
        >>> def objective(trial):                                                                   # doctest: +SKIP
        ...     trainer = Trainer(max_epochs=3, callbacks=[PerfGuardCallback(guard, trial)])
        ...     trainer.fit(Net(trial), make_loader(trial))
        ...     return trainer.callback_metrics["val_loss"].item()

    The guard judges ``training_step`` on one batch, with the optimizer, the precision and the accumulation of the trainer. The
    trace uses a copy on the meta device. There the module has no trainer, ``self.log`` does nothing, and a torchmetrics metric
    that needs values gives zero. A module that makes its layers in ``setup`` or ``configure_model`` is judged as soon as they
    are there. Its weights, but nothing else, are on the device then.

    Not judged, but launched with one warning: manual optimization, several optimizers, several devices, and sharding strategies.
    The time of validation is in no prediction.

    Args:
        guard: The guard of the study. Its ``on_violation`` is "prune" or "warn".
        trial: The trial that trains.
        batch: An example batch as from the train dataloader, of tensors or specifications. None: a batch of the first samples of
            its data set. Give one where samples vary in size, or where the data are a stream.

    Raises:
        ConfigurationError: for a guard that repairs.
    """

    def __init__(self, guard: OptunaGuard, trial: optuna.Trial, *, batch: Any = None) -> None:
        self._guard = guard
        self._training = GuardedTraining(guard, trial)
        self._batch = batch
        self._num_steps = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Judge; nothing is on the device yet."""
        if stage != "fit" or self._training.runs:
            return
        make_workload = functools.cache(lambda: workload_of(trainer, pl_module, self._batch))
        if _is_complete(pl_module) or self._can_be_traced(pl_module, make_workload):
            self._begin(trainer, make_workload)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge what was not complete before."""
        if not self._training.runs:
            self._begin(trainer, lambda: workload_of(trainer, pl_module, self._batch))

    def _begin(self, trainer: pl.Trainer, make_workload: Callable[[], Workload]) -> None:
        self._training.begin(make_workload)
        self._num_steps = trainer.global_step

    def _can_be_traced(self, pl_module: pl.LightningModule, make_workload: Callable[[], Workload]) -> bool:
        if _overrides(pl_module, "setup") and _overrides(pl_module, "train_dataloader"):
            return False  # the loader may need what setup makes, and the trainer calls it only once
        try:
            self._guard.trace(make_workload())
        except Exception:  # on_fit_start tries again, and says why it cannot
            return False
        return True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Mark a step, if the optimizer took one."""
        if trainer.global_step > self._num_steps:
            self._num_steps = trainer.global_step
            self._training.step()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write down what happened; where memory or time ran out, the trial is pruned."""
        try:
            self._training.end(exception)
        except optuna.TrialPruned:
            _tear_down(trainer)
            raise

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the measuring."""
        if stage == "fit":
            self._training.end()


def workload_of(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any = None) -> Workload:
    """The workload of one step of ``pl_module`` in ``trainer.fit``. The module is attached to the trainer.

    Raises:
        WorkloadError: where that is not one training step, on one device, of one optimizer.
    """
    if not pl_module.automatic_optimization:
        raise WorkloadError("with manual optimization, training_step is not a step. Use `with guard.trial(...)` around fit")
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise WorkloadError(f"{type(trainer.strategy).__name__} trains on more than one device, or keeps parts elsewhere")
    if trainer.precision not in _PRECISIONS:
        raise WorkloadError(f"precision {trainer.precision!r} is not known; known are {', '.join(_PRECISIONS)}")
    steps = trainer.estimated_stepping_batches  # loads the train dataloader, as fit would a little later
    trainer.fit_loop.setup_data()  # which the former leaves out where max_steps says all
    num_batches, accumulation = trainer.num_training_batches, trainer.accumulate_grad_batches
    return Workload(
        _TrainingStep(pl_module),
        inputs=(_transferred(pl_module, first_batch(trainer.train_dataloader)) if batch is None else batch,),
        optimizer=_optimizer_of(trainer, pl_module),
        precision=_PRECISIONS[trainer.precision],
        accumulation=accumulation,
        zero_grad="before-backward",
        retain="nothing",
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        compiled=_is_compiled(pl_module) or is_compiled(pl_module),  # a copy of it would not show it
        steps=_count(steps),
        steps_per_epoch=_count(num_batches / accumulation),
    )


def _transferred(pl_module: pl.LightningModule, batch: Any) -> Any:
    """The batch on the meta device, by the hooks that bring it to the real one: it may be of a type that only they know."""
    with random_numbers_kept():
        batch = pl_module.on_before_batch_transfer(batch, 0)
        return pl_module.transfer_batch_to_device(batch, torch.device("meta"), 0)


class _TrainingStep(nn.Module):
    """A LightningModule as a function from a batch to its loss."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = copy.copy(module)  # the same layers, and no trainer, in which a copy of all data would be made
        if _is_compiled(module):  # then the class has the methods as they were written
            for name in ("forward", "training_step", "_compiler_ctx"):
                vars(self.module).pop(name, None)

    def forward(self, batch: Any) -> Any:
        module = self.module
        with _on_its_own(module):
            batch = module.on_after_batch_transfer(batch, 0)  # augmentations that run on the device
            takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            return module.training_step(batch, 0) if takes_index else module.training_step(batch)


@contextmanager
def _on_its_own(root: nn.Module) -> Iterator[None]:
    """The module without its trainer, logging nothing. Usually it is a copy; one that is on meta already is put back."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in root.modules():
        state = vars(module)
        replaced: dict[str, Any] = {}
        if isinstance(module, pl.LightningModule):
            replaced = {"_trainer": None, "log": _nothing, "log_dict": _nothing, "print": _nothing}
        elif isinstance(module, (Metric, MetricCollection)):
            replaced = {name: _or_zero(module, name) for name in ("forward", "update", "compute")}
        if replaced:
            before.append((state, {name: state.get(name, _ABSENT) for name in replaced}))
            state.update(replaced)
    try:
        yield
    finally:
        for state, values in before:
            for name, value in values.items():
                if value is _ABSENT:
                    del state[name]
                else:
                    state[name] = value


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing. It replaces hooks with lasting effects."""


def _or_zero(metric: Metric | MetricCollection, name: str) -> Callable[..., Any]:
    """A metric's method, and zero where it needs values: most check their targets, which a trace does not have."""
    method = getattr(metric, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return method(*arguments, **keywords)
        except Exception:
            zero = torch.zeros((), device="meta")
            return dict.fromkeys(metric.keys(), zero) if isinstance(metric, MetricCollection) else zero

    return call


def _optimizer_of(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Optimizer:
    """The one optimizer; ``configure_optimizers`` is called once more where the trainer has not done so yet."""
    made = trainer.optimizers or _optimizers_in(pl_module.configure_optimizers())
    if len(made) != 1:
        raise WorkloadError(f"configure_optimizers returns {len(made) or 'no'} optimizers, but only one can be judged")
    return getattr(made[0], "optimizer", made[0])  # out of a LightningOptimizer


def _optimizers_in(configured: Any) -> list[Any]:
    """The optimizers among what ``configure_optimizers`` returned, in all the forms that Lightning takes."""
    if configured is None:
        return []
    if isinstance(configured, Mapping):
        return [configured["optimizer"]]
    if isinstance(configured, (tuple, list)):
        if len(configured) == 2 and isinstance(configured[0], list):  # optimizers and schedulers
            return list(configured[0])
        return [optimizer for item in configured for optimizer in _optimizers_in(item)]
    return [configured]


def _count(number: float) -> int | None:
    """Number of steps; None: unknown."""
    return math.ceil(number) if 0 < number < math.inf else None


def _is_complete(pl_module: pl.LightningModule) -> bool:
    """Whether the module has all its layers when the callbacks' ``setup`` is called: none of its hooks comes later."""
    return not _overrides(pl_module, "setup") and not _overrides(pl_module, "configure_model")


def _overrides(pl_module: pl.LightningModule, hook: str) -> bool:
    return getattr(type(pl_module), hook) is not getattr(pl.LightningModule, hook)


def _is_compiled(pl_module: pl.LightningModule) -> bool:
    """Whether ``fit`` was given ``torch.compile(pl_module)``. Only a private attribute shows it (Lightning 2.0 to 2.6)."""
    return getattr(pl_module, "_compiler_ctx", None) is not None


def _tear_down(trainer: pl.Trainer) -> None:
    """Tear down as the trainer does after ``on_exception`` (Lightning 2.0 to 2.6). An exception raised there skips it."""
    trainer._teardown()

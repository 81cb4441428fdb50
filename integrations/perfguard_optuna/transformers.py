"""PerfGuard for Hugging Face's Trainer: a callback, a workload from TrainingArguments, and ``hyperparameter_search``."""

from __future__ import annotations

import functools
import math
from types import TracebackType
from typing import Any

from perfguard.exceptions import why_not_imported

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import has_length
except ImportError as error:
    missing = "perfguard_optuna.transformers needs Transformers and Accelerate: pip install 'perfguard[transformers]'."
    raise ImportError(why_not_imported(error, "transformers", missing)) from error

import optuna
import torch
from torch import nn

from perfguard.exceptions import ConfigurationError, WorkloadError
from perfguard.workload import Precision, Workload
from perfguard_optuna._guard import OptunaGuard
from perfguard_optuna._training import GuardedTraining, first_batch


class PerfGuardCallback(TrainerCallback):
    """Judges a trial when ``trainer.train()`` begins, and measures it to its end.

        >>> guard = OptunaGuard("a100", memory_budget="38GiB")                                      # doctest: +SKIP
        >>> def objective(trial):                                                                   # doctest: +SKIP
        ...     with PerfGuardCallback(guard, trial) as callback:
        ...         trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        ...         trainer.train()
        ...     return trainer.evaluate()["eval_loss"]

    The trainer calls no callback on an error. So the ``with`` block turns an out-of-memory error into a pruned trial. Everything
    else works without the block.

    The first event that callbacks get comes when the weights, but nothing else, are on the device. To judge before that, use
    ``guard.trial(trial, workload_of(args, model, batch))``, see :func:`workload_of`.

    What is judged is the model's own loss on one batch, with the trainer's optimizer, precision, accumulation and checkpointing;
    a ``compute_loss`` of your own is not seen. Not judged, but launched with one warning: several devices, DeepSpeed, FSDP and
    ``auto_find_batch_size``. The time of evaluation is in no prediction.

    Args:
        guard: the guard of the study, ``on_violation`` "prune" or "warn".
        trial: the trial that trains.
        batch: an example batch, a dict of tensors or specifications of them. None: one is put together from the first samples of
            the training set; give one where they vary in length, or where the data are a stream.

    Raises:
        ConfigurationError: for a guard that repairs.
    """

    def __init__(self, guard: OptunaGuard, trial: optuna.Trial, *, batch: Any = None) -> None:
        self._training = GuardedTraining(guard, trial)
        self._batch = batch

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trainer: Any) -> None:
        """Judge.

        Raises:
            optuna.TrialPruned: if the trial would break a limit.
        """
        if self._training.runs:
            return

        def make_workload() -> Workload:
            loader = trainer["train_dataloader"]
            return workload_of(
                args,
                trainer["model"],
                first_batch(loader) if self._batch is None else self._batch,
                optimizer=_unwrapped(trainer["optimizer"]),
                steps=state.max_steps,
                batches_per_epoch=len(loader) if has_length(loader) else None,
            )

        self._training.begin(make_workload)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Mark a step.

        Raises:
            optuna.TrialPruned: if the trial will break its time budget at the pace that was measured.
        """
        self._training.step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the measuring."""
        self._training.end()

    def __enter__(self) -> PerfGuardCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._training.end(error)


def workload_of(
    args: TrainingArguments,
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Any = None,
    steps: int | None = None,
    batches_per_epoch: int | None = None,
) -> Workload:
    """The workload of one step of a Trainer with these arguments. The Trainer need not exist yet.

        >>> with torch.device("meta"):                                                              # doctest: +SKIP
        ...     sketch = AutoModelForSequenceClassification.from_config(config)
        >>> workload = workload_of(args, sketch, {"input_ids": TensorSpec((32, 512), "int64"),      # doctest: +SKIP
        ...                                       "labels": TensorSpec((32,), "int64")})
        >>> with guard.trial(trial, workload):  # nothing has reached the device                    # doctest: +SKIP
        ...     trainer = Trainer(model, args, train_dataset=data)
        ...     trainer.train()

    Args:
        args: the trainer's.
        model: the model, which returns its loss. On the meta device it costs nothing. Activation checkpointing is switched on if
            ``args`` have it, as in the trainer.
        batch: an example batch of ``args.per_device_train_batch_size`` samples. A dict of tensors or specifications of them.
        optimizer: the trainer's, where there is one. None: the one that ``args.optim`` names.
        steps: optimizer steps in all. None: as ``args`` say.
        batches_per_epoch: length of the train dataloader, where it has one.

    Raises:
        WorkloadError: where that is not one training step on one device.
    """
    _refuse_what_is_not_one_step(args)
    _checkpoint_activations(args, model)
    accumulation = args.gradient_accumulation_steps
    steps_per_epoch = None if batches_per_epoch is None else max(1, math.ceil(batches_per_epoch / accumulation))
    if steps is None:
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * (steps_per_epoch or 0))
    return Workload(
        model,
        inputs=dict(batch),
        optimizer=optimizer or _optimizer_of(args, model),
        precision=_precision_of(args),
        accumulation=accumulation,
        zero_grad="after-step",
        retain="nothing",
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        compiled=bool(args.torch_compile),
        steps=steps if steps > 0 else None,
        steps_per_epoch=steps_per_epoch,
    )


def guard_search(trainer: Trainer, guard: OptunaGuard, *, batch: Any = None) -> None:
    """Guard every trial of ``trainer.hyperparameter_search(backend="optuna")``.

        >>> guard_search(trainer, OptunaGuard("a100", memory_budget="38GiB"))                       # doctest: +SKIP
        >>> trainer.hyperparameter_search(backend="optuna", n_trials=20)                            # doctest: +SKIP

    The search hands its trial to ``trainer.train`` and to no callback. So this trainer's ``train`` is wrapped: each call with a
    trial runs inside a :class:`PerfGuardCallback`. Trials that do not fit, or that run out of memory, are PRUNED.

    Args:
        trainer: a trainer with a ``model_init``, which the search requires.
        guard: the guard of the search.
        batch: as for :class:`PerfGuardCallback`.

    Raises:
        ConfigurationError: for a guard that repairs.
    """
    if guard.on_violation == "repair":
        raise ConfigurationError("hyperparameter_search cannot repair a trial. Use on_violation='prune' or 'warn'.")
    train = trainer.train

    @functools.wraps(train)
    def guarded(resume_from_checkpoint: str | bool | None = None, trial: Any = None, **keywords: Any) -> Any:
        if not isinstance(trial, optuna.Trial):
            return train(resume_from_checkpoint, trial, **keywords)
        with PerfGuardCallback(guard, trial, batch=batch) as callback:
            trainer.add_callback(callback)
            try:
                return train(resume_from_checkpoint, trial, **keywords)
            finally:
                trainer.remove_callback(callback)

    trainer.train = guarded  # type: ignore[method-assign, assignment]


def _refuse_what_is_not_one_step(args: TrainingArguments) -> None:
    if args.world_size > 1 or args.n_gpu > 1:
        raise WorkloadError("the trainer uses several devices, but PerfGuard judges only one")
    if args.deepspeed or args.fsdp:
        raise WorkloadError("DeepSpeed and FSDP keep parts of the training outside the device")
    if args.auto_find_batch_size:
        raise WorkloadError("with auto_find_batch_size, the trainer chooses the batch size itself")


def _checkpoint_activations(args: TrainingArguments, model: nn.Module) -> None:
    """Turn on checkpointing as the trainer does. ``gradient_checkpointing`` is called ``activation_checkpointing`` in later
    Transformers 5."""
    wanted = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None)
    if not wanted or any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise WorkloadError(f"{type(model).__name__} has no switch for activation checkpointing")
    enable()


def _precision_of(args: TrainingArguments) -> Precision:
    if args.fp16:
        return "amp-fp16"
    return "amp-bf16" if args.bf16 else "fp32"


def _optimizer_of(args: TrainingArguments, model: nn.Module) -> Any:
    make, keywords = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)) or {"params", "model"} & set(keywords):
        raise WorkloadError(f"optim={str(args.optim)!r} is not a plain optimizer class; use PerfGuardCallback instead")
    return functools.partial(make, **keywords)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)

"""Trainers of libraries on the stage: how many steps they will make, and an evaluation after an epoch that was cut short.

What they would find out first (a learning rate, a batch size that fits) is not looked for. Their checkpoints can be read again.

Lightning 2.6 and Transformers' Trainer (5.24).
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from perfguard.graph.shape_rules import META
from perfguard.pytorch import objects_of

if TYPE_CHECKING:
    from perfguard.capture.loaders import Loaders
    from perfguard.graph.libraries import Replace


def follow_trainers(replace: Replace, loaders: Loaders) -> None:
    """Follow the trainers that are imported. Call it again where others may be by now."""
    callbacks = sys.modules.get("transformers.trainer_callback")
    flow = getattr(callbacks, "DefaultFlowCallback", None)
    if flow is not None and not hasattr(flow.on_epoch_end, "__wrapped__"):
        replace(flow, "on_epoch_end", _evaluating_once)
        replace(callbacks.CallbackHandler, "on_train_begin", lambda own: _saying_steps(own, loaders))  # type: ignore[union-attr]
    for loop in _of_lightning("pytorch.loops.fit_loop", "_FitLoop"):
        if not hasattr(loop.on_advance_end, "__wrapped__"):
            replace(loop, "on_advance_start", lambda own: _saying_steps_of_lightning(own, loaders))
            replace(loop, "on_advance_end", _validating)
    for name, make in (("_lr_find", _finding_no_rate), ("_scale_batch_size", _keeping_the_batch_size)):
        for finder in (*_of_lightning("pytorch.callbacks.lr_finder"), *_of_lightning("pytorch.callbacks.batch_size_finder")):
            if not hasattr(getattr(finder, name, None), "__wrapped__"):
                replace(finder, name, make)


def _of_lightning(module: str, name: str = "") -> list[Any]:
    """A module, or what has that ``name`` in it, of each package that is imported: there are two of each part."""
    part, _, path = module.partition(".")
    alone = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}[part]
    found = (sys.modules.get(f"{package}.{path}") for package in (f"lightning.{part}", alone))
    return [getattr(each, name) if name else each for each in found if hasattr(each, name or "__name__")]


def join_trainers(loaders: Loaders) -> None:
    """Let the trainers that run already state their steps."""
    # To look for them in the frames that run would keep what these hold.
    for trainer in objects_of(getattr(sys.modules.get("transformers.trainer"), "Trainer", ())):
        if trainer.is_in_train:
            _state_steps(trainer.callback_handler, trainer.state, loaders)
            trainer._tr_loss = trainer._tr_loss.to(META)  # it was made on the device
    for loop in objects_of(tuple(_of_lightning("pytorch.loops.fit_loop", "_FitLoop"))):
        if loop.trainer.training:
            _state_steps_of_lightning(loop.trainer, loaders)


def _evaluating_once(own: Any) -> Any:
    """Evaluate once where a trainer counts steps, so that a stopping criterion, which sees zeros, stops no trial."""
    evaluated: list[bool] = []

    @functools.wraps(own)
    def on_epoch_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = own(self, args, state, control, **kwargs)
        if args.eval_strategy == "steps" and not evaluated:
            evaluated.append(True)
            control.should_evaluate = True
        return control

    return on_epoch_end


def _saying_steps(own: Any, loaders: Loaders) -> Any:
    @functools.wraps(own)
    def on_train_begin(self: Any, args: Any, state: Any, control: Any) -> Any:
        _state_steps(self, state, loaders)
        return own(self, args, state, control)

    return on_train_begin


def _state_steps(handler: Any, state: Any, loaders: Loaders) -> None:
    early = sys.modules["transformers.trainer_callback"].EarlyStoppingCallback
    stops_early = any(isinstance(callback, early) for callback in handler.callbacks)
    loaders.state_steps(state, None if stops_early else state.max_steps)


def _state_steps_of_lightning(trainer: Any, loaders: Loaders) -> None:
    if trainer.lightning_module.automatic_optimization:
        loaders.state_steps(trainer, None if trainer.early_stopping_callbacks else trainer.estimated_stepping_batches)


def _saying_steps_of_lightning(own: Any, loaders: Loaders) -> Any:
    @functools.wraps(own)
    def on_advance_start(self: Any) -> None:
        _state_steps_of_lightning(self.trainer, loaders)
        own(self)

    return on_advance_start


def _finding_no_rate(own: Any) -> Any:
    """A rate changes no step, and the losses that would tell it are 0."""

    @functools.wraps(own)
    def _lr_find(*_: Any, min_lr: float, max_lr: float, **__: Any) -> Any:
        rates = [min_lr * (max_lr / min_lr) ** (number / 19) for number in range(20)]
        found = sys.modules[own.__module__]._LRFinder("exponential", min_lr, max_lr, len(rates))
        found.results = {"lr": rates, "loss": [0.0] * len(rates)}
        return found

    return _lr_find


def _keeping_the_batch_size(own: Any) -> Any:
    """Which batches fit is found out on the device. The model keeps its own."""

    @functools.wraps(own)
    def _scale_batch_size(*_: Any, **__: Any) -> None: ...

    return _scale_batch_size


def _validating(own: Any) -> Any:
    """Validate after an epoch that was cut short. The loop of its batches counts them to know when."""

    @functools.wraps(own)
    def on_advance_end(self: Any) -> None:
        trainer = self.trainer
        epoch = self.epoch_loop
        if epoch.batch_idx + 1 < trainer.num_training_batches and epoch._should_check_val_epoch():
            trainer.validating = True
            epoch.val_loop.run()
            trainer.training = True
        own(self)

    return on_advance_end

"""Trainers of libraries on the stage: how many steps they will make, and an evaluation after an epoch that was cut short.

Lightning 2.6 and Transformers' Trainer (5.24).
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfguard.capture.loaders import Loaders
    from perfguard.graph.libraries import Replace


def follow_trainers(replace: Replace, loaders: Loaders) -> None:
    """Follow the trainers that are imported. Call it again where others may be by now."""
    callbacks = sys.modules.get("transformers.trainer_callback")
    flow = getattr(callbacks, "DefaultFlowCallback", None)
    if flow is not None and not hasattr(flow.on_epoch_end, "__wrapped__"):
        replace(flow, "on_epoch_end", _evaluating_once)
        replace(callbacks.CallbackHandler, "on_train_begin", lambda own: _saying_steps(own, callbacks, loaders))  # type: ignore[union-attr]
    for package in ("lightning.pytorch", "pytorch_lightning"):
        loops = sys.modules.get(f"{package}.loops.training_epoch_loop")
        loop = getattr(loops, "_TrainingEpochLoop", None)
        if loop is not None and not hasattr(loop.run, "__wrapped__"):
            replace(loop, "run", lambda own: _running_validation(own, loaders))


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


def _saying_steps(own: Any, callbacks: Any, loaders: Loaders) -> Any:
    @functools.wraps(own)
    def on_train_begin(self: Any, args: Any, state: Any, control: Any) -> Any:
        stops_early = any(isinstance(callback, callbacks.EarlyStoppingCallback) for callback in self.callbacks)
        loaders.state_steps(None if stops_early else state.max_steps)
        return own(self, args, state, control)

    return on_train_begin


def _running_validation(own: Any, loaders: Loaders) -> Any:
    """Validate after an epoch that was cut short. The loop counts batches to know when."""
    followed: list[Any] = []

    @functools.wraps(own)
    def run(self: Any, fetcher: Any) -> None:
        trainer = self.trainer
        if trainer not in followed:
            followed.append(trainer)
            if trainer.lightning_module.automatic_optimization:
                loaders.state_steps(None if trainer.early_stopping_callbacks else trainer.estimated_stepping_batches)
        own(self, fetcher)
        if self.batch_idx + 1 < trainer.num_training_batches and self._should_check_val_epoch():
            trainer.validating = True
            self.val_loop.run()
            trainer.training = True

    return run

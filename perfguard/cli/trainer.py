"""Scripts of Hugging Face's Trainer and TRL: other ways to run them, as `perfguard plan` tries them, that learn the same.

The script stays as it is. In the dry run, the first TrainingArguments that it makes asks the command for changes:

    the script     TrainingArguments(per_device_train_batch_size=8, ...)
    the dry run    Setup(micro_batch=8, accumulation=1, ...)         what the script has asked for
    the command    Setup(micro_batch=2, accumulation=4, ...)         what it gets, and its samples are the same
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

_ACCUMULATIONS = (1, 2, 4, 8, 16)
"""Micro-batches of a step that are tried. Each is dry-run, so more would take long."""
_MODULE = "transformers.training_args"


class Setup(NamedTuple):
    """How a Trainer runs a step."""

    micro_batch: int
    """Samples of one forward and backward pass on one GPU."""
    accumulation: int
    """Passes of an optimizer step."""
    checkpointing: bool
    optimizer: str
    """As TrainingArguments name it."""
    sharding: bool
    """Whether it is FSDP2 or another sharding of the script's own. Without, several GPUs run DDP."""

    def __str__(self) -> str:
        rounded = f"{self.optimizer} (rounds its states)"
        words = {"checkpointing": self.checkpointing, "sharded": self.sharding, rounded: "8bit" in rounded}
        return ", ".join([f"micro-batch {self.micro_batch} x {self.accumulation}", *(word for word in words if words[word])])

    def arguments(self, before: Setup) -> dict[str, Any]:
        """Return what to give to TrainingArguments in the place of ``before``."""
        pairs = zip(("per_device_train_batch_size", "gradient_accumulation_steps"), before, self, strict=False)
        changed: dict[str, Any] = {name: new for name, old, new in pairs if new != old}
        if self.checkpointing != before.checkpointing:
            changed["gradient_checkpointing"] = self.checkpointing
        if self.optimizer != before.optimizer:
            changed["optim"] = self.optimizer
        if self.sharding != before.sharding:
            changed |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
        return changed


def setups(before: Setup, *, samples: int, world_size: int, allows_8bit: bool) -> Iterator[Setup]:
    """Yield each way to learn from ``samples`` on each GPU in a step. Only ``allows_8bit`` changes the optimizer's rounding."""
    passes = sorted(number for number in {*_ACCUMULATIONS, before.accumulation} if samples % number == 0)
    can_shard = world_size > 1 and not before.sharding
    can_shrink = allows_8bit and before.optimizer.startswith("adamw_torch")
    shardings = [before.sharding] + [True] * can_shard
    optimizers = [before.optimizer] + ["adamw_8bit"] * can_shrink
    for number, checkpointing, optimizer, sharding in itertools.product(passes, [False, True], optimizers, shardings):
        yield Setup(samples // number, number, checkpointing, optimizer, sharding)


def ask_for_setup(ask: Callable[[Setup], Setup]) -> None:
    """Let TrainingArguments ask from their import on. Nothing is imported here: a script may set variables before it does."""
    if _MODULE in sys.modules:
        _let_ask(sys.modules[_MODULE], ask)
        return

    def find(name: str, *_: object) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(finder)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        own = loader.exec_module

        def exec_module(module: object) -> None:
            own(module)
            _let_ask(module, ask)

        loader.exec_module = exec_module
        return spec

    finder: Any = types.SimpleNamespace(find_spec=find)
    sys.meta_path.insert(0, finder)


def _let_ask(module: Any, ask: Callable[[Setup], Setup]) -> None:
    arguments = module.TrainingArguments
    own = arguments.__post_init__  # those of TRL have an __init__ of their own, and call this one
    answers: dict[Setup, Setup] = {}

    def __post_init__(self: object) -> None:
        before = _setup_of(self)
        if not answers:  # arguments that differ from the first are those of another model
            answers[before] = ask(before)
        for name, value in answers.get(before, before).arguments(before).items():
            for known in (name, name.replace("gradient_checkpointing", "activation_checkpointing")):  # since transformers 5.23
                if hasattr(self, known):
                    setattr(self, known, value)
        own(self)

    arguments.__post_init__ = __post_init__


def _setup_of(arguments: Any) -> Setup:
    checkpointing = getattr(arguments, "activation_checkpointing", None)
    return Setup(
        arguments.per_device_train_batch_size,
        arguments.gradient_accumulation_steps,
        bool(arguments.gradient_checkpointing if checkpointing is None else checkpointing),
        str(getattr(arguments.optim, "value", arguments.optim)),
        bool(arguments.fsdp or arguments.deepspeed),
    )

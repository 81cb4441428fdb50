"""Recipe: one configuration, as JSON, from which its workload can be made again anywhere."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from perfguard.exceptions import TableError
from perfguard.workload import Layout, Mode, Precision, TensorSpec, Tf32, Workload
from perfguard_research.tables.networks import KINDS, Sizes, cross_entropy, make_network, mean_of

Space = Literal["vision", "text", "mlp", "rnn", "nas", "ops"]
SPACES: tuple[Space, ...] = get_args(Space)

OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=1e-4),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One configuration.

    Example:
        >>> sizes = {"inputs": 8, "width": 16, "depth": 1, "norm": False, "dropout": False, "activation": "relu", "classes": 3}
        >>> recipe = Recipe(space="mlp", kind="mlp", model="mlp-1", family="mlp", sizes=sizes, batch_size=4)
        >>> Recipe.from_json(recipe.to_json()) == recipe
        True
    """

    space: Space
    kind: str
    """Kind of network, one of `perfguard_research.collect.KINDS`."""
    model: str
    """A name for people."""
    family: str
    """Rows of one family are held out together; see `MeasuredRow`."""
    sizes: Sizes = field(hash=False)
    """Sizes of the network."""
    batch_size: int
    mode: Mode = "train"
    precision: Precision = "fp32"
    tf32: Tf32 = "default"
    layout: Layout = "nchw"
    optimizer: str | None = "sgd-momentum"
    """One of OPTIMIZERS; None for inference."""
    cudnn_benchmark: bool = False
    checkpointing: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        _check(self.kind in KINDS, "kind", self.kind, ", ".join(KINDS))
        for name, literal in (("space", Space), ("mode", Mode), ("precision", Precision), ("tf32", Tf32), ("layout", Layout)):
            _check(getattr(self, name) in get_args(literal), name, getattr(self, name), ", ".join(get_args(literal)))
        allowed = OPTIMIZERS if self.mode == "train" else (None,)
        _check(self.optimizer in allowed, "optimizer", self.optimizer, ", ".join(map(str, allowed)))
        _check(type(self.batch_size) is int and self.batch_size > 0, "batch_size", self.batch_size, "a positive integer")
        _check(isinstance(self.sizes, dict), "sizes", self.sizes, "an object")

    def to_json(self) -> str:
        """The recipe as JSON on one line, fields in a fixed order."""
        return json.dumps({item.name: getattr(self, item.name) for item in dataclasses.fields(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that :meth:`to_json` wrote.

        Raises:
            TableError: if it is none.
        """
        try:
            found = json.loads(text)
            return cls(**found)
        except (ValueError, TypeError) as error:
            raise TableError(f"column 'recipe' must be a configuration as `perfguard collect` writes it: {error}") from error

    @property
    def structure(self) -> str:
        """Key that recipes share if only their batches differ."""
        return dataclasses.replace(self, batch_size=1).to_json()

    @property
    def num_indices(self) -> int:
        """Integers of the batch and of the targets lie below."""
        return KINDS[self.kind].num_indices(self.sizes)

    def make_model(self) -> nn.Module:
        """The network, on the current default device.

        Raises:
            WorkloadError: if it cannot be made.
        """
        return make_network(self.kind, self.sizes, checkpointing=self.checkpointing)

    def workload(self, model: nn.Module) -> Workload:
        """The workload of ``model``."""
        kind, train = KINDS[self.kind], self.mode == "train"
        inputs = kind.inputs(self.sizes, self.batch_size)
        if train and kind.task == "own loss":
            inputs = {**inputs, "labels": inputs["input_ids"]}
        classify = train and kind.task == "classify"
        return Workload(
            model,
            inputs=inputs,
            targets=TensorSpec((self.batch_size,), "int64") if classify else None,
            loss=cross_entropy if classify else mean_of if train and kind.task == "mean" else None,
            optimizer=OPTIMIZERS[cast(str, self.optimizer)] if train else None,
            mode=self.mode,
            precision=self.precision,
            tf32=self.tf32,
            layout=self.layout,
            cudnn_benchmark=self.cudnn_benchmark,
            retain="nothing",
            batch_on="device",
            compiled=self.compiled,
        )


def _check(right: bool, name: str, value: object, allowed: str) -> None:
    if not right:
        raise TableError(f"column 'recipe': {name} must be {allowed}, but is {value!r}")

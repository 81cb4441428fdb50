"""The networks of recipes: each kind is made from a few sizes, which a row of a table can hold as JSON."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfguard.exceptions import WorkloadError
from perfguard.workload import TensorSpec
from perfguard_research.tables.zoo import timm_model

Sizes = Mapping[str, Any]
Task = Literal["classify", "own loss", "mean"]
"""Training objective: cross-entropy of classes, the loss that the model returns, or the mean of all outputs."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
EDGES = ("none", "skip", "conv1x1", "conv3x3", "pool")
"""Operations on an edge of a cell (NAS-Bench-201, Dong and Yang 2020)."""
ARCHITECTURES = {
    "bert": "BertForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
}
"""Classes of Transformers by type of model."""
_NODES = 4
NUM_EDGES = _NODES * (_NODES - 1) // 2


class Checkpointed(nn.Module):
    """``body``, whose activations are not kept but computed again in the backward pass."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


class ConvBlock(nn.Module):
    """Convolution, norm, activation; plain, with a residual connection, or depthwise and then pointwise."""

    def __init__(self, inputs: int, outputs: int, stride: int, sizes: Sizes) -> None:
        super().__init__()
        kernel, depthwise = sizes["kernel"], sizes["style"] == "depthwise"
        norms: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": functools.partial(nn.GroupNorm, 2)}
        middle = inputs if depthwise else outputs
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, middle, kernel, stride, kernel // 2, groups=inputs if depthwise else 1, bias=False)
        ]
        layers += [nn.Conv2d(middle, outputs, 1)] if depthwise else []
        layers += [norms[sizes["norm"]](outputs)] if sizes["norm"] in norms else []
        self.body = nn.Sequential(*layers, ACTIVATIONS[sizes["activation"]]())
        self.is_residual = sizes["style"] == "residual" and inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.is_residual else y


class Cell(nn.Module):
    """Four nodes, each the sum of its edges from all nodes before it."""

    def __init__(self, width: int, edges: Sequence[str]) -> None:
        super().__init__()
        self.edges = nn.ModuleList(_edge(name, width) for name in edges)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nodes = [x]
        edges = iter(self.edges)
        for _ in range(1, _NODES):
            nodes.append(torch.stack([next(edges)(node) for node in nodes]).sum(0))
        return nodes[-1]


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def _edge(name: str, width: int) -> nn.Module:
    if name == "none":
        return _Nothing()
    if name == "skip":
        return nn.Identity()
    if name == "pool":
        return nn.AvgPool2d(3, 1, 1)
    kernel = {"conv1x1": 1, "conv3x3": 3}[name]
    return nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(width))


class Recurrent(nn.Module):
    """A recurrent network over a sequence of vectors; its last output is classified."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[sizes["cell"]]
        both = sizes["bidirectional"]
        self.body = layer(sizes["inputs"], sizes["width"], sizes["depth"], batch_first=True, bidirectional=both)
        self.head = nn.Linear((2 if both else 1) * sizes["width"], sizes["classes"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x)[0][:, -1])
        return out


class Applied(nn.Module):
    """A function of the inputs, without parameters."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


class Kind(NamedTuple):
    """Builder and inputs of one kind of network, by its sizes."""

    make: Callable[[Sizes, bool], nn.Module]
    """(sizes, checkpointing) → the network."""
    inputs: Callable[[Sizes, int], Any]
    """(sizes, batch size) → one batch, as a Workload takes it."""
    task: Task = "classify"
    num_indices: Callable[[Sizes], int] = lambda sizes: int(sizes["classes"])
    """(sizes) → integers of the batch and of the targets lie below."""


def _blocks(blocks: Sequence[nn.Module], checkpointing: bool) -> list[nn.Module]:
    return [Checkpointed(block) for block in blocks] if checkpointing else list(blocks)


def _head(width: int, sizes: Sizes) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, sizes["classes"])]


def _cnn(sizes: Sizes, checkpointing: bool) -> nn.Module:
    width, blocks = sizes["width"], list[nn.Module]()
    for index in range(sizes["depth"]):
        stride = 2 if index in sizes["down"] else 1
        blocks.append(ConvBlock(width, width, stride, sizes))
    stem = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(stem, *_blocks(blocks, checkpointing), *_head(width, sizes))


def _cells(sizes: Sizes, checkpointing: bool) -> nn.Module:
    width, layers = sizes["width"], list[nn.Module]()
    for stage in range(3):
        if stage:
            layers += [nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width)]
            width *= 2
        layers += _blocks([Cell(width, sizes["edges"]) for _ in range(sizes["cells"])], checkpointing)
    return nn.Sequential(nn.Conv2d(3, sizes["width"], 3, padding=1), *layers, nn.ReLU(), *_head(width, sizes))


def _mlp(sizes: Sizes, checkpointing: bool) -> nn.Module:
    width, before, blocks = sizes["width"], sizes["inputs"], list[nn.Module]()
    for _ in range(sizes["depth"]):
        layers: list[nn.Module] = [nn.Linear(before, width)]
        layers += [nn.BatchNorm1d(width)] if sizes["norm"] else []
        layers += [ACTIVATIONS[sizes["activation"]]()]
        layers += [nn.Dropout(0.1)] if sizes["dropout"] else []
        blocks.append(nn.Sequential(*layers))
        before = width
    return nn.Sequential(*_blocks(blocks, checkpointing), nn.Linear(before, sizes["classes"]))


def _timm(sizes: Sizes, checkpointing: bool) -> nn.Module:
    if not re.fullmatch(r"[\w.]+", sizes["name"]):  # timm would fetch "hf-hub:..." from the network
        raise WorkloadError(f"{sizes['name']!r} is no architecture of timm's")
    model: Any = timm_model(sizes["name"], sizes["img_size"])
    if checkpointing:
        model.set_grad_checkpointing(True)
    made: nn.Module = model
    return made


def _torchvision(sizes: Sizes, checkpointing: bool) -> nn.Module:
    made: nn.Module = importlib.import_module("torchvision.models").get_model(sizes["name"], weights=None)
    return made


def _huggingface(sizes: Sizes, checkpointing: bool) -> nn.Module:
    transformers = importlib.import_module("transformers")
    if ARCHITECTURES.get(sizes["model_type"]) != sizes["architecture"]:  # a table must not name just any class
        raise WorkloadError(f"{sizes['architecture']!r} is not {sizes['model_type']}'s architecture here")
    config = transformers.AutoConfig.for_model(sizes["model_type"], **sizes["config"])
    config.use_cache = False
    model: Any = getattr(transformers, sizes["architecture"])(config)
    if checkpointing:
        enable_checkpointing(model)
    made: nn.Module = model
    return made


def enable_checkpointing(model: Any) -> None:
    """Turn on activation checkpointing in a model of any version of Transformers."""
    name = "activation_checkpointing_enable"  # older versions have only the other name
    getattr(model, name, model.gradient_checkpointing_enable)({"use_reentrant": False})


def _tokens(sizes: Sizes, batch_size: int) -> dict[str, TensorSpec]:
    """Token inputs. For training, the recipe adds the same tokens as labels."""
    tokens = TensorSpec((batch_size, sizes["seq_len"]), "int64")
    both = sizes["model_type"] in ("t5", "bart")
    return {"input_ids": tokens, **({"decoder_input_ids": tokens} if both else {})}


def _images(sizes: Sizes, batch_size: int) -> tuple[int, ...]:
    return batch_size, 3, sizes["img_size"], sizes["img_size"]


_OPERATORS: dict[str, Callable[[Sizes], nn.Module]] = {
    "linear": lambda s: nn.Linear(s["inputs"], s["outputs"]),
    "conv": lambda s: nn.Conv2d(s["inputs"], s["outputs"], s["kernel"], s["stride"], s["kernel"] // 2),
    "depthwise-conv": lambda s: nn.Conv2d(s["inputs"], s["inputs"], s["kernel"], s["stride"], s["kernel"] // 2, 1, s["inputs"]),
    "layer-norm": lambda s: nn.LayerNorm(s["inputs"]),
    "batch-norm": lambda s: nn.BatchNorm2d(s["inputs"]),
    "embedding": lambda s: nn.Embedding(s["vocabulary"], s["outputs"]),
    "bmm": lambda s: Applied(torch.bmm),
    "softmax": lambda s: nn.Softmax(-1),
    "gelu": lambda s: nn.GELU(),
    "add": lambda s: Applied(torch.add),
    "max-pool": lambda s: nn.MaxPool2d(s["kernel"], s["stride"], s["kernel"] // 2),
    "attention": lambda s: Applied(F.scaled_dot_product_attention),
}
TRAINABLE_OPERATORS = ("linear", "conv", "depthwise-conv", "layer-norm", "batch-norm", "embedding")
OPERATORS = tuple(_OPERATORS)


def _operator_inputs(sizes: Sizes, batch_size: int) -> Any:
    op = sizes["op"]
    if op in ("conv", "depthwise-conv", "batch-norm", "max-pool"):
        return batch_size, sizes["inputs"], sizes["img_size"], sizes["img_size"]
    if op == "embedding":
        return TensorSpec((batch_size, sizes["length"]), "int64")
    if op == "bmm":
        return [(batch_size, sizes["length"], sizes["inputs"]), (batch_size, sizes["inputs"], sizes["outputs"])]
    if op == "attention":
        return [(batch_size, sizes["heads"], sizes["length"], sizes["head_width"])] * 3
    matrix = (batch_size, sizes["length"], sizes["inputs"])
    return [matrix, matrix] if op == "add" else matrix


KINDS: dict[str, Kind] = {
    "timm": Kind(_timm, _images),
    "torchvision": Kind(_torchvision, _images),
    "cnn": Kind(_cnn, _images),
    "cells": Kind(_cells, _images),
    "mlp": Kind(_mlp, lambda sizes, batch_size: (batch_size, sizes["inputs"])),
    "recurrent": Kind(
        lambda sizes, _: Recurrent(sizes), lambda sizes, batch_size: (batch_size, sizes["length"], sizes["inputs"])
    ),
    "huggingface": Kind(_huggingface, _tokens, "own loss", lambda sizes: int(sizes["config"]["vocab_size"])),
    "operator": Kind(
        lambda sizes, _: _OPERATORS[sizes["op"]](sizes), _operator_inputs, "mean", lambda sizes: int(sizes.get("vocabulary", 2))
    ),
}


def make_network(kind: str, sizes: Sizes, *, checkpointing: bool) -> nn.Module:
    """The network, on the current default device (under ``torch.device("meta")`` it costs no memory).

    Raises:
        WorkloadError: if it cannot be made, for instance because its package is missing.
    """
    try:
        return KINDS[kind].make(sizes, checkpointing)
    except Exception as error:
        raise WorkloadError(f"The network {kind} {dict(sizes)!r} cannot be made: {type(error).__name__}: {error}") from error


def first_output(output: Any) -> torch.Tensor:
    """The first tensor of what a network returns (auxiliary heads, distillation)."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return output


def cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the first output."""
    return F.cross_entropy(first_output(output).flatten(1), target)


def mean_of(output: Any) -> torch.Tensor:
    """Mean of the first output, as a loss for operators."""
    return first_output(output).float().mean()

"""The networks of measured runs: each is made from its name, a configuration and an input, as a row of a table has them.

A name is ``PREFIX:NAME``. The prefix says who defines the network: torchvision, timm, hf (Transformers), diffusers, and a few
others. Networks of ``perfguard:`` are made of a few sizes; `perfguard collect` draws them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfguard.exceptions import TableError
from perfguard.workload import TensorSpec
from perfguard_research.language_models import BasicsTransformerLM

Config = Mapping[str, Any]


class Batch(NamedTuple):
    """Inputs of one step, and its loss (None: the model's own)."""

    inputs: Any
    targets: Any = None
    loss: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network, with all that decides how it is built.

    Example:
        >>> sizes = {"inputs": 8, "width": 16, "depth": 1, "norm": False, "dropout": False, "activation": "relu", "classes": 3}
        >>> network = Network(name="perfguard:mlp", config=sizes)
        >>> network.batch(4, train=False).inputs
        (4, 8)
    """

    name: str
    """Name with its prefix: "torchvision:resnet50"."""
    config: Config = field(default_factory=dict, hash=False)
    """Arguments of the model, or of its configuration."""
    input: Config = field(default_factory=dict, hash=False)
    """Sizes of a sample: "image", "seq_len", "target_len", "latent", "text_len". "labels": False if the loss has none."""
    family: str = ""
    checkpointing: bool = False
    before_torch2: bool = False
    """Whether attention is computed product by product, as before PyTorch 2 fused it."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What networks share if they are the same."""
        config, given = (json.dumps(value, sort_keys=True) for value in (self.config, self.input))
        return self.name, config, given, self.checkpointing, self.before_torch2

    @property
    def num_indices(self) -> int:
        """Integers of a batch and of its targets lie below."""
        sizes = self.config
        return int(sizes.get("vocab_size") or sizes.get("classes") or sizes.get("num_classes") or 1000)

    def make(self) -> nn.Module:
        """The network, on the current default device. On the meta device it takes no memory.

        Raises:
            TableError: if it cannot be built, with the reason.
        """
        kind = self._kind
        if self.checkpointing and not kind.checkpoints:
            raise TableError(f"Checkpointing of {self.name!r} is not modelled.")
        try:
            return kind.make(self)
        except TableError:
            raise
        except Exception as error:
            raise TableError(f"The model {self.name!r} cannot be made: {type(error).__name__}: {error}") from error

    def batch(self, batch_size: int, *, train: bool, optimizes: bool = True) -> Batch:
        """One batch.

        Args:
            batch_size: samples.
            train: whether there is a loss.
            optimizes: whether the step has an optimizer's; the course's language model has another loss without.

        Raises:
            TableError: if the input is not what such a model takes.
        """
        try:
            batch = self._kind.batch(self, batch_size, train)
        except KeyError as error:
            raise TableError(f"column 'input' must hold {error} for {self.name!r}, but is {dict(self.input)}") from error
        return Batch(batch.inputs, None, mean_of) if self.name.startswith("cs336:") and not optimizes else batch

    @property
    def bare_name(self) -> str:
        """The name without its prefix."""
        return self.name.partition(":")[2]

    @property
    def _kind(self) -> _Kind:
        prefix = self.name.partition(":")[0]
        key = self.name if prefix == "perfguard" else prefix
        if key not in _KINDS:
            raise TableError(f"The model {self.name!r} has no known prefix. Known are {', '.join(_KINDS)}.")
        return _KINDS[key]


class _Kind(NamedTuple):
    """How the networks of one prefix are built and fed."""

    make: Callable[[Network], nn.Module]
    batch: Callable[[Network, int, bool], Batch]
    """(network, batch size, whether it trains) → one batch."""
    checkpoints: bool = False
    """Whether activation checkpointing is modelled."""


# Losses


def first_output(output: Any) -> torch.Tensor:
    """The first tensor of what a network returns (auxiliary heads, distillation)."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return output


def cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the first output."""
    return F.cross_entropy(first_output(output).flatten(1), target)


def mean_of(output: Any) -> torch.Tensor:
    """Mean of the first output, where a network has no loss of its own."""
    return first_output(output).float().mean()


def _next_token_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.roll(-1, 1).flatten())


def _noise_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(first_output(output).float(), targets.float())


# Batches


def _classes(n: int, train: bool, inputs: Any) -> Batch:
    return Batch(inputs, TensorSpec((n,), "int64") if train else None, cross_entropy)


def _pixels(network: Network) -> tuple[int, int]:
    size = network.config.get("img_size") or network.input["image"]
    height, width = size if isinstance(size, list) else (size, size)
    return height, width


def _images(network: Network, n: int, train: bool) -> Batch:
    return _classes(n, train, (n, 3, *_pixels(network)))


def _tokens(network: Network, n: int, train: bool) -> Batch:
    tokens = TensorSpec((n, network.input["seq_len"]), "int64")
    return Batch(tokens, tokens if train else None, _next_token_loss)


_LABELS: dict[str, Callable[[int, int], dict[str, tuple[int, ...]]]] = {  # by what a class is for: (batch, length) → shapes
    "ForSequenceClassification|ForImageClassification": lambda n, _: {"labels": (n,)},
    "ForQuestionAnswering": lambda n, _: {"start_positions": (n,), "end_positions": (n,)},
    "BertForPreTraining": lambda n, length: {"labels": (n, length), "next_sentence_label": (n,)},
    "LMHeadModel|CausalLM|MaskedLM|ForConditionalGeneration|TokenClassification": lambda n, length: {"labels": (n, length)},
}


def _of_huggingface(network: Network, n: int, train: bool) -> Batch:
    """The model's own loss where its class has one, else the mean of its first output."""
    if "image" in network.input:
        length = 0
        inputs = dict[str, Any](pixel_values=TensorSpec((n, 3, *_pixels(network))))
    else:
        length = network.input.get("target_len", network.input["seq_len"])
        inputs = {"input_ids": TensorSpec((n, network.input["seq_len"]), "int64")}
        if "target_len" in network.input:
            inputs["decoder_input_ids"] = TensorSpec((n, length), "int64")
    name = "CausalLM" if "/" in network.bare_name else network.bare_name  # an id of the hub is a language model
    labels = next((shapes(n, length) for words, shapes in _LABELS.items() if re.search(words, name)), None)
    if not train or labels is None or network.input.get("labels") is False:
        return Batch(inputs, None, mean_of)
    return Batch(inputs | {key: TensorSpec(shape, "int64") for key, shape in labels.items()})


def _latents(network: Network, n: int, train: bool) -> Batch:
    """Noise predicted at one time step, under a text; images for an encoder, and latents for a decoder."""
    if network.bare_name.endswith(".encode"):
        return Batch((n, 3, *_pixels(network)))
    if network.bare_name.endswith(".decode"):
        return Batch((n, network.config["latent_channels"], network.input["latent"], network.input["latent"]))
    latent = network.input["latent"]
    channels = network.config.get("in_channels", 4)
    image = TensorSpec((n, channels, latent, latent))
    text = TensorSpec((n, network.input["text_len"], network.config.get("cross_attention_dim", 1280)))
    return Batch([image, TensorSpec((n,), "int64"), text], image if train else None, _noise_loss)


# Networks of libraries


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a torchvision that was built for another PyTorch raises a RuntimeError
        raise TableError(f"The model is from {package}, which is not installed: pip install {package} ({error}).") from error


def timm_model(name: str, size: int | None = None, *, fused_attention: bool = True, **options: Any) -> nn.Module:
    """The timm model ``name``, without weights, for square images of ``size`` pixels (None: its own), made with ``options``.

    Raises:
        TableError: if timm is missing, or does not know the model or the size.
    """
    timm = _library("timm", "timm")

    def create(name: str) -> nn.Module:
        if size is not None:
            try:
                return timm.create_model(name, img_size=size, **options)  # type: ignore[no-any-return]
            except TypeError:  # a convolutional network takes any size
                pass
        return timm.create_model(name, **options)  # type: ignore[no-any-return]

    timm.layers.set_fused_attn(fused_attention)
    try:
        return create(name)
    except Exception as error:
        retired = re.search(r"Invalid pretrained tag \(.*\) for ([\w.]+)\.", str(error))
        if retired:  # weights that timm no longer has, of an architecture that it still has
            return create(retired[1])
        raise TableError(f"timm cannot make the model {name!r}: {type(error).__name__}: {error}") from error
    finally:
        timm.layers.set_fused_attn(True)


def _timm(network: Network) -> Any:
    name = network.bare_name
    if not re.fullmatch(r"[\w.]+", name):  # timm would fetch "hf-hub:..." from the network
        raise TableError(f"{name!r} is no architecture of timm's.")
    height, width = _pixels(network)
    size = height if height == width else None
    model: Any = timm_model(name, size, fused_attention=not network.before_torch2, **network.config)
    if network.checkpointing:
        model.set_grad_checkpointing(True)
    return model


def _torchvision(network: Network) -> Any:
    name = network.bare_name
    if name.startswith("detection."):
        raise TableError("A detection model of torchvision is not modelled: its operators depend on the boxes that it finds.")
    get_model = _library("torchvision.models", "torchvision").get_model
    options = {"init_weights": False, **network.config} if name in ("googlenet", "inception_v3") else network.config  # they warn
    try:
        return get_model(name, weights=None, **options)
    except NotImplementedError:  # RegNet computes its widths with tensors, which must have values
        with torch.device("cpu"):
            return get_model(name, weights=None, **options).to("meta")


_HUB = {  # what an id of the hub holds, or else the family: the first that fits
    r"gemma-?3": "Gemma3ForCausalLM",
    r"gemma-?2-|gemma2": "Gemma2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    r"phi-?3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
    "stablelm-base-alpha|stablelm-tuned-alpha|pythia|neox|dolly|redpajama": "GPTNeoXForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "gpt-?neo": "GPTNeoForCausalLM",
    "gpt-?j": "GPTJForCausalLM",
    "gpt-?2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen-?3": "Qwen3ForCausalLM",
    "qwen": "Qwen2ForCausalLM",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
    r"\bopt\b": "OPTForCausalLM",
    "llama|vicuna|alpaca": "LlamaForCausalLM",
}


def _huggingface(network: Network) -> Any:
    transformers = _library("transformers", "transformers")
    name = network.bare_name
    if "/" in name:
        words = f"{name} {network.family}".lower()
        name = next((cls for pattern, cls in _HUB.items() if re.search(pattern, words)), name)
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):  # a table must not name just any class
        raise TableError(f"transformers {transformers.__version__} has no model {name!r}.")
    make: Any = cls
    config = make.config_class(**network.config)
    if network.checkpointing:
        config.use_cache = False
    if network.before_torch2 and "attn_implementation" not in network.config:
        config._attn_implementation = "eager"
    model = make(config)
    if network.checkpointing:
        turn_on = "activation_checkpointing_enable"  # older versions have only the other name
        getattr(model, turn_on, model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


class Half(nn.Module):
    """One half of an autoencoder. The other one takes memory beside it."""

    def __init__(self, autoencoder: Any, name: str) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        self.name = name

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self.autoencoder, self.name)(x)


def _diffusers(network: Network) -> Any:
    name, _, half = network.bare_name.partition(".")
    cls = getattr(_library("diffusers", "diffusers"), name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or half not in ("", "encode", "decode"):
        raise TableError(f"diffusers has no network {network.bare_name!r}.")
    return Half(cls(**network.config), half) if half else cls(**network.config)


def _kuangliu(network: Network) -> Any:
    """torchvision's ResNet with the stem of the CIFAR variant (kuangliu/pytorch-cifar): 3x3, stride 1, no pooling."""
    model: Any = _library("torchvision.models", "torchvision").get_model(
        network.bare_name.lower(), weights=None, **network.config
    )
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


# Networks of a few sizes

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
EDGES = ("none", "skip", "conv1x1", "conv3x3", "pool")
"""Operations on an edge of a cell (NAS-Bench-201, Dong and Yang 2020)."""
NUM_EDGES = 6
"""Edges of a cell of four nodes."""


class Checkpointed(nn.Module):
    """``body``, whose activations are not kept but computed again in the backward pass."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


def _blocks(network: Network, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    return [Checkpointed(block) for block in blocks] if network.checkpointing else list(blocks)


def _classified(*layers: nn.Module, width: int, sizes: Config) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, sizes["classes"]))


class ConvBlock(nn.Module):
    """Convolution, norm, activation; plain, with a residual connection, or depthwise and then pointwise."""

    def __init__(self, width: int, stride: int, sizes: Config) -> None:
        super().__init__()
        kernel = sizes["kernel"]
        is_depthwise = sizes["style"] == "depthwise"
        groups = width if is_depthwise else 1
        layers: list[nn.Module] = [nn.Conv2d(width, width, kernel, stride, kernel // 2, groups=groups, bias=False)]
        if is_depthwise:
            layers.append(nn.Conv2d(width, width, 1))
        if sizes["norm"] != "none":
            layers.append(nn.BatchNorm2d(width) if sizes["norm"] == "batch" else nn.GroupNorm(2, width))
        self.body = nn.Sequential(*layers, ACTIVATIONS[sizes["activation"]]())
        self.is_residual = sizes["style"] == "residual" and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.is_residual else y


def _cnn(network: Network) -> nn.Module:
    sizes = network.config
    width = network.config["width"]
    blocks = (ConvBlock(width, 2 if at in sizes["down"] else 1, sizes) for at in range(sizes["depth"]))
    return _classified(nn.Conv2d(3, width, 3, padding=1), *_blocks(network, blocks), width=width, sizes=sizes)


class Zero(nn.Module):
    """Zeros like the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def _edge(name: str, width: int) -> nn.Module:
    if not name.startswith("conv"):
        return {"none": Zero(), "skip": nn.Identity(), "pool": nn.AvgPool2d(3, 1, 1)}[name]
    kernel = int(name[-1])
    return nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(width))


class Cell(nn.Module):
    """Four nodes, each the sum of its edges from all nodes before it."""

    def __init__(self, width: int, edges: Sequence[str]) -> None:
        super().__init__()
        self.edges = nn.ModuleList(_edge(name, width) for name in edges)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nodes = [x]
        edges = iter(self.edges)
        for _ in range(3):
            nodes.append(torch.stack([next(edges)(node) for node in nodes]).sum(0))
        return nodes[-1]


def _cells(network: Network) -> nn.Module:
    sizes = network.config
    width = network.config["width"]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for stage in range(3):
        if stage:
            layers += [nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width)]
            width *= 2
        layers += _blocks(network, (Cell(width, sizes["edges"]) for _ in range(sizes["cells"])))
    return _classified(*layers, nn.ReLU(), width=width, sizes=sizes)


class Recurrent(nn.Module):
    """A recurrent network over a sequence of vectors; its last output is classified."""

    def __init__(self, sizes: Config) -> None:
        super().__init__()
        layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[sizes["cell"]]
        both = sizes["bidirectional"]
        self.body = layer(sizes["inputs"], sizes["width"], sizes["depth"], batch_first=True, bidirectional=both)
        self.head = nn.Linear((2 if both else 1) * sizes["width"], sizes["classes"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x)[0][:, -1])
        return out


def _mlp(network: Network) -> nn.Module:
    sizes = network.config
    before = network.config["inputs"]
    blocks = list[nn.Module]()
    for _ in range(sizes["depth"]):
        layers: list[nn.Module] = [nn.Linear(before, sizes["width"])]
        layers += [nn.BatchNorm1d(sizes["width"])] if sizes["norm"] else []
        layers += [ACTIVATIONS[sizes["activation"]]()]
        layers += [nn.Dropout(0.1)] if sizes["dropout"] else []
        blocks.append(nn.Sequential(*layers))
        before = sizes["width"]
    return nn.Sequential(*_blocks(network, blocks), nn.Linear(before, sizes["classes"]))


LAYERS = (
    "linear", "batch_normalization", "dropout", "Softmax", "ReLU", "Softplus", "PReLU", "SiLU", "Mish", "Identity", "SELU",
    "Tanh", "ELU", "LeakyReLU", "GELU", "Sigmoid",
)  # fmt: skip
"""Layers of GPUMemNet's perceptrons."""


def _layer(kind: str, inputs: int, outputs: int) -> nn.Module:
    layers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(inputs, outputs),
        "batch_normalization": lambda: nn.BatchNorm1d(outputs),
        "dropout": nn.Dropout,
        "Softmax": lambda: nn.Softmax(dim=1),
    }
    make: Callable[[], nn.Module] = layers[kind] if kind in layers else getattr(nn, kind)
    return make()


def _perceptron(network: Network) -> nn.Module:
    """The layers in their order, as GPUMemNet writes them: kind and number of features of each."""
    kinds, widths = zip(*network.config["layers"], strict=True)
    return nn.Sequential(*map(_layer, kinds, (network.config["inputs"], *widths), widths))


def _sized(*names: str) -> Callable[[Network, int, bool], Batch]:
    """Batches of classified samples, whose shape has the sizes of these names."""
    return lambda network, n, train: _classes(n, train, (n, *(network.config[name] for name in names)))


_KINDS: dict[str, _Kind] = {
    "torchvision": _Kind(_torchvision, _images),
    "timm": _Kind(_timm, _images, checkpoints=True),
    "hf": _Kind(_huggingface, _of_huggingface, checkpoints=True),
    "diffusers": _Kind(_diffusers, _latents),
    "kuangliu": _Kind(_kuangliu, _images),
    "cs336": _Kind(lambda network: BasicsTransformerLM(network.config), _tokens),
    "perfguard:cnn": _Kind(_cnn, _images, checkpoints=True),
    "perfguard:cells": _Kind(_cells, _images, checkpoints=True),
    "perfguard:mlp": _Kind(_mlp, _sized("inputs"), checkpoints=True),
    "perfguard:perceptron": _Kind(_perceptron, _sized("inputs")),
    "perfguard:recurrent": _Kind(lambda network: Recurrent(network.config), _sized("length", "inputs")),
}

"""The networks of measured runs by the prefix of their names: how each is built, and what goes into it (docs/tables.md)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from perfguard.exceptions import TableError, why_not_imported
from perfguard.tables._language_models import BasicsTransformerLM, Mpt
from perfguard.tables._networks import cross_entropy, enable_checkpointing, first_output, mean_of
from perfguard.tables._zoo import timm_model
from perfguard.workload import TensorSpec

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
_LABELS: dict[str, Callable[[int, int], dict[str, tuple[int, ...]]]] = {  # by what a class is for: (batch, length) → shapes
    "ForSequenceClassification|ForImageClassification": lambda n, _: {"labels": (n,)},
    "ForQuestionAnswering": lambda n, _: {"start_positions": (n,), "end_positions": (n,)},
    "BertForPreTraining": lambda n, length: {"labels": (n, length), "next_sentence_label": (n,)},
    "LMHeadModel|CausalLM|MaskedLM|ForConditionalGeneration|TokenClassification": lambda n, length: {"labels": (n, length)},
}


class Batch(NamedTuple):
    """Inputs of one step, and its loss (None: the model's own)."""

    inputs: Any
    targets: Any = None
    loss: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """The network of one row, with what decides how it is built."""

    name: str
    """Name with its prefix: "torchvision:resnet50"."""
    config: Mapping[str, Any] = field(hash=False)
    family: str
    input: Mapping[str, Any] = field(hash=False)
    checkpointing: bool
    before_torch2: bool
    """Attention was not fused then."""

    def make(self) -> nn.Module:
        """The network, on the current default device.

        Raises:
            TableError: if it cannot be built, with the reason.
        """
        kind, name = self._kind_and_name()
        if self.checkpointing and kind not in ("hf", "mpt"):
            raise TableError(f"Checkpointing of {self.name!r} is not modelled.")
        try:
            return _MAKERS[kind](self, name)
        except TableError:
            raise
        except Exception as error:
            raise TableError(f"The model {self.name!r} cannot be made: {type(error).__name__}: {error}") from error

    def batch(self, batch_size: int, *, train: bool, optimizes: bool) -> Batch:
        """One batch.

        Args:
            batch_size: samples.
            train: whether there is a loss.
            optimizes: whether the step has an optimizer's; the course's language model has another loss without.

        Raises:
            TableError: if the input is not what such a model takes.
        """
        kind, name = self._kind_and_name()
        try:
            batch = _BATCHES[kind](self, name, batch_size, train)
        except KeyError as error:
            raise TableError(f"column 'input' must hold {error} for {self.name!r}, but is {dict(self.input)}") from error
        return Batch(batch.inputs, None, mean_of) if kind == "cs336" and not optimizes else batch

    def _kind_and_name(self) -> tuple[str, str]:
        kind, _, name = self.name.partition(":")
        if kind not in _MAKERS:
            raise TableError(f"The model {self.name!r} has no known prefix. Known are {', '.join(_MAKERS)}.")
        return kind, name


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = f"The model of this row is from {package}, which is not installed: pip install {package}."
        raise TableError(why_not_imported(error, package, missing)) from error


def _torchvision(run: RunModel, name: str) -> nn.Module:
    if name.startswith("detection."):
        raise TableError("A detection model of torchvision is not modelled: its operators depend on the boxes that it finds.")
    get_model = _library("torchvision.models", "torchvision").get_model
    options = {"init_weights": False, **run.config} if name in ("googlenet", "inception_v3") else run.config  # else they warn
    made: nn.Module
    try:
        made = get_model(name, weights=None, **options)
    except NotImplementedError:  # RegNet computes its widths with tensors, which must have values
        with torch.device("cpu"):
            made = get_model(name, weights=None, **options).to("meta")
    return made


def _timm(run: RunModel, name: str) -> nn.Module:
    if not re.fullmatch(r"[\w.]+", name):  # timm would fetch "hf-hub:..." from the network
        raise TableError(f"{name!r} is no architecture of timm's.")
    height, width = _pixels(run)
    size = height if height == width else None
    return timm_model(name, size, fused_attention=not run.before_torch2, **run.config)


def _huggingface(run: RunModel, name: str) -> nn.Module:
    transformers = _library("transformers", "transformers")
    if "/" in name:
        words = f"{name} {run.family}".lower()
        name = next((cls for pattern, cls in _HUB.items() if re.search(pattern, words)), name)
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):  # a table must not name just any class
        raise TableError(f"transformers {transformers.__version__} has no model {name!r}.")
    make: Any = cls
    config = make.config_class(**run.config)
    if run.checkpointing:
        config.use_cache = False
    if run.before_torch2 and "attn_implementation" not in run.config:
        config._attn_implementation = "eager"
    model = make(config)
    if run.checkpointing:
        enable_checkpointing(model)
    made: nn.Module = model
    return made


def _diffusers(run: RunModel, name: str) -> nn.Module:
    cls = getattr(_library("diffusers", "diffusers"), name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TableError(f"diffusers has no network {name!r}.")
    made: nn.Module = cls(**run.config)
    return made


def _kuangliu(run: RunModel, name: str) -> nn.Module:
    """torchvision's ResNet with the stem of the CIFAR variant (kuangliu/pytorch-cifar): 3x3, stride 1, no pooling."""
    model: Any = _library("torchvision.models", "torchvision").get_model(name.lower(), weights=None, **run.config)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    made: nn.Module = model
    return made


def _mpt(run: RunModel, name: str) -> nn.Module:
    return Mpt(run.config, checkpointing=run.checkpointing)


def _cs336(run: RunModel, name: str) -> nn.Module:
    return BasicsTransformerLM(run.config)


_MAKERS: dict[str, Callable[[RunModel, str], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _huggingface,
    "diffusers": _diffusers,
    "kuangliu": _kuangliu,
    "cs336": _cs336,
    "mpt": _mpt,
}


def _pixels(run: RunModel) -> tuple[int, int]:
    size = run.input["image"]
    height, width = size if isinstance(size, list) else (size, size)
    return height, width


def _images(run: RunModel, name: str, n: int, train: bool) -> Batch:
    return Batch((n, 3, *_pixels(run)), TensorSpec((n,), "int64") if train else None, cross_entropy)


def _tokens(run: RunModel, name: str, n: int, train: bool) -> Batch:
    tokens = TensorSpec((n, run.input["seq_len"]), "int64")
    return Batch(tokens, tokens if train else None, _next_token_loss)


def _next_token_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.roll(-1, 1).flatten())


def _of_huggingface(run: RunModel, name: str, n: int, train: bool) -> Batch:
    """The model's own loss where its class has one, else the mean of its first output."""
    if "image" in run.input:
        length, inputs = 0, dict[str, Any](pixel_values=TensorSpec((n, 3, *_pixels(run))))
    else:
        length = run.input.get("target_len", run.input["seq_len"])
        inputs = {"input_ids": TensorSpec((n, run.input["seq_len"]), "int64")}
        if "target_len" in run.input:
            inputs["decoder_input_ids"] = TensorSpec((n, length), "int64")
    if "/" in name:  # an id of the hub: a language model
        name = "CausalLM"
    labels = next((shapes(n, length) for words, shapes in _LABELS.items() if re.search(words, name)), None)
    if not train or labels is None:
        return Batch(inputs, None, mean_of)
    return Batch(inputs | {key: TensorSpec(shape, "int64") for key, shape in labels.items()})


def _latents(run: RunModel, name: str, n: int, train: bool) -> Batch:
    """Noise predicted at one time step, under a text."""
    latent, channels = run.input["latent"], run.config.get("in_channels", 4)
    image = TensorSpec((n, channels, latent, latent))
    text = TensorSpec((n, run.input["text_len"], run.config.get("cross_attention_dim", 1280)))
    return Batch([image, TensorSpec((n,), "int64"), text], image if train else None, _noise_loss)


def _noise_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(first_output(output).float(), targets.float())


_BATCHES: dict[str, Callable[[RunModel, str, int, bool], Batch]] = {
    "torchvision": _images,
    "timm": _images,
    "hf": _of_huggingface,
    "diffusers": _latents,
    "kuangliu": _images,
    "cs336": _tokens,
    "mpt": _tokens,
}

"""A seeded order of configurations to measure. The spaces take turns, so a session may end at any row."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

from perfguard.devices import Device
from perfguard_research.networks import EDGES, NUM_EDGES, Network
from perfguard_research.tables import MeasuredRow, run_row

Space = Literal["vision", "text", "mlp", "rnn", "nas"]
SPACES: tuple[Space, ...] = get_args(Space)

_TIMM = (
    "resnet18", "resnet50", "resnet26d", "resnext50_32x4d", "wide_resnet50_2", "seresnet50", "densenet121", "vgg11_bn",
    "mobilenetv2_100", "mobilenetv3_large_100", "efficientnet_b0", "efficientnetv2_rw_t", "mnasnet_100", "fbnetc_100",
    "regnety_008", "regnetx_016", "convnext_nano", "convnextv2_atto", "ghostnet_100", "hrnet_w18_small", "dla34", "cspresnet50",
    "darknet53", "repvgg_a0", "res2net50_26w_4s", "resnest14d", "selecsls42b", "vit_tiny_patch16_224", "vit_small_patch32_224",
    "vit_base_patch16_224", "deit3_small_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "resmlp_12_224",
    "poolformer_s12", "edgenext_small", "mobilevit_s", "coatnet_nano_rw_224", "xcit_tiny_12_p16_224", "cait_xxs24_224",
)  # fmt: skip
_FIXED_SIZE = ("vit", "deit3", "swin", "mixer", "resmlp", "coatnet", "xcit", "cait")
"""Networks of timm that are made for one size of image. They may raise for another size."""
_TORCHVISION = (
    "resnet34", "resnet101", "resnext50_32x4d", "vgg13_bn", "densenet169", "mobilenet_v2", "mobilenet_v3_small",
    "efficientnet_b1", "wide_resnet50_2", "shufflenet_v2_x1_0", "squeezenet1_1", "convnext_tiny", "mnasnet1_0", "alexnet",
)  # fmt: skip
_ENCODER_DECODER = ("t5", "bart")
TEXT: dict[str, tuple[str, Mapping[str, str]]] = {  # type of model: its class, and the names of our sizes in its configuration
    "bert": ("BertForMaskedLM", {
        "hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads", "intermediate_size": "4 width",
        "max_position_embeddings": "length"}),
    "distilbert": ("DistilBertForMaskedLM", {
        "dim": "width", "n_layers": "layers", "n_heads": "heads", "hidden_dim": "4 width", "max_position_embeddings": "length"}),
    "gpt2": ("GPT2LMHeadModel", {
        "n_embd": "width", "n_layer": "layers", "n_head": "heads", "n_positions": "length", "bos_token_id": "0",
        "eos_token_id": "0"}),
    "llama": ("LlamaForCausalLM", {
        "hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "heads",
        "intermediate_size": "3 width", "max_position_embeddings": "length"}),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": "width", "d_ff": "4 width", "d_kv": "head width", "num_heads": "heads", "num_layers": "layers"}),
    "bart": ("BartForConditionalGeneration", {
        "d_model": "width", "encoder_layers": "layers", "decoder_layers": "layers", "max_position_embeddings": "length",
        "encoder_attention_heads": "heads", "decoder_attention_heads": "heads", "encoder_ffn_dim": "4 width",
        "decoder_ffn_dim": "4 width"}),
}  # fmt: skip
TEXT_LIBRARIES = tuple(f"transformers.models.{name}.modeling_{name}" for name in TEXT)
# What is drawn for the networks of ours, in this order. A tuple is the range of a size (and what it is a multiple of); of a list
# one is taken.
_CNN = {
    "style": ["plain", "residual", "depthwise"], "norm": ["batch", "group", "none"], "depth": (2, 24),
    "activation": ["relu", "gelu", "silu"], "kernel": [1, 3, 3, 5, 7], "width": (8, 256, 2),
    "down": [(), (0.5,), (0.3, 0.6), (0.2, 0.5, 0.8)], "img_size": (24, 256, 8),
}  # fmt: skip
_CELLS = {"width": (8, 64, 2), "cells": (1, 6), "img_size": (16, 64, 8)}
_MLP = {
    "inputs": (16, 4096), "width": (32, 8192), "depth": (1, 16), "norm": [False, False, True], "dropout": [False, False, True],
    "activation": ["relu", "gelu", "tanh"], "classes": (2, 1000),
}  # fmt: skip
_RNN = {
    "cell": ["lstm", "gru", "rnn"], "inputs": (16, 512), "width": (32, 1024), "depth": (1, 4), "length": (8, 256),
    "bidirectional": [False, True],
}  # fmt: skip


class Draft(NamedTuple):
    """A configuration whose batch is still open."""

    columns: Mapping[str, str]
    """What is to be measured, as a row of a table of runs, with a batch of 1."""
    row: MeasuredRow
    """The same."""
    memory_share: float
    """Target share of the memory. Above 1 the run should not fit."""
    round_batch: bool
    """Whether to round the batch to a multiple of 16."""


class Draw(random.Random):
    """Random choices of one configuration."""

    reach = 1.0
    """How much of the logarithmic range of each size is used, 0 to 1. A smaller one makes smaller networks."""

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """An integer between ``low`` and ``high``, its logarithm uniform; the reach cuts the upper end."""
        value = low * math.exp(math.log(high / low) * self.reach * self.random())
        return max(low, round(value / multiple) * multiple)

    def sizes(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """One of each, in the order of ``spec``."""
        return {name: self.size(*what) if isinstance(what, tuple) else self.choice(what) for name, what in spec.items()}


def drafts(spaces: Sequence[Space], *, seed: int, device: Device) -> Iterator[Draft]:
    """The endless order of configurations.

    Args:
        spaces: the kinds of networks. They take turns.
        seed: of the order.
        device: on which they run. On a CPU networks are smaller, and there are only options that a CPU has.
    """
    for number, space in enumerate(itertools.cycle(spaces)):
        yield _draft(number, space, Draw(f"{seed} {space} {number}"), device)


def import_libraries(spaces: Sequence[Space]) -> None:
    """Import the libraries of the networks of ``spaces``. Networks whose library is missing cannot be made, and are left out."""
    libraries: dict[str, tuple[str, ...]] = {"vision": ("timm", "torchvision.models"), "text": TEXT_LIBRARIES}
    for library in itertools.chain.from_iterable(libraries.get(space, ()) for space in spaces):
        with suppress(Exception):  # it is missing, or broken
            importlib.import_module(library)


def _draft(number: int, space: Space, draw: Draw, device: Device) -> Draft:
    on_gpu = device.kind != "cpu"
    draw.reach = 1.0 if on_gpu else 0.6
    mode = draw.choice(("train", "train", "infer"))
    precisions = ["tf32-conv", "tf32", "fp32", "amp-fp16", "amp-bf16", "amp-bf16"] if on_gpu else ["tf32-conv"] * 7 + ["amp-bf16"]
    precision = draw.choice(precisions)
    optimizer = draw.choice(("sgd-momentum", "adamw"))
    layout = draw.choice(("nchw", "nhwc"))
    benchmark = draw.random() < 0.5
    checkpointing = draw.random() < 0.25
    # Compilation takes most of a minute where the others take half a second.
    compiled = draw.random() < 1 / 64
    # A quarter of the runs is near the limit, where it is decided whether a run fits.
    memory_share = draw.uniform(0.8, 1.3) if draw.random() < 0.25 else 0.02 * 40 ** draw.random()
    network = _NETWORKS[space](draw)
    can_checkpoint = network.name.startswith("hf:") or network.name in ("perfguard:cnn", "perfguard:cells", "perfguard:mlp")
    has_images = "image" in network.input or "img_size" in network.config
    columns = {
        "source": "collected",
        "model": network.name,
        "config": json.dumps(network.config, separators=(",", ":")),
        "family": network.family,
        "mode": mode,
        "gpu": device.id,
        "num_gpus": "1",
        "parallel": "none",
        "precision": precision,
        "layout": layout if has_images else "nchw",
        "compiled": str(compiled and on_gpu),
        "optimizer": optimizer if mode == "train" else "none",
        "checkpointing": str(checkpointing and mode == "train" and can_checkpoint),
        "accumulation": "1",
        "cudnn_benchmark": str(benchmark and on_gpu),
        "zero_grad": "before-forward",
        "batch_size": "1",
        "input": json.dumps(network.input, separators=(",", ":")),
        "memory_kind": "driver" if on_gpu else "resident",
        "space": space,
        "memory_share": f"{memory_share:.4f}",
        "index": str(number),
    }
    return Draft(columns, run_row(columns, "collected"), memory_share, round_batch=draw.random() < 0.5)


# The network of each space


def _vision(draw: Draw) -> Network:
    kind = draw.choice(("timm", "torchvision", "cnn"))
    if kind == "cnn":
        sizes = draw.sizes(_CNN)
        sizes |= {"down": [round(sizes["depth"] * part) for part in sizes["down"]], "classes": 100}
        return Network(name="perfguard:cnn", config=sizes, family=f"cnn-{sizes['style']}-{sizes['norm']}")
    name = draw.choice(_TIMM if kind == "timm" else _TORCHVISION)
    is_fixed = kind == "timm" and name.startswith(_FIXED_SIZE)
    image = 224 if is_fixed else max(64, draw.size(64, 320, 32))
    return Network(name=f"{kind}:{name}", input={"image": image}, family=name.partition("_")[0])


def _nas(draw: Draw) -> Network:
    edges = [draw.choice(EDGES) for _ in range(NUM_EDGES)]
    sizes = {"edges": edges, **draw.sizes(_CELLS), "classes": 10}
    return Network(name="perfguard:cells", config=sizes, family=f"cells-{edges.count('conv3x3')}")


def _mlp(draw: Draw) -> Network:
    sizes = draw.sizes(_MLP)
    return Network(name="perfguard:mlp", config=sizes, family="mlp-norm" if sizes["norm"] else "mlp")


def _rnn(draw: Draw) -> Network:
    sizes = draw.sizes(_RNN)
    return Network(name="perfguard:recurrent", config=sizes | {"classes": 20}, family=sizes["cell"])


def _text(draw: Draw) -> Network:
    model_type = draw.choice(tuple(TEXT))
    heads = draw.size(2, 16)
    layers = draw.size(2, 16)
    head_width = draw.choice((32, 64, 64))
    length = draw.size(32, 1024, 16)
    vocabulary = draw.size(1000, 50_000)
    width = heads * head_width
    has_decoder = model_type in _ENCODER_DECODER
    sizes = {
        "heads": heads, "layers": max(1, layers // 2) if has_decoder else layers, "head width": head_width, "width": width,
        "3 width": 3 * width, "4 width": 4 * width, "length": length, "0": 0,
    }  # fmt: skip
    cls, names = TEXT[model_type]
    config = {"vocab_size": vocabulary, "use_cache": False} | {name: sizes[size] for name, size in names.items()}
    lengths = {"seq_len": length} | ({"target_len": length} if has_decoder else {})
    return Network(name=f"hf:{cls}", config=config, input=lengths, family=model_type)


_NETWORKS: dict[Space, Callable[[Draw], Network]] = {
    "vision": _vision,
    "text": _text,
    "mlp": _mlp,
    "rnn": _rnn,
    "nas": _nas,
}

"""The models of other people can be traced: timm's, Hugging Face's, torch_geometric's, torch's own."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard.devices import resolve_device
from perfguard.exceptions import TableError
from perfguard.graph import OpGraph, Phase, replay_allocator, trace
from perfguard.workload import TensorSpec, Workload
from perfguard_research.networks import timm_model
from tests import zoo

pytestmark = pytest.mark.slow
needs_zoo = pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm, torchvision and transformers")
NAMES = (Path(__file__).parent / "timm_models.txt").read_text().split()
NUM_SAMPLED = 30
RETIRED = frozenset({
    "convnext_nano_hnf", "convnext_tiny_hnfd", "densenet121d", "densenet264", "densenet264d_iabn", "ese_vovnet99b_iabn",
    "gluon_xception65", "regnety_040s_gn", "semobilevit_s",
})  # fmt: skip
"""Models that timm 1.0.31 no longer has. All others are traced in both modes: none fails to train."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "timm_name" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-models")
        names = NAMES if everything else sorted(random.Random(0).sample(NAMES, NUM_SAMPLED))
        metafunc.parametrize("timm_name", names)


def check(graph: OpGraph) -> None:
    """What must hold of any step."""
    parameter_bytes = sum(s.num_bytes for s in graph.storages if s.birth == -1)
    assert graph.peak_live_bytes >= parameter_bytes > 0
    assert replay_allocator(graph, resolve_device("a100")).reserved_bytes >= graph.peak_live_bytes
    assert graph.flops > 0


def first_of(output: Any) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


@needs_zoo
@pytest.mark.filterwarnings("ignore:Mapping deprecated model name")
def test_a_timm_model(timm_name: str) -> None:
    if timm_name in RETIRED:
        with pytest.raises(TableError, match="Unknown model"):
            timm_model(timm_name)
        return
    with torch.device("meta"):
        model = timm_model(timm_name)
    size = zoo.input_size(model)
    infer = trace(Workload(model, (2, *size), mode="infer"))
    check(infer)
    train = trace(
        Workload(
            model,
            (2, *size),
            TensorSpec((2,), "int64"),
            lambda output, target: F.cross_entropy(first_of(output).flatten(1), target),
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        )
    )
    check(train)
    forward = sum(op.flops for op in train.ops if op.phase is Phase.FORWARD)
    assert 0.9 * infer.flops <= forward <= 1.2 * infer.flops


def ids(batch: int = 2, length: int = 32) -> TensorSpec:
    return TensorSpec((batch, length), "int64")


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
TEXT = {"input_ids": ids(), "labels": ids()}
# Others are traced in tests/research/test_runs.py.
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bert with a mask": ("BertConfig", "BertForMaskedLM", SMALL, TEXT | {"attention_mask": ids()}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 100,
         "word_embed_proj_dim": 64},
        TEXT,
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", SMALL | {"num_key_value_heads": 2, "num_local_experts": 4}, TEXT),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 100, "max_source_positions": 50, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        {"input_features": (2, 80, 100), "labels": ids(2, 16)},
    ),
}  # fmt: skip


@needs_zoo
@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16"])
@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_model(name: str, precision: Any) -> None:
    config, cls, options, inputs = HUGGING_FACE[name]
    transformers: Any = importlib.import_module("transformers")

    with torch.device("meta"):
        model = getattr(transformers, cls)(getattr(transformers, config)(**options))
    check(trace(Workload(model, inputs, loss=lambda output: output.loss, precision=precision, optimizer=torch.optim.AdamW)))


def geometric(make: Callable[[Any], nn.Module]) -> Workload:
    """Node classification on a graph of 100 nodes and 400 edges, whose indices are fixed."""
    import torch_geometric.nn as gnn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make(gnn), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
            return self.second(self.first(x, edge_index).relu())

    return Workload(
        Net(), {"x": (100, 16), "edge_index": TensorSpec((2, 400), "int64")}, TensorSpec((100,), "int64"), F.cross_entropy
    )


@pytest.mark.parametrize("layer", ["SAGEConv", "GraphConv", "TransformerConv"])
@pytest.mark.filterwarnings("ignore")
def test_a_layer_of_torch_geometric(layer: str) -> None:
    check(trace(geometric(lambda gnn: getattr(gnn, layer)(16, 32))))

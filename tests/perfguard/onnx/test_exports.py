"""A torch module and its ONNX export cost the same."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import OpGraph, TensorSpec, Workload, trace
from perfguard.graph import StorageKind
from perfguard.onnx import graph_from_onnx
from tests import zoo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs the dependency group `zoo`"),
    pytest.mark.filterwarnings("ignore"),  # the exporter's own
]
pytest.importorskip("onnxscript", reason="torch's exporter needs onnxscript")


def export(model: nn.Module, inputs: dict[str, torch.Tensor], path: Path, *, fold: bool) -> Path:
    """Write ``model`` with a free first dimension; ``fold`` as the exporter does by default, batch norms into convolutions."""
    batch = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model.eval(), (), kwargs=inputs, dynamo=True, optimize=fold, verbose=False,
            dynamic_shapes={name: {0: batch} for name in inputs},
        )  # fmt: skip
    assert program is not None
    program.save(path)
    return path


class OnKeywords(nn.Module):
    """timm's networks call their input ``x``; a Workload passes a dict as keywords already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(**inputs)


def timm_model(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name)
    for parameter in model.parameters():  # equal weights would be stored once
        nn.init.normal_(parameter)
    return model, {"x": torch.zeros(2, 3, 224, 224)}, {"x": (4, 3, 224, 224)}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    transformers: Any = importlib.import_module("transformers")

    config = transformers.BertConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=512)
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    ids = torch.ones(2, 64, dtype=torch.int64)
    spec = TensorSpec((4, 64), "int64")
    return model, {"input_ids": ids, "attention_mask": ids}, {"input_ids": spec, "attention_mask": spec}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor], Any]]] = {
    "resnet18": lambda: timm_model("resnet18"),
    "vit_tiny_patch16_224": lambda: timm_model("vit_tiny_patch16_224"),
    "bert": bert,
}


@pytest.mark.parametrize("name", MODELS)
def test_export_has_flops_and_weights_of_its_module(name: str, tmp_path: Path) -> None:
    model, example, inputs = MODELS[name]()
    traced = trace(Workload(OnKeywords(model), inputs, mode="infer"))
    read = graph_from_onnx(export(model, example, tmp_path / "model.onnx", fold=False), batch_size=4)
    assert read.flops == pytest.approx(traced.flops, rel=0.01)
    assert weight_bytes(read) == pytest.approx(weight_bytes(traced), rel=0.01)
    assert not read.unmodelled


def test_export_differs_by_folded_batch_norms_only(tmp_path: Path) -> None:
    model, example, inputs = timm_model("mobilenetv3_small_100")
    traced = trace(Workload(OnKeywords(model), inputs, mode="infer"))
    read = graph_from_onnx(export(model, example, tmp_path / "model.onnx", fold=True), batch_size=4)
    rest = sum(op.flops for op in traced.ops if op.name != "native_batch_norm")
    assert read.flops < 0.95 * traced.flops
    assert read.flops == pytest.approx(rest, rel=0.01)
    assert [op.name for op in read.ops if op.kind == "conv"] == [op.name for op in traced.ops if op.kind == "conv"]


def weight_bytes(graph: OpGraph) -> int:
    """Parameters and buffers; the embeddings' position numbers, which are no weights, left out."""
    kinds = (StorageKind.PARAMETER, StorageKind.BUFFER)
    return sum(storage.num_bytes for storage in graph.storages if storage.kind in kinds and "_ids" not in storage.module)

"""LILOU's own networks: which operators fuse, and which kernel runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard_research.fusion import kernels
from perfguard_research.fusion.network import read_fusion_model

WEIGHTS = Path(kernels.__file__).parents[1] / "weights"


@pytest.mark.parametrize(("name", "read"), [("kernels", kernels.read_kernel_model), ("fusion", read_fusion_model)])
def test_weights_refuse_damage_and_exchange(name: str, read: Callable[..., object], tmp_path: Path) -> None:
    for suffix in (".safetensors", ".json"):
        shutil.copy(WEIGHTS / f"{name}{suffix}", tmp_path / f"{name}{suffix}")
    tensors, card = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.json"
    read(tmp_path / name)
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    with pytest.raises(PredictorError, match="do not match the hash in their card"):
        read(tmp_path / name)
    document = json.loads(card.read_text(encoding="utf-8"))
    card.write_text(json.dumps(document | {"format": 99}), encoding="utf-8")
    with pytest.raises(PredictorError, match="another version of PerfGuard"):
        read(tmp_path / name)
    tensors.unlink()
    with pytest.raises(PredictorError, match="cannot be read"):
        read(tmp_path / name)


def test_matrix_product_runs_as_matrix_product() -> None:
    device = resolve_device("v100")
    graph = trace(Workload(nn.Linear(1024, 1024), (512, 1024), mode="infer"), target=device)
    (likeliest, *_) = kernels.shipped().of_operator(graph, device)
    assert "gemm" in likeliest

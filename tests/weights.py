"""What must hold of every reader of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from perfguard.exceptions import PredictorError


def check_damaged_weights_are_refused(shipped: Path, name: str, read: Callable[[Path, Path], object], tmp_path: Path) -> None:
    """``read(tensors, card)`` takes the shipped pair, and neither a damaged nor an exchanged one."""
    for suffix in (".safetensors", ".json"):
        shutil.copy(shipped / f"{name}{suffix}", tmp_path / f"{name}{suffix}")
    tensors, card = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.json"
    assert tensors.stat().st_size < 10**6
    read(tensors, card)
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    with pytest.raises(PredictorError, match="do not match the hash in their card"):
        read(tensors, card)
    document = json.loads(card.read_text(encoding="utf-8"))
    card.write_text(json.dumps(document | {"format": 99}), encoding="utf-8")
    with pytest.raises(PredictorError, match="another version of PerfGuard"):
        read(tensors, card)
    tensors.unlink()
    with pytest.raises(PredictorError, match="cannot be read"):
        read(tensors, card)

"""PATH.safetensors and PATH.json: tensors, and the card whose hash binds it to them. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from perfguard.exceptions import PredictorError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_LARGEST_BYTES = 64 * 2**20


def write_pair(out: Path, tensors: Mapping[str, torch.Tensor], card: Mapping[str, Any]) -> str:
    """Write both; returns the card's text."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    text = json.dumps({"sha256": hashlib.sha256(data).hexdigest(), **card}, indent=1) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".safetensors").write_bytes(data)
    out.with_suffix(".json").write_text(text, encoding="utf-8")
    return text


def read_pair(tensors: Traversable, card: Traversable, what: str, mend: str) -> tuple[bytes, Any]:
    """The bytes of the tensors, and the card as it stands.

    Args:
        tensors: the first file.
        card: the second.
        what: whose they are, for the message.
        mend: what to do, after "Reinstall perfguard, or".

    Raises:
        PredictorError: if one cannot be read.
    """
    try:
        return tensors.read_bytes(), json.loads(card.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictorError(f"{what} cannot be read: {error}. Reinstall perfguard, or {mend}.") from error


def check_hash(data: bytes, card: Mapping[str, Any], name: str) -> None:
    """Raises PredictorError unless the card was written for these tensors."""
    if len(data) > _LARGEST_BYTES or card.get("sha256") != hashlib.sha256(data).hexdigest():
        raise PredictorError(f"The weights {name!r} do not match the hash in their card; the file is damaged or exchanged.")


def version_of(card: Mapping[str, Any]) -> str:
    """Identifies a card, and with it the tensors that it was written for."""
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()

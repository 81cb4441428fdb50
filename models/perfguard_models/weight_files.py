"""PATH.safetensors and PATH.json: tensors, and the card whose hash binds it to them. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from perfguard.exceptions import PredictorError

LARGEST_BYTES = 64 * 2**20


def write_pair(out: Path, tensors: Mapping[str, torch.Tensor], card: Mapping[str, Any]) -> None:
    """Write both. The card says when and on what machine."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    made = f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}"
    text = json.dumps({"sha256": hashlib.sha256(data).hexdigest(), **card, "made": made}, indent=1) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".safetensors").write_bytes(data)
    out.with_suffix(".json").write_text(text, encoding="utf-8")


def read_pair(path: Path, *, mend: str, made_for: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of PATH.safetensors by name, and the card PATH.json.

    Args:
        path: of both files, without suffix.
        mend: the command that makes them again, for messages.
        made_for: what the card must have, because the code depends on it.

    Raises:
        PredictorError: if one cannot be read, was made for other code, or they do not belong together.
    """
    try:
        data = Path(f"{path}.safetensors").read_bytes()
        card = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictorError(
            f"The weights {path.name!r} cannot be read: {error}. Reinstall perfguard, or train them again with `{mend}`."
        ) from error
    check_made_for(card, path.name, made_for)
    if len(data) > LARGEST_BYTES or card.get("sha256") != hashlib.sha256(data).hexdigest():
        raise PredictorError(f"The weights {path.name!r} do not match the hash in their card; the file is damaged or exchanged.")
    with fitting(f"The weights {path.name!r}"):
        return load(data), card


def check_made_for(card: Any, name: str, made_for: Mapping[str, Any]) -> None:
    """Raises PredictorError unless the card of the weights ``name`` has all that is in ``made_for``."""
    others = [key for key, value in made_for.items() if not isinstance(card, dict) or card.get(key) != value]
    if others:
        raise PredictorError(
            f"The weights {name!r} were made for another version of PerfGuard: their card has another {others[0]!r}. "
            "Train them again with this version."
        )


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Whatever tensors and settings raise that do not fit the code becomes a PredictorError about ``what``."""
    try:
        yield
    except (SafetensorError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PredictorError(f"{what} do not fit the predictor: {type(error).__name__}: {error}") from error


def version_of(card: Mapping[str, Any]) -> str:
    """Identifies a card, and with it the tensors that it was written for."""
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()

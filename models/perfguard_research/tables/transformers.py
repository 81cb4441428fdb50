"""The table of whole transformers: one row a measured run of a Hugging Face model, made from its configuration (docs/tables.md).

The configurations are a JSON file beside the table, `transformers_configs.json`: a name, and what `AutoConfig` takes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from torch import nn

from perfguard.exceptions import TableError
from perfguard.workload import Mode, Precision, TensorSpec, Workload
from perfguard_research.tables.csv import Row, is_true, one_of, positive, scaled, text
from perfguard_research.tables.rows import MIB, MeasuredRow

COLUMNS = ("model", "mode", "gpu", "batch_size", "seq_len")
"""Required columns of a table of transformers."""
CONFIGURATIONS = "transformers_configs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerRow(MeasuredRow):
    """One measured run of a transformer: forward, and for training backward too, without an optimizer's step."""

    precision: Precision
    compiled: bool
    seq_len: int
    configuration: Mapping[str, Any] = field(hash=False, compare=False)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Key of the row without the batch and the GPU."""
        return self.model, json.dumps(self.configuration, sort_keys=True), self.mode, self.precision, self.compiled, self.seq_len

    def make_model(self) -> nn.Module:
        """The first of the configuration's architectures, with attention as it was before PyTorch 2 fused it."""
        try:
            transformers = importlib.import_module("transformers")
            options = {key: value for key, value in self.configuration.items() if key not in ("model_type", "architectures")}
            config = transformers.AutoConfig.for_model(self.configuration["model_type"], **options)
            config._attn_implementation = "eager"
            config.use_cache = False
            made: nn.Module = getattr(transformers, self.configuration["architectures"][0])(config)
            return made
        except Exception as error:
            raise TableError(f"transformers cannot make the model {self.model!r}: {type(error).__name__}: {error}") from error

    def workload(self, model: nn.Module) -> Workload:
        """Tokens in, and for training the loss of predicting the same tokens."""
        tokens = TensorSpec((self.batch_size, self.seq_len), "int64")
        inputs: dict[str, Any] = {"input_ids": tokens}
        if self.configuration.get("is_encoder_decoder"):
            inputs["decoder_input_ids"] = tokens
        if self.mode == "train":
            inputs["labels"] = tokens
        return Workload(
            model,
            inputs=inputs,
            mode=self.mode,
            precision=self.precision,
            compiled=self.compiled,
            retain="nothing",
            batch_on="device",
        )


def transformer_row(row: Row, configurations: Mapping[str, Any]) -> TransformerRow:
    """One row of a table of transformers, checked.

    Raises:
        TableError: naming the column that cannot be right.
    """
    name = text(row, "model")
    if name not in configurations:
        raise TableError(f"{name!r} is not in {CONFIGURATIONS}, which has {', '.join(sorted(configurations)) or 'nothing'}")
    return TransformerRow(
        source=row.get("source") or "",
        model=name,
        family=row.get("family") or name.partition("_")[0],
        mode=one_of(row, "mode", get_args(Mode)),
        gpu=text(row, "gpu"),
        precision=one_of(row, "precision", get_args(Precision), "fp32"),
        compiled=is_true(row, "compiled"),
        batch_size=positive(row, "batch_size"),
        seq_len=positive(row, "seq_len"),
        configuration=configurations[name],
        step_time_s=scaled(row, "step_time_ms", 1e-3),
        peak_memory_bytes=scaled(row, "peak_memory_mib", MIB),
        status=(row.get("status") or "ok").lower(),
    )


def read_configurations(table: Path) -> Mapping[str, Any]:
    """The configurations beside ``table``; none if there is no such file.

    Raises:
        TableError: if the file is no JSON object.
    """
    path = table.with_name(CONFIGURATIONS)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TableError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TableError(f"{path} must hold an object: a configuration for each name.")
    return found

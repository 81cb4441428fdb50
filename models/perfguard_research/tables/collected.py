"""The table that `perfguard collect` writes: one row a measured run, rebuilt from its recipe (docs/collect.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from perfguard.devices import Device, resolve_device
from perfguard.exceptions import ConfigurationError, TableError
from perfguard.workload import Layout, Precision, Tf32, Workload
from perfguard_research.tables.csv import Row, scaled, share, text
from perfguard_research.tables.recipe import Recipe
from perfguard_research.tables.rows import MIB, MeasuredRow

COLUMNS = ("recipe", "gpu", "space", "memory_share")
"""Columns that identify a table of collected rows. A row can be rebuilt from its recipe alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedRow(MeasuredRow):
    """One measured run of one's own."""

    recipe: Recipe
    step_energy_j: float | None = None
    """Joules of one step, by the driver's counter."""
    figures: Device | None = field(default=None, hash=False)
    """The device, if the catalog does not have it."""

    @property
    def device(self) -> Device:
        """The device of the run, as it was measured or as the catalog has it."""
        return resolve_device(self.gpu) if self.figures is None else self.figures

    @property
    def structure(self) -> tuple[Any, ...]:
        """Key of the row without the batch and the GPU."""
        return (self.recipe.structure,)

    @property
    def precision(self) -> Precision:
        """Precision of the step."""
        return self.recipe.precision

    @property
    def tf32(self) -> Tf32:
        """Where TF32 was used."""
        return self.recipe.tf32

    @property
    def layout(self) -> Layout:
        """Memory layout of images."""
        return self.recipe.layout

    @property
    def compiled(self) -> bool:
        """Whether torch.compile was used."""
        return self.recipe.compiled

    def make_model(self) -> nn.Module:
        """The recipe's network."""
        return self.recipe.make_model()

    def workload(self, model: nn.Module) -> Workload:
        """The workload of the row."""
        return self.recipe.workload(model)


def collected_row(row: Row) -> CollectedRow:
    """One row of a table of collected runs, checked.

    Raises:
        TableError: naming the column that cannot be right.
    """
    recipe = Recipe.from_json(text(row, "recipe"))
    return CollectedRow(
        source=row.get("source") or "collected",
        model=recipe.model,
        family=recipe.family,
        mode=recipe.mode,
        gpu=text(row, "gpu"),
        batch_size=recipe.batch_size,
        recipe=recipe,
        framework=row.get("framework") or "",
        capacity_bytes=scaled(row, "memory_limit_mib", MIB),
        step_time_s=scaled(row, "step_time_ms", 1e-3),
        peak_memory_bytes=scaled(row, "peak_memory_mib", MIB),
        gpu_util=share(row, "gpu_util", 100),
        step_energy_j=scaled(row, "step_energy_j", 1.0),
        status=(row.get("status") or "ok").lower(),
        figures=_figures(row, text(row, "gpu")),
    )


def _figures(row: Row, gpu: str) -> Device | None:
    if not (written := row.get("device")):
        return None
    try:
        device = Device(**json.loads(written))
    except (ValueError, TypeError, AttributeError, ConfigurationError) as error:
        raise TableError(f"column 'device' must be a device as `perfguard collect` writes it: {error}") from error
    if device.id != gpu or device.kind not in ("cpu", "cuda"):
        raise TableError(f"column 'device' has the figures of {device.id!r} ({device.kind}), but column 'gpu' has {gpu!r}")
    return device

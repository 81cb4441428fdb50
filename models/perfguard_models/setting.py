"""The setting of a step: how it runs, apart from its sizes. Intervals are calibrated by setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfguard_models.calibration import OPERATOR

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Setting:
    """A step's device, mode and switches, and what kind of network it is."""

    device_id: str
    mode: str
    """"train" or "infer"."""
    precision: str
    layout: str
    """"nchw" or "nhwc"; it matters to convolutions alone."""
    compiled: bool
    has_convolutions: bool
    is_single: bool
    """Whether the step is one operator, as in tables of single operators."""

    @classmethod
    def of(cls, graph: OpGraph, device: Device) -> Setting:
        """The setting of ``graph`` on ``device``."""
        return cls(
            device_id=device.id,
            mode=graph.mode,
            precision=graph.precision,
            layout=graph.layout,
            compiled="compiled" in graph.options,
            has_convolutions="conv" in graph.kinds,
            is_single=len(graph.skeleton.ops) == 1,
        )

    @property
    def is_perceptron(self) -> bool:
        """Whether it is like the perceptrons of the tables, whose utilisation was measured: no convolution, several operators."""
        return not (self.has_convolutions or self.is_single)

    @property
    def group(self) -> str:
        """The group of runs that it is calibrated with, as calibrations name it."""
        if self.is_single:
            return OPERATOR
        words = [self.device_id, self.mode, self.precision]
        words += [self.layout] if self.has_convolutions else []
        words += ["compiled"] if self.compiled else []
        words += ["with convolutions"] if self.has_convolutions else []
        return " ".join(words)

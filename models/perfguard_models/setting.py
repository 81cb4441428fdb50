"""The setting of a step: how it runs, apart from its sizes. Intervals are calibrated by setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from perfguard.devices import Device
from perfguard.graph import OpGraph
from perfguard_models.calibration import OPERATOR


@dataclass(frozen=True, slots=True)
class Setting:
    """A step's device, mode and switches, and what kind of network it is."""

    device_id: str
    mode: str
    """"train" or "infer"."""
    precision: str
    arithmetic: str
    """The precision; of float32 on a GPU with TF32 also "tf32" or "no-tf32" where it is not PyTorch's default."""
    layout: str
    """"nchw" or "nhwc"; it matters to convolutions alone."""
    compiled: bool
    has_convolutions: bool
    has_recurrent_layers: bool
    """Whether it has operators whose time steps wait for one another. A GRU on a CPU has none: it is small operators."""
    is_single: bool
    """Whether it is an operator of a table of single operators, and no step."""

    @classmethod
    def of(cls, graph: OpGraph, device: Device) -> Setting:
        """The setting of ``graph`` on ``device``."""
        return cls(
            device_id=device.id,
            mode=graph.mode,
            precision=graph.precision,
            arithmetic=arithmetic_of(graph.precision, graph.options, device),
            layout=graph.layout,
            compiled="compiled" in graph.options,
            has_convolutions="conv" in graph.kinds,
            has_recurrent_layers="rnn" in graph.kinds,
            is_single=not {"operator", "kernel"}.isdisjoint(graph.options),
        )

    @property
    def timed_as(self) -> str:
        """How the card of the weights names the setting among those with measured step times."""
        return f"{self.device_id} {self.mode} {self.arithmetic}"

    @property
    def variant(self) -> str:
        """Arithmetic, layout and "compiled", for reports by group."""
        return " ".join([self.arithmetic, self.layout, *(["compiled"] if self.compiled else [])])

    @property
    def group(self) -> str:
        """The group of runs that it is calibrated with, as calibrations name it."""
        if self.is_single:
            return OPERATOR
        words = [self.device_id, self.mode, self.precision]
        words += [self.layout] if self.has_convolutions else []
        words += ["compiled"] if self.compiled else []
        words += ["with convolutions"] if self.has_convolutions else []
        words += ["with recurrent layers"] if self.has_recurrent_layers else []
        return " ".join(words)


def timed_as_any(graph: OpGraph, device: Device) -> frozenset[str]:
    """Return the names in the card of every setting in which ``device`` computes ``graph`` as in its own.

    PyTorch's default is the same as "no-tf32" in a step without convolutions and recurrent layers, and the same as "tf32" in one
    without matrix products. On a device that is no faster in TF32, all three are the same.
    """
    own = Setting.of(graph, device)
    is_faster = device.flops_per_s("tf32") > device.flops_per_s("fp32")
    differs_in = {"fp32": (), "no-tf32": ("conv", "rnn"), "tf32": ("matmul", "attention")}
    as_default = {one for one, kinds in differs_in.items() if not is_faster or graph.kinds.isdisjoint(kinds)}
    same = as_default if own.arithmetic in as_default else {own.arithmetic}
    return frozenset(dataclasses.replace(own, arithmetic=one).timed_as for one in same)


def arithmetic_of(precision: str, options: Collection[str], device: Device) -> str:
    """The arithmetic of a step with these options; see :attr:`Setting.arithmetic`."""
    chosen = "tf32" if "tf32" in options else "no-tf32" if "no-tf32" in options else "fp32"
    return chosen if precision == "fp32" and "tf32" in device.peak_flops else precision

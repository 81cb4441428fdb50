"""The setting of a step, and the errors of a predictor by setting: split-conformal intervals for runs that it has not seen.

A score is |measured - predicted| over a difficulty, in logarithms. The difficulty is the spread of the predictor's members, and
at least a floor. The quantile of the scores of held-out runs gives intervals that hold for exchangeable runs (Vovk et al. 2005).
Scores over a difficulty are from Lei et al. 2018, section 5.2. Groups are quantity, GPU and mode where there are enough runs, and
quantity alone elsewhere. Unseen GPUs have a group of their own, from folds in which a GPU was held out. Single operators have
their own groups, because they are many and their errors would outnumber those of whole steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from perfguard.devices import Device
from perfguard.graph import OpGraph

NEW_GPU = "new gpu"
CPU = "cpu"
"""Begins the groups of CPUs, and is the group of those without a scale of their own."""
OPERATOR = "operator"
"""The group of single operators."""


def on_new_gpu(group: str) -> str:
    """The group that replaces ``group`` on a GPU without training rows."""
    return f"{NEW_GPU} {OPERATOR}" if group == OPERATOR else NEW_GPU


class Calibration(NamedTuple):
    """Converts a spread into a standard deviation."""

    floor: Mapping[str, float]
    """By target: a spread counts as at least so much, because members can agree by chance."""
    scale: Mapping[str, float]
    """Scales by "target", for groups without a scale of their own, and by "target/group"."""

    def scale_of(self, target: str, group: str, *, known_gpu: bool = True) -> float | None:
        """Factor on the difficulty of a run of ``group``; None: there were no runs to fit it to."""
        others = self.scale.get(f"{target}/{CPU}") if group.startswith(CPU) else None
        others = self.scale.get(target) if others is None else others
        return self.scale.get(f"{target}/{group if known_gpu else on_new_gpu(group)}", others)

    def log_sigma(self, target: str, group: str, spread: float, *, known_gpu: bool = True) -> float:
        """The standard deviation whose central 90% holds."""
        scale = self.scale_of(target, group, known_gpu=known_gpu)
        difficulty = math.hypot(spread if math.isfinite(spread) else 0.0, self.floor.get(target, 0.1))
        return (1.0 if scale is None else scale) * difficulty


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
        arithmetic = graph.precision
        if graph.precision == "fp32" and "tf32" in device.peak_flops:
            arithmetic = next((option for option in ("tf32", "no-tf32") if option in graph.options), "fp32")
        return cls(
            device_id=device.id,
            mode=graph.mode,
            precision=graph.precision,
            arithmetic=arithmetic,
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

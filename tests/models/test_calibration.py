"""The setting of a step: which measured runs say how sure its prediction is."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import OpGraph, Workload, resolve_device, trace
from perfguard_models.calibration import Setting, timed_as_any

GPU = resolve_device("rtx3090")


def graph_of(*layers: nn.Module, inputs: tuple[int, ...], **fields: Any) -> OpGraph:
    loss = {"loss": lambda y: y.float().mean()} if fields.get("mode") == "train" else {}
    return trace(Workload(nn.Sequential(*layers), inputs, **{"mode": "infer"} | fields | loss))


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(8, 8), (2, 8)),
    "conv": (nn.Conv2d(3, 8, 3), (2, 3, 8, 8)),
    "both": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 8)), (2, 3, 8, 8)),
    "neither": (nn.ReLU(), (2, 8)),
}


@pytest.mark.parametrize(
    ("gpu", "network", "same"),
    [
        ("a100", "linear", [{"fp32", "no-tf32"}, {"tf32"}]),  # by default, products are not in TF32
        ("a100", "conv", [{"fp32", "tf32"}, {"no-tf32"}]),  # and convolutions are
        ("a100", "both", [{"fp32"}, {"tf32"}, {"no-tf32"}]),
        ("a100", "neither", [{"fp32", "tf32", "no-tf32"}]),
        ("rtx4090", "both", [{"fp32", "tf32", "no-tf32"}]),  # TF32 is no faster there
        ("t4", "both", [{"fp32", "tf32", "no-tf32"}]),  # it has none
    ],
)
def test_timed_as_any_names_settings_of_the_same_arithmetic(gpu: str, network: str, same: list[set[str]]) -> None:
    # A step that is computed alike in two settings must not be known in one and unknown in the other.
    device = resolve_device(gpu)
    model, inputs = LAYERS[network]
    found = {name: timed_as_any(graph_of(model, inputs=inputs, tf32=name), device) for name in ("default", "on", "off")}
    expected = [frozenset(f"{device.id} infer {one}" for one in alike) for alike in same]
    assert set(found.values()) == set(expected)
    assert Setting.of(graph_of(model, inputs=inputs, tf32="on"), device).timed_as in found["on"]


def test_shipped_calibration_groups_are_settings() -> None:
    # The card names groups by text; a renamed word would silently fall back to the interval of all runs.
    card = json.loads((files("perfguard_models") / "weights" / "step-time.json").read_text(encoding="utf-8"))
    groups = {name.partition("/")[2] for name in card["calibration"]["scale"] if name.startswith("time/")}
    with torch.device("meta"):
        layers = nn.Conv2d(3, 8, 3), nn.ReLU()
    made = {
        Setting.of(graph_of(*layers, inputs=(2, 3, 8, 8), mode=mode, precision="amp-fp16", layout=layout), GPU).group
        for mode, layout in (("train", "nchw"), ("train", "nhwc"), ("infer", "nchw"), ("infer", "nhwc"))
    }
    assert made <= groups

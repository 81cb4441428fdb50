"""A workload says what is wrong with it, and a user's ``build`` is called so that it allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.exceptions import BuildError, WorkloadError
from perfguard.graph import trace
from perfguard.workload import TensorSpec, Workload, build_workload
from tests.warm import run_fresh


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(nn.Sequential(nn.Linear(8, params["width"]), nn.Dropout(0.1)), inputs=(4, 8))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "training", "Workload.mode must be one of train, infer, but got 'training'"),
        ("precision", "fp8", "Workload.precision must be one of fp32, .* but got 'fp8'"),
        ("precision", "tf32", 'but got \'tf32\'. TF32 is a way to compute fp32: give precision="fp32", tf32="on"'),
        ("tf32", True, "Workload.tf32 must be one of default, on, off, but got True"),
        ("layout", "NHWC", "Workload.layout must be one of nchw, nhwc, but got 'NHWC'"),
        ("accumulation", 0, "Workload.accumulation must be a whole number of at least 1, but got 0"),
        ("steps", "10", "Workload.steps must be a whole number of at least 1 or None, but got '10'"),
        ("steps_per_epoch", -1, "Workload.steps_per_epoch must be a whole number of at least 1 or None, but got -1"),
    ],
)
def test_a_field_that_cannot_be_right_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Workload(nn.Linear(2, 2), (1, 2), **{field: value})


SWITCHES = {
    "pass": "default",
    "torch.set_float32_matmul_precision('high')": "on",
    "torch.set_float32_matmul_precision('medium')": "on",
    "torch.backends.cuda.matmul.allow_tf32 = True": "on",
    "torch.backends.cudnn.allow_tf32 = False": "off",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "on",
    "torch.backends.fp32_precision = 'ieee'": "off",
    "torch.set_float32_matmul_precision('high'); torch.backends.cudnn.conv.fp32_precision = 'ieee'": "on",
}


def test_tf32_is_what_pytorchs_switches_say() -> None:
    """Each in a process of its own, since a switch that was set cannot be made unset. Some of these read as errors elsewhere."""
    code = f"""
import os, torch
from perfguard import Workload
for switch in {list(SWITCHES)!r}:
    if os.fork() == 0:
        exec(switch)
        print(Workload(torch.nn.Linear(2, 2), (1, 2)).tf32, flush=True)
        os._exit(0)
    os.wait()
"""
    assert dict(zip(SWITCHES, run_fresh("-c", code).split(), strict=True)) == SWITCHES


@pytest.mark.parametrize("shape", [(-1, 3), (2.0, 3), (True,)])
def test_a_shape_holds_sizes(shape: tuple[Any, ...]) -> None:
    with pytest.raises(WorkloadError, match=r"TensorSpec\.shape must hold integers of at least 0"):
        TensorSpec(shape)


def test_sizes_of_numpy_are_sizes() -> None:
    # A search space may draw them; they must not be taken for several inputs.
    assert TensorSpec((np.int64(4),)) == TensorSpec((4,))  # type: ignore[arg-type]
    workload = Workload(nn.Linear(8, 2), (np.int64(4), 8), mode="infer")
    assert trace(workload).content_hash == trace(Workload(nn.Linear(8, 2), (4, 8), mode="infer")).content_hash
    with pytest.raises(WorkloadError, match=r"A shape has whole numbers, but got \(32\.0, 8\)\. Use int"):
        trace(Workload(nn.Linear(8, 2), (32.0, 8), mode="infer"))


def reads_a_value(params: Mapping[str, Any]) -> Workload:
    scale = float(torch.ones(3).sum())  # impossible on meta
    return build({"width": int(scale) * int(params["width"])})


@pytest.mark.parametrize(("builder", "device", "width"), [(build, "meta", 4), (reads_a_value, "cpu", 12)])
def test_build_runs_on_meta_where_it_can(builder: Any, device: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws none of the study's random numbers, and what it misses stays a KeyError."""
    monkeypatch.setattr("threading.active_count", lambda: 1)  # libraries that other tests used leave threads behind
    state = torch.random.get_rng_state()
    parameter = next(build_workload(builder, {"width": 4}).model.parameters())
    assert (parameter.device.type, parameter.shape) == (device, (width, 8))
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(KeyError, match="width"):
        build_workload(builder, {"lr": 0.1})


def test_another_key_error_is_the_fault_of_build() -> None:
    def wrong(params: Mapping[str, Any]) -> Workload:
        return {"a": build(params)}[params["name"]]

    with pytest.raises(KeyError, match="b"):  # "b" could be the name of a parameter
        build_workload(wrong, {"name": "b", "width": 2})
    with pytest.raises(BuildError, match="raised KeyError: 'name'"):
        build_workload(wrong, {"name": "name", "width": 2})


def test_what_build_raises_is_told_with_the_parameters() -> None:
    def wrong(params: Mapping[str, Any]) -> Workload:
        raise RuntimeError("no such backbone")

    with pytest.raises(BuildError, match=r"build\({'depth': 3}\) raised RuntimeError: no such backbone") as caught:
        build_workload(wrong, {"depth": 3})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_missing_optimizer_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain SGD needs 2.4 GiB where AdamW needs 5.4, and nothing said which of them was meant."""
    said: list[tuple[str, str]] = []
    monkeypatch.setattr("perfguard.workload.log_once", lambda topic, message: said.append((topic, message)))
    for params in ({"optimizer": torch.optim.SGD}, {}):
        build_workload(lambda given: Workload(nn.Linear(2, 2), (1, 2), loss=torch.mean, **given), params)
    ((topic, message),) = said
    assert topic == "no optimizer"
    assert "judged with SGD without momentum" in message

"""Code that asks a tensor where it is takes the branch that it takes in a trial. Otherwise another step is judged, in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.graph.op import StorageKind

A100, CPU = resolve_device("a100"), resolve_device("cpu")
_FIRST = torch.device("cuda:0")

ON_GPU: dict[str, Callable[[torch.Tensor], bool]] = {
    "its type": lambda x: x.device.type == "cuda",
    "its index": lambda x: x.device.index == 0 and x.get_device() == 0 and torch.get_device(x) == 0,
    "equality": lambda x: x.device == _FIRST and x.device in {_FIRST} and x.device != torch.device("cpu"),
    "its name": lambda x: str(x.device) == "cuda:0" and f"{x.device}".startswith("cuda"),
    "a property": lambda x: x.is_cuda and not x.is_cpu and x.is_meta,
    "its legacy type": lambda x: x.type() == "torch.cuda.FloatTensor" and x.half().type() == "torch.cuda.HalfTensor",
    "what is made beside it": lambda x: torch.zeros(3, device=x.device).device == x.new_zeros(2).device == x.device,
    "what is moved to it": lambda x: torch.zeros(3).to(x.device).is_cuda and torch.zeros(3).to(x).is_cuda,
    "what comes back": lambda x: x.cpu().device.type == "cpu" and not x.cpu().is_cuda and not torch.zeros(2).is_cuda,
    "what is made on meta by name": lambda x: torch.empty(2, device="meta").is_meta and _on_meta().device.type == "meta",
    "autocast": lambda x: _product_dtype(x) is torch.bfloat16,
}


def _on_meta() -> torch.Tensor:
    with torch.device("meta"):
        return nn.Linear(2, 2).weight


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x @ x.T).dtype


def _trains(look: Callable[[dict[str, torch.Tensor]], object], *, device: str = "cuda") -> None:
    """Train a layer, and look at its tensors in each step: of a batch, a parameter, a gradient, a state, in hooks."""
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model.register_forward_hook(lambda _, __, output: look({"output": output}))
    for _ in range(3):
        x = torch.randn(4, 8).to(device)
        output = model(x)
        output.register_hook(lambda gradient: look({"gradient of the output": gradient}))
        output.square().mean().backward()
        optimizer.step()
        weight: Any = model.weight
        look({"batch": x, "parameter": weight, "gradient": weight.grad, "state": optimizer.state[weight]["exp_avg"]})
        optimizer.zero_grad()


@pytest.mark.parametrize("question", ON_GPU)
def test_a_tensor_on_the_device_says_that_it_is_on_the_gpu(question: str) -> None:
    answers: dict[str, bool] = {}

    def look(tensors: dict[str, torch.Tensor]) -> None:
        answers.update({name: ON_GPU[question](tensor) for name, tensor in tensors.items()})

    capture(lambda: _trains(look), A100)
    assert len(answers) == 6
    assert all(answers.values()), answers


def test_a_tensor_of_a_guarded_cpu_says_that_it_is_on_the_cpu() -> None:
    answers: list[bool] = []

    def look(tensors: dict[str, torch.Tensor]) -> None:
        answers.extend(
            x.device.type == "cpu" and x.is_cpu and not x.is_cuda and x.get_device() == -1 and x.type() == "torch.FloatTensor"
            for x in tensors.values()
        )

    capture(lambda: _trains(look, device="cpu"), CPU)
    assert answers
    assert all(answers)


def test_the_layer_that_only_a_gpu_has_is_counted() -> None:
    def objective() -> None:
        x = torch.randn(8, 256).to("cuda")
        model = nn.Linear(256, 256 if x.device.type == "cuda" else 1).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    storages = capture(objective, A100).graph.storages
    assert sum(one.num_bytes for one in storages if one.kind is StorageKind.PARAMETER) == 4 * 257 * 256


def test_legacy_types_make_convert_and_find_tensors_of_the_device() -> None:
    def objective() -> None:
        assert torch.cuda.is_available()
        floats: Any = torch.cuda.FloatTensor  # type: ignore[attr-defined]
        longs: Any = torch.cuda.LongTensor  # type: ignore[attr-defined]
        model = nn.Linear(8, 4).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            x: Any = torch.randn(16, 8).type(floats)
            ones: Any = floats(16, 4).fill_(1.0)
            labels: Any = longs(np.arange(16) % 4)
            assert isinstance(x, floats)
            assert isinstance(ones, floats)
            assert not isinstance(labels, floats)
            assert not isinstance(torch.zeros(2), floats)
            assert int(labels.max()) == 3
            assert floats([1, 2]).tolist() == [1, 2]
            assert floats(x.size()).shape == (16, 8)
            assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype is torch.float16
            assert not x.type(torch.FloatTensor).is_cuda
            output = model(x)
            (nn.functional.mse_loss(output, ones) + nn.functional.cross_entropy(output, labels)).backward()
            optimizer.step()
            optimizer.zero_grad()

    sizes = [one.num_bytes for one in capture(objective, A100).graph.storages if one.kind is StorageKind.INPUT]
    assert {4 * 16 * 8, 8 * 16} <= set(sizes)


def test_a_legacy_type_is_the_default_of_what_names_no_device() -> None:
    def objective() -> None:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        try:
            model = nn.Linear(8, 4)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                x = torch.randn(16, 8)
                assert x.is_cuda
                model(x).mean().backward()
                optimizer.step()
        finally:
            torch.set_default_device(None)

    assert capture(objective, A100).steps == 3


class _WithData(nn.Module):
    """Weights that are assigned as data of the host, before the module is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.data = torch.eye(8)
        self.late = nn.Parameter(torch.empty(0))
        self.late.data = torch.zeros(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.late  # type: ignore[no-any-return]


def test_data_of_the_host_are_assigned_to_a_parameter_and_data_of_the_device_to_a_tensor_of_the_host() -> None:
    def objective() -> None:
        model = _WithData().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            x = torch.zeros(2)
            x.note = "kept"  # type: ignore[attr-defined]
            x.data = torch.ones(4, 8, device="cuda")
            assert x.is_cuda
            assert x.note == "kept"  # type: ignore[attr-defined]
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    storages = capture(objective, A100).graph.storages
    assert sorted(one.num_bytes for one in storages if one.kind is StorageKind.PARAMETER) == [32, 96, 256]

"""What torch.compile wraps is seen, is traced as it was written, and is compiled afterwards as if there had been no trace."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from perfguard import predict
from perfguard.devices import resolve_device
from perfguard.graph import trace
from perfguard.graph.cache import structure_of
from perfguard.graph.kernels import target_of
from perfguard.unmodelled import PARTS_TRACED_AS_EAGER, TRACED_AS_EAGER
from perfguard.workload import Workload

SHAPE = (16, 8)
TRAIN: dict[str, Any] = {"loss": torch.mean, "optimizer": torch.optim.AdamW}
MODES: list[dict[str, Any]] = [{"mode": "infer"}, TRAIN]
each_mode = pytest.mark.parametrize("options", MODES, ids=["infer", "train"])
each_device = pytest.mark.parametrize("device", ["cpu", "meta"])
compiled_graphs: list[torch.fx.GraphModule] = []


def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A compiler that counts what it is given, and compiles nothing."""
    compiled_graphs.append(graph)
    return graph.forward


compiles: Any = functools.partial(torch.compile, backend=backend)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    compiled_graphs.clear()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.last(torch.relu(self.first(x))))


class Wrapper(nn.Module):
    """As DistributedDataParallel: it holds one module, and no parameters of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(x)
        return output


def compiled_in_place(**options: Any) -> nn.Module:
    model = Net()
    model.compile(backend=backend, **options)
    return model


def compiled_by_lightning(**options: Any) -> nn.Module:
    """As after `import lightning`, which replaces torch.compile by its own."""
    model: nn.Module = compiles(Net(), **options)
    vars(model._modules["_orig_mod"])["_compile_kwargs"] = {"backend": backend, **options}
    return model


WHOLE: dict[str, Callable[..., nn.Module]] = {
    "torch.compile(model)": lambda **options: compiles(Net(), **options),
    "torch.compile(model) of Lightning": compiled_by_lightning,
    "model.compile()": compiled_in_place,
}
INNER: dict[str, Callable[..., nn.Module]] = {"wrapped": lambda **options: Wrapper(compiles(Net(), **options))}


class OwnForward(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.forward = compiles(self.forward, **options)  # type: ignore[method-assign]


class OwnFunction(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.activation = compiles(lambda x: x.relu(), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.last(self.activation(self.first(x))))


@compiles  # type: ignore[untyped-decorator]
def global_activation(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


class GlobalFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.last(global_activation(self.first(x))))


def with_compiled_part(**options: Any) -> nn.Module:
    model = Net()
    model.first = compiles(model.first, **options)
    return model


PARTS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "submodule": (with_compiled_part, "first"),
    "own forward": (OwnForward, "forward"),
    "own function": (OwnFunction, "activation"),
    "global function": (GlobalFunction, "global_activation"),
}


def made_on(device: str, make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    with torch.device(device):
        return make(**options)


@each_mode
@each_device
@pytest.mark.parametrize("name", [*WHOLE, *INNER])
def test_compiled_model_is_the_workload_that_says_so(name: str, device: str, options: Any) -> None:
    seen = Workload(made_on(device, (WHOLE | INNER)[name]), SHAPE, **options)
    said = Workload(made_on(device, Net if name in WHOLE else lambda: Wrapper(Net())), SHAPE, compiled=True, **options)
    assert seen.compiled
    assert type(seen.model) is type(said.model)
    graph = trace(seen)
    assert graph.content_hash == trace(said).content_hash
    assert graph.options == ("compiled",)
    assert graph.unmodelled == (TRACED_AS_EAGER,)
    if device == "meta":  # others are not cached
        assert structure_of(seen, target_of("cuda")) == structure_of(said, target_of("cuda"))
    assert predict(seen, gpu="a100") == predict(said, gpu="a100")
    assert not compiled_graphs


def test_compiled_model_counts_whatever_is_said() -> None:
    assert Workload(compiles(Net()), SHAPE, compiled=False).compiled
    assert not Workload(Net(), SHAPE).compiled
    assert not Workload(compiles(Net(), disable=True), SHAPE).compiled
    assert not Workload(torch.compiler.disable(Net()), SHAPE).compiled


@each_mode
@each_device
@pytest.mark.parametrize(("make", "path"), PARTS.values(), ids=PARTS)
def test_compiled_part_is_traced_as_eager_and_named(make: Callable[..., nn.Module], path: str, device: str, options: Any) -> None:
    graph = trace(Workload(made_on(device, make), SHAPE, **options))
    assert graph.options == ()
    assert graph.unmodelled == (PARTS_TRACED_AS_EAGER.of(path),)
    eager = trace(Workload(made_on(device, Net), SHAPE, **options))
    assert replace(graph, unmodelled=()).content_hash == eager.content_hash
    assert not compiled_graphs


def test_code_that_is_not_compiled_is_not_named() -> None:
    model = Net()
    model.first = torch.compiler.disable(model.first)
    model.last.forward = torch.compiler.disable(model.last.forward)  # type: ignore[method-assign]
    assert trace(Workload(model, SHAPE, mode="infer")).unmodelled == ()


@each_device
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("make", [*WHOLE.values(), *INNER.values(), with_compiled_part, OwnForward, OwnFunction])
def test_trace_does_not_keep_code_from_being_compiled(make: Callable[..., nn.Module], fullgraph: bool, device: str) -> None:
    """A compiler that meets the modes of a trace skips the code for good; with fullgraph it would raise an error later."""
    model = made_on(device, make, fullgraph=fullgraph)
    trace(Workload(model, SHAPE, mode="infer"))
    assert not compiled_graphs
    with torch.no_grad():
        model(torch.ones(SHAPE, device=device))
    assert len(compiled_graphs) == 1


def test_code_is_compiled_after_overlapping_traces() -> None:
    """The switch of the compiler is one of the process."""
    inside, leave = threading.Event(), threading.Event()

    class Waiting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            leave.wait(60)
            return super().forward(x)

    first = threading.Thread(target=trace, args=(Workload(Waiting(), SHAPE, mode="infer"),))
    first.start()
    assert inside.wait(60)
    model = compiles(Net())
    trace(Workload(model, SHAPE, mode="infer"))
    leave.set()
    first.join()
    model(torch.ones(SHAPE))
    assert len(compiled_graphs) == 1


def test_compiled_model_stays_as_it_was() -> None:
    model = compiles(made_on("meta", Net)).eval()
    before = dict(vars(model)), dict(vars(model._orig_mod))
    trace(Workload(model, SHAPE, **TRAIN), target=resolve_device("a100"))
    assert (dict(vars(model)), dict(vars(model._orig_mod))) == before

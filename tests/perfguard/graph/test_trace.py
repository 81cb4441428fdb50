"""Tracing: what a step launches, what lives when, and that nothing of the user's is touched."""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from perfguard.exceptions import TraceError, WorkloadError
from perfguard.graph import OpGraph, Phase, StorageKind, trace
from perfguard.workload import Retain, TensorSpec, Workload, ZeroGrad
from tests.models import oracle
from tests.perfguard.graph.parts import Apply, RealBytes, total

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "norm": lambda: nn.BatchNorm2d(8),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "pool": lambda: nn.MaxPool2d(3, 1, 1),
    "dropout": lambda: nn.Dropout(0.5),
}
layers = st.lists(st.sampled_from(sorted(LAYERS)), max_size=6)
optimizers = st.sampled_from([None, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW])
modes = st.sampled_from(["train", "infer"])


def image_net(names: list[str], *, batch: int = 2, **options: Any) -> Workload:
    with torch.device("meta"):
        body = [LAYERS[name]() for name in names]
        model = nn.Sequential(nn.Conv2d(3, 8, 1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return Workload(model, (batch, 3, 8, 8), TensorSpec((batch,), "int64"), F.cross_entropy, **options)


def mlp(device: str = "cpu") -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)


def names(graph: OpGraph, phase: Phase) -> list[str]:
    return [op.name for op in graph.ops if op.phase is phase]


def test_the_step_of_a_two_layer_perceptron_by_hand() -> None:
    graph = trace(Workload(mlp(), (32, 8), loss=total))
    assert names(graph, Phase.FORWARD) == ["addmm", "relu", "addmm", "sum"]
    assert names(graph, Phase.BACKWARD) == ["ones_like", "mm", "mm", "sum", "threshold_backward", "mm", "sum"]
    assert names(graph, Phase.OPTIMIZER) == ["_foreach_add_"]
    assert graph.ops[graph.peak_index].name == "threshold_backward"
    scalar, hidden, outputs = 4, 4 * 32 * 16, 4 * 32 * 4
    assert {kind: num_bytes for kind, num_bytes in graph.bytes_by_kind().items() if num_bytes} == {
        StorageKind.PARAMETER: 4 * (8 * 16 + 16 + 16 * 4 + 4),
        StorageKind.INPUT: 4 * 32 * 8,
        StorageKind.GRADIENT: 4 * (16 * 4 + 4),  # of the second layer
        StorageKind.ACTIVATION: hidden + outputs + scalar,  # relu's output, what the loop keeps, and the loss
        StorageKind.TEMPORARY: 2 * hidden + scalar,  # gradients of relu's output and input, and of the loss
    }
    assert graph.peak_live_bytes == 848 + 1024 + 272 + 2564 + 4100
    assert graph.bytes_by_kind(len(graph.ops) - 1)[StorageKind.GRADIENT] == 848


def _loop(model: nn.Module, zero_grad: str, retain: str) -> int:
    """The peak of the third step of a real loop on the processor."""
    inputs, optimizer = torch.ones(32, 8), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    kept, live = list[torch.Tensor](), RealBytes()
    with live:
        for _ in range(3):
            live.most = 0
            if zero_grad == "before-forward":
                optimizer.zero_grad()
            output = model(inputs)
            kept.clear()  # the names are bound anew
            loss = output.sum()
            if retain == "outputs":
                kept += [output, loss]
            del output
            if zero_grad == "before-backward":
                optimizer.zero_grad()
            loss.backward()
            del loss
            optimizer.step()
            if zero_grad == "after-step":
                optimizer.zero_grad()
    return live.most


@pytest.mark.parametrize("retain", get_args(Retain))
@pytest.mark.parametrize("zero_grad", get_args(ZeroGrad))
@pytest.mark.parametrize("wide", ["hidden", "outputs"])
def test_peak_is_that_of_a_real_loop(wide: str, zero_grad: ZeroGrad, retain: Retain) -> None:
    hidden, outputs = (64, 4) if wide == "hidden" else (4, 500)
    model = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
    workload = Workload(model, (32, 8), loss=total, optimizer=optimizer, zero_grad=zero_grad, retain=retain)
    assert trace(workload, target="cpu").peak_live_bytes == _loop(model, zero_grad, retain)


def test_inference_keeps_the_outputs_of_the_last_batch() -> None:
    model = nn.Linear(8, 4096)
    kept, dropped = (trace(Workload(model, (64, 8), mode="infer", retain=retain)) for retain in ("outputs", "nothing"))
    assert kept.peak_live_bytes == dropped.peak_live_bytes + 64 * 4096 * 4


def test_forward_operators_know_their_module() -> None:
    graph = trace(Workload(mlp(), (32, 8), loss=total))
    assert [op.module for op in graph.ops[:4]] == ["0", "1", "2", ""]
    assert {storage.module for storage in graph.storages if storage.kind is StorageKind.GRADIENT} == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip


def test_backward_operators_know_their_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), nn.Flatten(), nn.Linear(144, 4))
    graph = trace(Workload(model, (8, 3, 5, 5), loss=total))
    backward = {op.name: op.module for op in graph.ops if op.phase is Phase.BACKWARD}
    assert backward["convolution_backward"] == "0.0"
    assert backward["native_batch_norm_backward"] == "0.1"
    assert backward["threshold_backward"] == "0.2"
    assert backward["mm"] == "2"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("converted", [{}, {"precision": "bf16", "layout": "nhwc"}], ids=["as it is", "converted"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_model_of_the_user_stays_as_it_was(device: str, converted: Any, training: bool, fails: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.Linear(288, 4)).to(device)
    model.train(training)
    model[1].eval()  # a part that is frozen
    before = dict(model.state_dict(keep_vars=True))
    flags = [module.training for module in model.modules()]
    layout = [tensor.stride() for tensor in before.values()]
    random_state = torch.random.get_rng_state()
    workload = Workload(model, (2, 3, 8, 8), loss=None if fails else total, optimizer=torch.optim.Adam, **converted)
    if fails:
        with pytest.raises(TraceError):
            trace(workload)
    else:
        trace(workload)
    after = dict(model.state_dict(keep_vars=True))
    assert all(after[name] is tensor and tensor.device.type == device for name, tensor in before.items())
    assert {tensor.dtype for tensor in after.values() if tensor.is_floating_point()} == {torch.float32}
    assert [tensor.stride() for tensor in after.values()] == layout
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == flags
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_cpu_and_meta_models_make_the_same_graph() -> None:
    hashes = {trace(Workload(mlp(device), (32, 8), loss=total)).content_hash for device in ("cpu", "meta")}
    assert len(hashes) == 1


def test_uncopyable_model_is_traced_on_meta() -> None:
    """It is traced in place of a copy."""

    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("a lock cannot be copied")

    with torch.device("meta"):
        model = Uncopyable(8, 4)
    assert trace(Workload(model, (2, 8), loss=total)).ops
    assert trace(Workload(model, (2, 8), loss=total, precision="bf16")).ops[0].dtype == "bfloat16"
    with pytest.raises(TraceError, match=r"Uncopyable cannot be copied .*Build it under .*meta"):
        trace(Workload(Uncopyable(8, 4), (2, 8), loss=total))


def test_tied_weights_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 100, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.head(self.embedding(tokens))
            return output

    graph = trace(Workload(Tied(), TensorSpec((2, 5), "int64"), loss=total, optimizer=torch.optim.Adam))
    at_the_end = graph.bytes_by_kind(len(graph.ops) - 1)
    assert at_the_end[StorageKind.PARAMETER] == 4 * 100 * 16
    assert at_the_end[StorageKind.OPTIMIZER_STATE] == 2 * 4 * 100 * 16
    assert at_the_end[StorageKind.GRADIENT] == 4 * 100 * 16


def test_live_optimizer_is_traced_and_left_alone() -> None:
    """Its graph is that of its class."""
    model = mlp()
    live = torch.optim.AdamW(model.parameters(), lr=0.1)
    graph = trace(Workload(model, (32, 8), loss=total, optimizer=live))
    made = trace(Workload(model, (32, 8), loss=total, optimizer=functools.partial(torch.optim.AdamW, lr=0.1)))
    assert graph.content_hash == made.content_hash
    assert not live.state
    assert live.param_groups[0]["foreach"] is None
    assert live.param_groups[0]["params"][0] is model[0].weight


def test_inference_has_no_gradients_and_no_later_phase() -> None:
    graph = trace(image_net(["norm", "dropout", "relu"], mode="infer"))
    assert {op.phase for op in graph.ops} == {Phase.FORWARD}
    kinds = {storage.kind for storage in graph.storages}
    assert not kinds & {StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE}
    assert "native_dropout" not in names(graph, Phase.FORWARD)
    assert graph.peak_live_bytes < trace(image_net(["norm", "dropout", "relu"])).peak_live_bytes


def test_accumulation_repeats_passes_not_optimizer() -> None:
    once, thrice = (trace(Workload(mlp(), (32, 8), loss=total, accumulation=count)) for count in (1, 3))
    assert names(thrice, Phase.FORWARD) == 3 * names(once, Phase.FORWARD)
    assert names(thrice, Phase.OPTIMIZER) == names(once, Phase.OPTIMIZER)
    assert thrice.bytes_by_kind(len(thrice.ops) - 1)[StorageKind.GRADIENT] == 848


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(32, 8),
        TensorSpec((32, 8)),
        (32, 8),
        [32, 8],
        {"input": (32, 8)},
        (TensorSpec((32, 8)),),
        [torch.zeros(32, 8, device="meta")],
    ],
    ids=["tensor", "spec", "shape", "list", "dict", "tuple", "meta"],
)
def test_a_batch_can_be_described_in_many_ways(inputs: Any) -> None:
    described = trace(Workload(mlp(), inputs, loss=total))
    assert described.content_hash == trace(Workload(mlp(), TensorSpec((32, 8)), loss=total)).content_hash


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss}])
def test_a_model_may_return_its_own_loss(wrap: Callable[[torch.Tensor], Any]) -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return wrap(super().forward(input).sum())

    assert names(trace(Workload(Own(8, 4), (32, 8))), Phase.OPTIMIZER)


@settings(max_examples=25)
@given(layers, optimizers, modes, st.integers(1, 8), st.integers(0, 8))
def test_more_batch_never_needs_less_live_memory(names: list[str], optimizer: Any, mode: Any, batch: int, more: int) -> None:
    small, large = (trace(image_net(names, batch=n, optimizer=optimizer, mode=mode)) for n in (batch, batch + more))
    assert small.peak_live_bytes <= large.peak_live_bytes
    assert small.flops <= large.flops


@settings(max_examples=25)
@given(layers, optimizers, modes)
def test_what_is_traced_is_a_proper_graph(names: list[str], optimizer: Any, mode: Any) -> None:
    graph = trace(image_net(names, optimizer=optimizer, mode=mode))
    replayed = oracle.live_bytes(graph)
    assert graph.live_bytes.tolist() == replayed
    assert all(earlier < later for earlier, later in graph.edges.T)
    assert OpGraph.from_bytes(graph.to_bytes()).content_hash == graph.content_hash
    for index, op in enumerate(graph.ops):
        assert all(graph.storages[s].birth < index <= graph.storages[s].death for s in op.inputs if s not in op.outputs)
        assert all(graph.storages[s].birth <= index <= graph.storages[s].death for s in op.outputs)


def test_trace_of_4_gb_of_parameters_allocates_little() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(10_000, 10_000, bias=False) for _ in range(10)))
    trace(Workload(mlp(), (32, 8), loss=total, optimizer=torch.optim.Adam))  # what torch loads at first use
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = trace(Workload(model, (64, 10_000), loss=total, optimizer=torch.optim.Adam))
    allocated_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert graph.peak_live_bytes > 16e9
    assert allocated_kib < 50 * 2**10


class Picky(nn.Module):
    def __init__(self, look: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look(x)
        return x


@pytest.mark.parametrize(
    ("look", "advice"),
    [
        (lambda x: x.sum().item(), "value is read from a tensor"),
        (lambda x: bool((x > 0).all()), "value is read from a tensor"),
        (lambda x: x.sum().tolist(), "values are needed"),
        (lambda x: x.to("cpu"), "Make tensors on `x.device`"),
        (lambda x: x.detach().numpy(), "numpy"),
        (lambda x: x + torch.ones(16, device="cpu"), "Make it on `x.device`, or register it as a buffer"),
    ],
    ids=["item", "bool", "tolist", "copy", "numpy", "device"],
)
def test_data_dependence_error_names_its_module(look: Callable[[torch.Tensor], Any], advice: str) -> None:
    stem = nn.Sequential()
    stem.add_module("linear", nn.Linear(8, 16))
    stem.add_module("picky", Picky(look))
    model = nn.Sequential()
    model.add_module("stem", stem)
    model.add_module("head", nn.Linear(16, 4))
    with pytest.raises(TraceError, match=rf"in module 'stem\.picky' \(test_trace\.py:\d+\): .*{advice}"):
        trace(Workload(model, (32, 8), loss=total))


def fails(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError


LIVE = mlp()


def with_replaced_forward() -> nn.Module:
    model = mlp()
    own: Any = model.forward
    model.forward = lambda x: own(x)  # type: ignore[method-assign]  # noqa: PLW0108 - a copy of the model still calls the original
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Sequential(Apply(fails), nn.Linear(8, 4))}, r"AssertionError\. Run one step on real tensors"),
        ({"model": nn.Sequential(Apply(lambda x: x.no_such_name), nn.Linear(8, 4))}, "Run one step on real tensors"),
        ({"model": nn.Sequential(Apply(lambda x: {"x": x}["size"]), nn.Linear(8, 4))}, r"KeyError: 'size'\. Run one step"),
        ({"model": nn.Embedding(10, 8)}, r"Check the dtypes given to Workload\(inputs=\.\.\.\): TensorSpec\(shape, \"int64\"\)"),
        ({"model": with_replaced_forward()}, "A forward that was replaced computes with the real weights"),
        ({"model": nn.Sequential(Apply(lambda x, y: x), nn.Linear(8, 4))}, "one argument for each item of a tuple"),
        ({"model": nn.Embedding(10, 8, sparse=True), "inputs": TensorSpec((4, 2), "int64")}, "sparse gradients.*sparse=False"),
        ({"inputs": (32, 9)}, r"in module '0': .*Check the shapes given to Workload\(inputs=\.\.\.\)"),
        ({"inputs": (-1, 8)}, "TensorSpec.shape must hold integers of at least 0"),
        ({"inputs": TensorSpec((32, 8), "double precision")}, "TensorSpec.dtype must name a torch dtype"),
        ({"inputs": TensorSpec((32, 8), cast(Any, torch.float32))}, "must name a torch dtype .* but got torch.float32"),
        ({"model": "resnet50"}, "Workload.model must be a torch.nn.Module, but got str"),
        ({"loss": nn.CrossEntropyLoss}, r"the class CrossEntropyLoss\. Make one of it: loss=CrossEntropyLoss\(\)"),
        ({"loss": None}, r"must be a scalar tensor, but got a tensor of shape \(32, 4\).*loss=torch"),
        ({"loss": lambda output: 1.0}, "must be a scalar tensor, but got float"),
        ({"loss": lambda output: output.detach().sum()}, "does not depend on any parameter"),
        ({"optimizer": torch.optim.LBFGS}, "as often as its line search needs"),
        ({"optimizer": torch.optim.SparseAdam}, "cannot trace sparse gradients"),
        ({"optimizer": torch.optim.SGD(LIVE.parameters(), lr=0.1)}, r"holds parameters that are not in Workload\.model"),
        ({"optimizer": lambda parameters: torch.optim.SGD(LIVE.parameters())}, "the one that it returned holds others"),
        ({"optimizer": lambda parameters: None}, "Workload.optimizer must be .*but calling it returned NoneType"),
        ({"optimizer": functools.partial(torch.optim.SGD, lr=-1.0)}, "Workload.optimizer cannot be made .*Invalid learning rate"),
        ({"optimizer": {"0": torch.optim.Adam, "nine": torch.optim.Adam}}, "the submodule 'nine', which Sequential does not"),
    ],
)
def test_a_workload_that_cannot_be_traced_is_explained(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TraceError, WorkloadError), match=message) as caught:
        trace(Workload(**{"model": mlp(), "inputs": (32, 8), "loss": total, **change}))
    assert ("Check the shapes" in str(caught.value)) == (change.get("inputs") == (32, 9))  # only where they are the cause
    assert all(parameter.grad is None for parameter in LIVE.parameters())  # no real weights are stepped


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lazy_modules_equal_modules_with_shapes(device: str) -> None:
    with torch.device(device):
        lazy = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    options: dict[str, Any] = {"inputs": (4, 3, 8, 8), "loss": total, "optimizer": torch.optim.Adam}
    assert trace(Workload(lazy, **options)).content_hash == trace(Workload(plain, **options)).content_hash
    assert all(map(is_lazy, lazy[0].parameters()))  # the user's own model is left as it was


@pytest.mark.parametrize("form", [lambda packed: packed, lambda packed: [packed]])
def test_packed_sequences_are_inputs(form: Callable[[Any], Any]) -> None:
    packed = pack_sequence([torch.zeros(5, 16), torch.zeros(3, 16)])
    graph = trace(Workload(nn.LSTM(16, 32), form(packed), mode="infer"))
    (layer,) = [op for op in graph.ops if op.kind == "rnn"]
    assert layer.shape == (8, 32)


def test_lengths_of_packed_sequences_have_no_values() -> None:
    class Packs(nn.Module):
        def __init__(self, full: bool) -> None:
            super().__init__()
            self.rnn, self.full = nn.LSTM(8, 4, batch_first=True), full

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            lengths = torch.full((len(x),), x.shape[1], device="cpu") if self.full and x.is_meta else lengths.cpu()
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.rnn(packed)[1][0]  # type: ignore[no-any-return]

    inputs = [(4, 9, 8), TensorSpec((4,), "int64")]
    with pytest.raises(TraceError, match=r"the lengths of sequences to pack, take `torch\.full"):
        trace(Workload(Packs(full=False), inputs, loss=total))
    assert "fused_rnn" in names(trace(Workload(Packs(full=True), inputs, loss=total)), Phase.FORWARD)


def test_ctrl_c_ends_a_trace_wherever_it_comes() -> None:
    # What is raised in a callback of a weak reference is printed and lost.
    calls = 0

    def traced_until(number: int | None) -> None:
        nonlocal calls
        calls = 0

        def called(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            if event == "call" and frame.f_code.co_filename.endswith("graph/recorder.py"):
                calls += 1
                if calls == number:
                    raise KeyboardInterrupt

        sys.setprofile(called)
        try:
            trace(Workload(nn.Linear(8, 8), (32, 8), loss=total))
        finally:
            sys.setprofile(None)

    for _ in range(2):  # the first fills caches
        traced_until(None)
    assert calls > 5
    for number in range(1, calls, 15):
        with pytest.raises(KeyboardInterrupt):
            traced_until(number)

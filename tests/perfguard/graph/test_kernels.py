"""On meta, the step takes the paths that it would take on the target: attention, autocast, norms, recurrent and opaque parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfguard import opaque
from perfguard.devices import resolve_device
from perfguard.exceptions import TraceError
from perfguard.graph import OpGraph, Phase, trace
from perfguard.unmodelled import OPAQUE_FUNCTIONS, RNN_WORKSPACE
from perfguard.workload import TensorSpec, Workload
from tests.perfguard.graph.parts import Apply, Scale, total


def traced(function: Callable[[torch.Tensor], Any], shape: tuple[int, ...], **options: Any) -> OpGraph:
    target = options.pop("target", "cuda")
    return trace(Workload(nn.Sequential(Scale(), Apply(function)), shape, loss=total, **options), target=target)


def forward(graph: OpGraph, name: str) -> list[str]:
    """The dtypes of the forward outputs of an operator, in order."""
    return [op.dtype for op in graph.ops if op.name == name and op.phase is Phase.FORWARD]


def attention_names(graph: OpGraph) -> set[str]:
    return {op.name.removeprefix("_scaled_dot_product_") for op in graph.ops if op.kind == "attention"}


def test_attention_in_torchs_layers_is_fused() -> None:
    graph = trace(Workload(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 512, 32), loss=total))
    assert attention_names(graph) == {"efficient_attention", "efficient_attention_backward"}
    matrix_bytes = 2 * 4 * 512 * 512 * 4
    assert max(storage.num_bytes for storage in graph.storages) < matrix_bytes / 4


def attend(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


def masked(x: torch.Tensor) -> torch.Tensor:
    return attend(x, attn_mask=torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device))


def math(x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attend(x)


@pytest.mark.parametrize(
    ("gpu", "precision", "function", "kernel"),
    [
        ("a100", "bf16", attend, "flash_attention"),
        ("h100", "fp16", attend, "flash_attention"),
        ("a100", "fp32", attend, "efficient_attention"),
        ("v100", "fp16", attend, "efficient_attention"),
        ("t4", "fp16", attend, "efficient_attention"),
        ("t4", "fp32", attend, "efficient_attention"),
        ("a100", "bf16", masked, "efficient_attention"),
        ("a100", "amp-bf16", attend, "flash_attention"),
        ("cpu", "fp32", attend, "flash_attention_for_cpu"),
        ("a100", "bf16", math, None),
        ("v100", "bf16", attend, None),  # before Ampere: a T4 stores the attention matrix, some 5 GiB of GPT-2 at batch 8
        ("t4", "bf16", masked, None),
    ],
)
def test_the_target_and_the_mask_choose_the_kernel(
    gpu: str, precision: Any, function: Callable[[torch.Tensor], Any], kernel: str | None
) -> None:
    graph = traced(function, (2, 4, 64, 32), precision=precision, target=resolve_device(gpu))
    assert attention_names(graph) == ({kernel, f"{kernel}_backward"} if kernel else set())
    assert any(op.shape[-2:] == (64, 64) for op in graph.ops) == (kernel is None or function is masked)


def test_gqa_is_not_repeated_for_flash_attention() -> None:
    def grouped(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True)

    graph = traced(grouped, (2, 8, 64, 32), precision="bf16")
    assert attention_names(graph) == {"flash_attention", "flash_attention_backward"}
    assert "repeat_interleave" not in {op.name for op in graph.ops}


def test_dropout_keeps_a_mask_of_one_byte_on_a_gpu() -> None:
    def kept(target: Any) -> int:
        graph = traced(lambda x: F.dropout(x, 0.1), (64, 1024), target=target)
        return max(graph.storages[s].num_bytes for op in graph.ops if "dropout" in op.name for s in op.outputs[1:])

    assert kept("cuda") == 64 * 1024


def test_a_weight_used_twice_is_cast_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(self.layer(x))

    casts = forward(trace(Workload(Twice(), (4, 8), loss=total, precision="amp-bf16")), "_to_copy")
    assert casts.count("bfloat16") == 3  # the input, the weight, the bias


def test_autocast_inside_model_works_without_gpu() -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return x @ x

    assert forward(traced(cast, (8, 8)), "mm") == ["bfloat16"]
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_the_contexts_of_the_caller_do_not_matter(ambient: Callable[[], Any]) -> None:
    workload = Workload(nn.Linear(8, 8), (4, 8), loss=total)
    expected = trace(workload, target="cpu").to_bytes()
    with ambient():
        assert trace(workload, target="cpu").to_bytes() == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_rms_norm_is_one_kernel_each_way(precision: Any) -> None:
    """It keeps no more than layer norm."""

    def step(norm: nn.Module) -> OpGraph:
        layers = [nn.Sequential(norm, nn.Linear(64, 64)) for _ in range(4)]
        return trace(Workload(nn.Sequential(*layers), (1024, 64), loss=total, precision=precision))

    rms, layer = step(nn.RMSNorm(64)), step(nn.LayerNorm(64))
    assert [op.kind for op in rms.ops if "rms" in op.name].count("norm_backward") == 4
    assert sum(op.kind == "norm" for op in rms.ops) == 4
    assert rms.peak_live_bytes <= layer.peak_live_bytes


# Recurrent layers


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_kernel_each_way_with_flops_by_hand(layer: Callable[..., nn.RNNBase], gates: int, bidirectional: bool) -> None:
    steps, batch, inputs, hidden = 20, 8, 32, 64
    model = layer(inputs, hidden, num_layers=2, bidirectional=bidirectional)
    graph = trace(Workload(model, (steps, batch, inputs), loss=total))
    one, two = [op for op in graph.ops if op.kind == "rnn"]
    assert (one.phase, two.phase) == (Phase.FORWARD, Phase.BACKWARD)
    directions = 2 if bidirectional else 1
    weights = directions * gates * hidden * ((inputs + hidden) + (directions * hidden + hidden))
    assert one.flops == 2 * steps * batch * weights
    assert two.flops == 2 * one.flops
    assert one.shape == (steps, batch, directions * hidden)
    # Layers in one direction run as a wavefront. A second layer that reads both directions waits for the first to end.
    assert one.attributes["steps"] == two.attributes["steps"] == (steps * 2 if bidirectional else steps + 1)
    lstm = nn.LSTM(inputs, hidden, num_layers=2, bidirectional=bidirectional)
    on_cpu = trace(Workload(lstm, (steps, batch, inputs), loss=total), target="cpu")
    assert [op.attributes["steps"] for op in on_cpu.ops if op.kind == "rnn"] == [steps * 2 * directions] * 2


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnn_training_keeps_what_backward_needs(layer: Callable[..., nn.RNNBase]) -> None:
    """Inference does not keep it."""
    model = layer(64, 64, num_layers=2)
    training, inference = (
        trace(Workload(model, (100, 32, 64), loss=total if mode == "train" else None, mode=mode)) for mode in ("train", "infer")
    )
    output_bytes = 100 * 32 * 64 * 4
    assert training.peak_live_bytes > inference.peak_live_bytes + 2 * output_bytes
    assert RNN_WORKSPACE in training.unmodelled


def packed_of(x: torch.Tensor) -> Any:
    """Four sequences of different lengths."""
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3, 2], device="cpu"), batch_first=True)


class Packed(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return (self.layer(packed_of(x))[0].data,)


def test_packed_sequences_take_as_many_steps_as_the_longest() -> None:
    graph = trace(Workload(Packed(nn.LSTM(16, 32, batch_first=True)), (4, 5, 16), loss=total))
    assert [op.attributes["steps"] for op in graph.ops if op.kind == "rnn"] == [5, 5]


def really_fused(layer: nn.RNNBase, x: Any) -> bool:
    """Whether oneDNN's kernel runs on this machine's CPU."""
    with torch.profiler.profile() as profile:
        layer(x)
    return any(event.key == "aten::mkldnn_rnn_layer" for event in profile.key_averages())


@pytest.mark.parametrize(
    ("layer", "options", "packed"),
    [
        (nn.LSTM, {}, False), (nn.LSTM, {"bidirectional": True, "num_layers": 2}, False), (nn.LSTM, {"proj_size": 4}, False),
        (nn.LSTM, {"dtype": torch.float64}, False), (nn.LSTM, {}, True), (nn.GRU, {}, False), (nn.RNN, {}, False),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:.*Profiler clears events")  # the second in PyTorch 2.11, once
def test_on_the_cpu_it_is_one_kernel_where_onednn_runs_it(layer: Any, options: dict[str, Any], packed: bool) -> None:
    model = layer(16, 32, batch_first=True, **options)
    sizes = TensorSpec((4, 5, 16), str(options.get("dtype", torch.float32)).removeprefix("torch."))
    graph = trace(Workload(Packed(model) if packed else model, sizes, loss=total), target="cpu")
    fused = any(op.name == "fused_rnn" for op in graph.ops)
    cells = sum(op.kind == "matmul" and op.phase is Phase.FORWARD for op in graph.ops)
    assert fused == (cells < 5)
    x = torch.randn(4, 5, 16, dtype=options.get("dtype"))
    assert fused == really_fused(model, packed_of(x) if packed else x)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_on_the_cpu_an_lstm_is_one_kernel_under_autocast_too() -> None:
    model = nn.LSTM(16, 32, batch_first=True)
    graph = trace(Workload(model, (4, 5, 16), loss=total, precision="amp-bf16"), target="cpu")
    assert [op.dtype for op in graph.ops if op.name == "fused_rnn"] == ["bfloat16"]
    with torch.autocast("cpu", torch.bfloat16):
        assert really_fused(model, torch.randn(4, 5, 16))


# Opaque functions


def after_linear(function: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Apply(function))


def test_opaque_in_trace_has_outputs_and_gradients() -> None:
    select = opaque(lambda x: x[x.sum(1) > 0], example_outputs=lambda x: x.new_empty(100, 8))
    graph = trace(Workload(after_linear(select), (32, 8), loss=total))
    one, two = [op for op in graph.ops if op.name == "opaque"]
    assert (one.phase, two.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert one.bytes_written == 4 * 100 * 8
    assert one.module == "1"
    assert any(op.name == "mm" and op.phase is Phase.BACKWARD for op in graph.ops)
    assert OPAQUE_FUNCTIONS in graph.unmodelled


@pytest.fixture
def extension() -> Iterator[Any]:
    """A custom operator with a kernel for the CPU and none for meta, as a CUDA extension would be."""
    library = torch.library.Library("perfguard_test_extension", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    yield torch.ops.perfguard_test_extension.twice
    library._destroy()


def test_opaque_mends_extension_without_meta_kernel(extension: Any) -> None:
    """Without opaque, the error names the extension."""
    with pytest.raises(TraceError, match=r"parts\.py:\d+.*no kernel for the meta device.*perfguard\.opaque"):
        trace(Workload(after_linear(extension), (4, 8), loss=total))
    mended = opaque(extension.default, example_outputs=torch.empty_like)
    assert trace(Workload(after_linear(mended), (4, 8), loss=total)).ops

"""Tables of other kinds: single operators, perceptrons, transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Workload
from perfguard.devices import resolve_device
from perfguard.exceptions import TableError
from perfguard.graph import OpGraph, TraceCache, trace
from perfguard_research.tables import kind_of_table, parser_of
from tests import zoo
from tests.rows import RUN_COLUMNS

WORKLOAD = ["model", "mode", "gpu", "batch_size", "img_size"]
KERNEL = ["op", "gpu", "dtype", "direction", "latency_ms", "model", "b", "h"]
OPERATOR = ["op", "gpu", "latency_ms", "kernel", "b", "h", "m", "n", "k", "c_in", "c_out", "img", "stride", "padding"]
CONV = dict.fromkeys(("b", "c_in", "c_out", "stride"), "2")
PERCEPTRON = ["gpu", "batch_size", "input_size", "output_size", "layers", "activation", "gpu_util", "sm_active"]
TRANSFORMER = ["gpu", "model", "mode", "seq_len", "batch_size", "step_time_ms"]


class Applies(nn.Module):
    """A function as a network."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.function(*inputs)
        return out


def graph_of(columns: list[str], row: dict[str, str]) -> OpGraph:
    parsed = parser_of(columns, "table.csv")(row)
    return parsed.graph(parsed.make_model(), TraceCache(), resolve_device(parsed.gpu))


@pytest.mark.parametrize(
    ("sizes", "model", "inputs"),
    [
        ({"op": "add", "b": "6", "h": "40"}, Applies(torch.add), [(6, 40), (6, 40)]),
        ({"op": "gelu", "b": "6", "h": "40"}, nn.GELU(), [(6, 40)]),
        ({"op": "softmax", "b": "6", "h": "40"}, nn.Softmax(-1), [(6, 40)]),
        ({"op": "ln", "b": "6", "h": "40"}, nn.LayerNorm(40), [(6, 40)]),
        ({"op": "rms_norm", "b": "6", "h": "40"}, nn.RMSNorm(40), [(6, 40)]),
        ({"op": "linear", "b": "2", "m": "6", "n": "5", "k": "7"}, nn.Linear(7, 5), [(12, 7)]),
        ({"op": "bmm", "b": "2", "m": "6", "n": "5", "k": "7"}, Applies(torch.bmm), [(2, 6, 7), (2, 7, 5)]),
        (
            {"op": "conv", "b": "2", "c_in": "3", "c_out": "8", "kernel": "3", "img": "16", "stride": "1", "padding": "1"},
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            [(2, 3, 16, 16)],
        ),
        (
            {"op": "conv", "b": "2", "c_in": "3", "c_out": "8", "kernel_h": "3", "kernel_w": "5", "img_h": "16", "img_w": "20"}
            | {"stride": "2", "padding_h": "1", "padding_w": "0"},
            nn.Conv2d(3, 8, (3, 5), stride=2, padding=(1, 0), bias=False),
            [(2, 3, 16, 20)],
        ),
    ],
)
def test_an_operator_costs_what_its_trace_says(sizes: dict[str, str], model: nn.Module, inputs: list[tuple[int, ...]]) -> None:
    written = graph_of(OPERATOR, {"gpu": "t4"} | sizes).ops[0]
    (traced,) = trace(Workload(model, inputs=inputs, mode="infer")).ops
    for name in ("name", "kind", "phase", "flops", "bytes_read", "shape", "dtype"):
        assert getattr(written, name) == getattr(traced, name), name
    assert written.attributes == {name: value for name, value in traced.attributes.items() if name != "views"}
    # A norm writes its statistics too; nobody counts on them to the byte.
    assert written.bytes_written == pytest.approx(traced.bytes_written, rel=0.1)


def test_a_recurrent_layer_has_the_arithmetic_of_its_trace() -> None:
    row = {"op": "lstm", "gpu": "v100", "dtype": "float32", "b": "4", "h": "32", "steps": "25"}
    workload = Workload(nn.LSTM(32, 32), (25, 4, 32), loss=lambda output: output[0].sum())
    traced = trace(workload, target=resolve_device("v100")).ops
    forward, backward = (next(op for op in traced if op.name == name) for name in ("fused_rnn", "fused_rnn_backward"))
    written = {
        direction: graph_of(KERNEL, row | {"direction": direction}).ops[0]
        for direction in ("forward", "backward_input", "backward_weight")
    }
    # The trace has the product of the input too, which is as large here.
    assert 2 * written["forward"].flops == forward.flops
    assert 2 * (written["backward_input"].flops + written["backward_weight"].flops) == backward.flops
    assert 0.4 < written["forward"].bytes_read / forward.bytes_read < 1
    assert 0.4 < written["backward_input"].bytes_read / backward.bytes_read < 1
    assert written["forward"].attributes == {"steps": 25} == {"steps": forward.attributes["steps"]}
    assert "steps" not in written["backward_weight"].attributes


def test_a_kernel_is_timed_without_its_launch() -> None:
    """A row with a direction times a kernel. One without times PyTorch's call."""
    matrix = {"op": "add", "gpu": "t4", "b": "2", "h": "3"}
    for without in ({}, {"direction": ""}):
        assert graph_of(KERNEL, matrix | without).options == ("operator",)
    assert graph_of(KERNEL, matrix | {"direction": "forward"}).options == ("kernel",)


def test_a_perceptron_is_made_of_its_layers() -> None:
    layers = [["linear", 20, 220], ["batch_normalization", 20, 40], ["Mish", 20, 0], ["dropout", 20, 0], ["linear", 4, 84]]
    row = {"gpu": "a100", "batch_size": "8", "input_size": "10", "output_size": "4", "layers": json.dumps(layers)}
    parsed = parser_of(PERCEPTRON, "table.csv")(row | {"gpu_util": "50", "sm_active": "0.25"})
    model = parsed.make_model()
    assert isinstance(model, nn.Module)
    assert sum(parameter.numel() for parameter in model.parameters()) == 220 + 40 + 84
    assert (parsed.gpu_util, parsed.sm_active) == (0.5, 0.25)
    graph = parsed.graph(model, TraceCache(), resolve_device("a100"))
    assert graph.mode == "train"
    assert graph.flops > 3 * 2 * 8 * (10 * 20 + 20 * 4) * 0.8


@pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs transformers")
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_transformer_is_made_from_configs_file(tmp_path: Path, mode: str) -> None:
    """The file lies beside its table."""
    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    configuration = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (tmp_path / "transformers_configs.json").write_text(json.dumps({"small": configuration}))
    parse = parser_of(TRANSFORMER, tmp_path / "table.csv")
    row = {"gpu": "v100", "model": "small", "mode": mode, "seq_len": "16", "batch_size": "2"}
    parsed = parse(row)
    graph = parsed.graph(parsed.make_model(), TraceCache(), resolve_device("v100"))
    names = [op.name for op in graph.ops]
    assert graph.mode == mode
    assert "_softmax" in names
    assert not [name for name in names if "scaled_dot_product" in name]
    with pytest.raises(TableError, match=r"'big' is not in .*, which has small"):
        parse(row | {"model": "big"})


def workload(**changes: str) -> dict[str, str]:
    return {"model": "resnet18", "mode": "train", "gpu": "t4", "batch_size": "8", "img_size": "32"} | changes


def run(**changes: str) -> dict[str, str]:
    return {
        "model": "timm:x",
        "mode": "train",
        "gpu": "t4",
        "num_gpus": "1",
        "batch_size": "2",
        "memory_kind": "driver",
    } | changes


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        (WORKLOAD, workload(mode="sing"), "column 'mode' must be one of train, forward_backward, infer, but is 'sing'"),
        (WORKLOAD, workload(batch_size="1.5"), "column 'batch_size' must be a positive integer"),
        (WORKLOAD, workload(gpu=""), "column 'gpu' is empty"),
        (WORKLOAD, workload(peak_memory_mib="nan"), "column 'peak_memory_mib' must be positive and finite"),
        (RUN_COLUMNS, run(parallel="tp"), "column 'parallel' must be one of none, dp"),
        (RUN_COLUMNS, run(config="[1]"), "column 'config' must be a JSON object, but is '[1]'"),
        (RUN_COLUMNS, run(input="{"), "column 'input' must be a JSON object: "),
        (OPERATOR, {"op": "fft", "gpu": "t4"}, "column 'op' must be one of add"),
        (OPERATOR, {"op": "conv", "gpu": "t4", **CONV, "img": "2", "kernel": "3"}, "3 x 3"),
        (KERNEL, {"op": "gelu", "direction": "backward_input", "gpu": "t4"}, "which gelu does not have. Only conv, vanilla"),
        (KERNEL, {"op": "add", "gpu": "t4", "b": "1e30", "h": "3"}, "a size of 1e+30 is too large for any device"),
        (KERNEL, {"op": "conv", "gpu": "t4", **CONV, "img": "8", "kernel_h": "3"}, "'kernel_w' must be a positive"),
        (PERCEPTRON, {"gpu": "t4", "layers": "[[1"}, "'layers' must be a JSON list"),
        (PERCEPTRON, {"gpu": "t4", "layers": '[["lstm", 3, 4]]'}, "'layers' holds lstm; known are linear"),
    ],
)
def test_a_row_that_cannot_be_right_is_named(columns: list[str], row: dict[str, str], message: str) -> None:
    with pytest.raises(TableError, match=re.escape(message)):
        parser_of(columns, "table.csv")(row)


def test_a_table_is_known_by_its_columns() -> None:
    kinds = [kind_of_table(columns) for columns in (OPERATOR, PERCEPTRON, TRANSFORMER)]
    assert kinds == ["operator", "perceptron", "transformer"]
    with pytest.raises(TableError, match="kind 'operator' it lacks the columns gpu"):
        kind_of_table(["op", "b"])

"""Tables of other kinds: single operators, perceptrons, transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Workload
from perfguard.devices import resolve_device
from perfguard.exceptions import TableError
from perfguard.graph import OpGraph, TraceCache, trace
from perfguard.tables import kind_of_table, model_on_meta, parser_of
from tests import zoo

OPERATOR = ["op", "gpu", "latency_ms", "kernel", "b", "h", "m", "n", "k", "c_in", "c_out", "img", "stride", "padding"]
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
    return parsed.graph(model_on_meta(parsed), TraceCache(), resolve_device(parsed.gpu))


@pytest.mark.parametrize(
    ("sizes", "model", "inputs"),
    [
        ({"op": "add", "b": "6", "h": "40"}, Applies(torch.add), [(6, 40), (6, 40)]),
        ({"op": "gelu", "b": "6", "h": "40"}, nn.GELU(), [(6, 40)]),
        ({"op": "relu", "b": "6", "h": "40"}, nn.ReLU(), [(6, 40)]),
        ({"op": "softmax", "b": "6", "h": "40"}, nn.Softmax(-1), [(6, 40)]),
        ({"op": "ln", "b": "6", "h": "40"}, nn.LayerNorm(40), [(6, 40)]),
        ({"op": "linear", "b": "2", "m": "6", "n": "5", "k": "7"}, nn.Linear(7, 5), [(12, 7)]),
        ({"op": "bmm", "b": "2", "m": "6", "n": "5", "k": "7"}, Applies(torch.bmm), [(2, 6, 7), (2, 7, 5)]),
        (
            {"op": "conv", "b": "2", "c_in": "3", "c_out": "8", "kernel": "3", "img": "16", "stride": "1", "padding": "1"},
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            [(2, 3, 16, 16)],
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


def test_a_perceptron_is_made_of_its_layers() -> None:
    layers = [["linear", 20, 220], ["batch_normalization", 20, 40], ["Mish", 20, 0], ["dropout", 20, 0], ["linear", 4, 84]]
    row = {"gpu": "a100", "batch_size": "8", "input_size": "10", "output_size": "4", "layers": json.dumps(layers)}
    parsed = parser_of(PERCEPTRON, "table.csv")(row | {"gpu_util": "50", "sm_active": "0.25"})
    model = model_on_meta(parsed)
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
    graph = parsed.graph(model_on_meta(parsed), TraceCache(), resolve_device("v100"))
    names = [op.name for op in graph.ops]
    assert graph.mode == mode
    assert "_softmax" in names
    assert not [name for name in names if "scaled_dot_product" in name]
    with pytest.raises(TableError, match=r"'big' is not in .*, which has small"):
        parse(row | {"model": "big"})


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        (OPERATOR, {"op": "fft", "gpu": "t4"}, "column 'op' must be one of add"),
        (OPERATOR, {"op": "add", "gpu": "t4", "b": "2", "h": "nan"}, "'h' must be positive"),
        (PERCEPTRON, {"gpu": "t4", "layers": "[[1"}, "'layers' must be a JSON list"),
        (PERCEPTRON, {"gpu": "t4", "layers": '[["lstm", 3, 4]]'}, "'layers' holds lstm; known are linear"),
    ],
)
def test_a_row_that_cannot_be_right_is_named(columns: list[str], row: dict[str, str], message: str) -> None:
    with pytest.raises(TableError, match=message.replace("[", r"\[")):
        parser_of(columns, "table.csv")(row)


def test_a_table_is_known_by_its_columns() -> None:
    assert [kind_of_table(columns) for columns in (OPERATOR, PERCEPTRON, TRANSFORMER)] == [
        "operator",
        "perceptron",
        "transformer",
    ]
    with pytest.raises(TableError, match="For an operator table it lacks the columns gpu"):
        kind_of_table(["op", "b"])

"""Labels of the operators that ONNX Runtime fuses, from the graph that it writes after optimising.

An operator of the optimised graph stands for all operators of the original one that lie between its inputs and its outputs, whose
names ONNX Runtime keeps. The graph is that of `graph_from_onnx`; its operators are found in the file by the names of the values
that they make.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perfguard.graph import OpGraph
from perfguard.onnx import graph_from_onnx

_MOST_BYTES = 400 * 2**20
"""Most bytes of weights, which are allocated and written to the file."""


def onnxruntime_case(model: nn.Module, inputs: Any) -> tuple[OpGraph, tuple[tuple[int, ...], ...]]:
    """The graph of ``model``'s export, and the kernels that ONNX Runtime makes of it on a CPU with its extended optimisations.

    Args:
        model: with real weights or on meta, where they are made up; in evaluation mode.
        inputs: the shape of one batch, or of each of several.

    Raises:
        Exception: whatever the exporter or ONNX Runtime raise for a network that they cannot take.
    """
    import onnx
    import onnxruntime

    if isinstance(inputs, dict):
        raise ValueError("only networks with positional inputs are exported")
    arguments = tuple(map(torch.zeros, inputs if isinstance(inputs[0], tuple) else (inputs,)))

    if sum(value.numel() * 4 for value in model.parameters()) > _MOST_BYTES:
        raise ValueError("too many weights to write")
    if any(parameter.is_meta for parameter in model.parameters()):
        model = model.to_empty(device="cpu")
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                value.fill_(0.01)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, optimised = Path(folder) / "model.onnx", Path(folder) / "optimised.onnx"
        # Without PRESERVE the exporter would fold batch norms itself.
        as_it_is = torch.onnx.TrainingMode.PRESERVE
        torch.onnx.export(model.eval(), arguments, str(path), dynamo=False, training=as_it_is, opset_version=17)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(optimised)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        graph = graph_from_onnx(path, target="cpu")
        before, after = onnx.load(path, load_external_data=False).graph, onnx.load(optimised, load_external_data=False).graph
    if graph.unmodelled:
        raise ValueError(f"the export is not understood: {graph.unmodelled[0]}")
    op_of = _operators_of_nodes(graph, before)
    kernels = (sorted({op_of[at] for at in covered if at in op_of}) for covered in _covered(before, after))
    return graph, tuple(tuple(kernel) for kernel in kernels if kernel)


def _covered(before: Any, after: Any) -> list[set[int]]:
    """Indices of the original operators that each operator of the optimised graph replaces.

    Optimising also moves transpositions, which renames values. So operators of a type of which there are as many after as before
    are taken to be swallowed by nothing.
    """
    types_before, types_after = (Counter(node.op_type for node in graph.node) for graph in (before, after))
    maker = {name: at for at, node in enumerate(before.node) for name in node.output if name}
    made_after = {name for node in after.node for name in node.output}
    found = []
    for node in after.node:
        stops = set(node.input) | (made_after - set(node.output))
        covered: set[int] = set()
        waiting = [name for name in node.output if name in maker]
        while waiting:
            at = maker[waiting.pop()]
            kind = before.node[at].op_type
            if at not in covered and (kind == node.op_type or types_before[kind] > types_after[kind]):
                covered.add(at)
                waiting.extend(name for name in before.node[at].input if name in maker and name not in stops)
        found.append(covered)
    return found


def _operators_of_nodes(graph: OpGraph, file: Any) -> Mapping[int, int]:
    """Index in the graph of the file's operators, by their index in the file.

    A storage carries the name of the value that it was made for. An operator that runs in place makes no storage: it is the
    reader of the value that was there, of the same name as aten's.
    """
    maker = {name: at for at, node in enumerate(file.node) for name in node.output if name}
    readers: dict[str, list[int]] = {}
    for at, node in enumerate(file.node):
        for name in node.input:
            readers.setdefault(name, []).append(at)
    value_in: dict[int, str] = {index: storage.module for index, storage in enumerate(graph.storages)}
    found: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for storage in op.outputs:
            if storage not in op.inputs and graph.storages[storage].birth == index and value_in[storage] in maker:
                found.setdefault(maker[value_in[storage]], index)
            elif storage in op.inputs:
                wanted = op.name.rstrip("_").replace("_", "")
                for at in readers.get(value_in[storage], ()):
                    if at not in found and file.node[at].op_type.lower() == wanted:
                        found[at], value_in[storage] = index, file.node[at].output[0]
                        break
    return found

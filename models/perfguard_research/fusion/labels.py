"""Labels of fused operators, from the compilers' own records.

    python -m perfguard_research.fusion.labels --out labels.jsonl --minutes 20
    python -m perfguard_research.fusion.labels --out labels.jsonl --minutes 9 --compiler inductor-cuda

With torch.compile's Inductor, the network's aten graph is decomposed and made functional as in AOTAutograd. Each new node keeps
the operator that it comes from (`from_node`). Inductor lowers the graph, and its scheduler fuses operators. The result is read
in Inductor's own hook for passes after fusion. Compilation ends there, before any C++ is written. Nothing is computed and there
are no weights, because all tensors are fake. For a GPU the method is the same, with an A100 as the device.

Each line is one JSON object. It has the graph (base64 of `OpGraph.to_bytes`), and each kernel as the indices of its operators in
the graph. The networks are those that `perfguard collect` draws. The command may be interrupted at any time. Every line is
flushed, and models that are in the file are skipped.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from perfguard.devices import cpu
from perfguard.graph import OpGraph, trace
from perfguard.workload import Workload, mapped
from perfguard_research.collect.spaces import Draft, Space, drafts
from perfguard_research.networks import Network

COMPILERS = ("inductor-cpu", "inductor-cuda")
_MOST_OPERATORS = 400
_BATCH = 4
_SPACES: tuple[Space, ...] = ("vision", "nas", "text")
_NOT_KERNELS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh")
"""Operators that only allocate. A trace leaves them out, as it does views."""


class LabelledGraph(NamedTuple):
    """A graph, and what a compiler made of it."""

    compiler: str
    family: str
    model: str
    """The number of the network in the order of `perfguard collect`."""
    graph: OpGraph
    kernels: tuple[tuple[int, ...], ...]
    """Operators of each kernel, ascending. One operator may be part of several (a softmax is a reduction and a division)."""

    def edge_labels(self) -> npt.NDArray[np.int8]:
        """Labels of ``graph.edges``: 1 fused, 0 not, -1 not recorded. Shape: (num_edges,).

        An edge is fused if one kernel takes part in both operators.
        """
        is_in = np.zeros((len(self.kernels), len(self.graph.ops)), dtype=bool)
        for number, kernel in enumerate(self.kernels):
            is_in[number, list(kernel)] = True
        source = is_in[:, self.graph.edges[0]]
        sink = is_in[:, self.graph.edges[1]]
        return np.where(source.any(0) & sink.any(0), (source & sink).any(0), -1).astype(np.int8)


def inductor_kernels(model: nn.Module, inputs: Any, graph: OpGraph, target: str = "cpu") -> tuple[tuple[int, ...], ...]:
    """The kernels that Inductor's scheduler forms of ``graph``, as indices of its operators.

    For "cuda" the scheduler gets the properties of an A100. It decides before Triton is called, so neither a GPU nor Triton is
    needed.

    Args:
        model: on ``torch.device("meta")``, in evaluation mode.
        inputs: as `Workload` takes them.
        graph: the trace of one inference of ``model`` for ``target``. The aten calls are matched to its operators by name and
            order.
        target: "cpu" or "cuda".

    Raises:
        Exception: whatever tracing or Inductor raise for a network that they cannot take.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.exc import InductorError
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    scheduled: list[Any] = []

    def read(nodes: list[Any]) -> list[Any]:
        scheduled.extend(nodes)
        raise _ScheduledError

    with fake, torch.no_grad():
        called, whole = _aten_graphs(model, inputs, target)
        settings = config.patch(fx_graph_cache=False, assume_aligned_inputs=True, _post_fusion_custom_pass=read)
        with settings, _pretended_gpu() if target == "cuda" else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = [node.meta["val"] for node in whole.graph.nodes if node.op == "placeholder"]
            try:
                compile_fx.compile_fx_inner(whole, values, is_inference=True)
            except InductorError as error:
                if not isinstance(error.inner_exception, _ScheduledError):
                    raise
    op_of = _matched(called, graph)
    position = {node.name: at for at, node in enumerate(called.graph.nodes)}
    kernels = (sorted({op_of[name] for name in kernel if name in op_of}) for kernel in _kernels_of(scheduled, position))
    return tuple(tuple(kernel) for kernel in kernels if kernel)


class _ScheduledError(Exception):
    """Ends a compilation when the scheduler has decided."""


@contextmanager
def _pretended_gpu() -> Iterator[None]:
    """Patch the device queries of Inductor (torch 2.13) with the properties of an A100."""
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    a100 = DeviceProperties("cuda", 0, 108, 80, 8, 65536, 2048, 1024, 32)
    properties = SimpleNamespace(
        name="A100", major=8, minor=0, multi_processor_count=108, warp_size=32, total_memory=40 * 2**30, gcnArchName="",
        L2_cache_size=40 * 2**20, shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=163 * 2**10,
    )  # fmt: skip
    with (
        mock.patch.object(DeviceProperties, "create", return_value=a100),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch.object(scheduler, "has_triton", return_value=True),
    ):
        yield


def _aten_graphs(model: nn.Module, inputs: Any, target: str) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The calls that the network dispatches, and the graph that Inductor is given for them.

    The network itself always runs on fake CPU tensors: a build of torch for CPUs cannot index fake CUDA tensors. Its aten calls
    can be run on either.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.func import functional_call, functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    state = {name: torch.empty_like(value, device="cpu") for name, value in (*model.named_parameters(), *model.named_buffers())}
    batch = mapped(inputs, lambda spec: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)))
    keywords = batch if isinstance(batch, dict) else {}
    arguments = () if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (batch,)

    def forward(state: dict[str, torch.Tensor], arguments: Any, keywords: dict[str, Any]) -> list[torch.Tensor]:
        out = functional_call(model, state, arguments, keywords)
        return [value for value in torch.utils._pytree.tree_leaves(out) if isinstance(value, torch.Tensor)]

    called = make_fx(forward)(state, arguments, keywords)
    again = [torch.empty_like(node.meta["val"], device=target) for node in called.graph.nodes if node.op == "placeholder"]
    with preserve_node_meta():
        functional = functionalize(_OnTarget(called, target).run, remove="mutations")
        whole = make_fx(functional, decomposition_table=select_decomp_table())(*again)
    whole.graph.eliminate_dead_code()
    whole.recompile()
    return called, whole


class _OnTarget(torch.fx.Interpreter):
    """Runs calls that were recorded on a CPU as ``target`` would."""

    def __init__(self, called: torch.fx.GraphModule, target: str) -> None:
        super().__init__(called)
        self._target = target

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._target == "cuda" and target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            rest: list[Any] = [0.0, False]
            rest[: len(args) - 3] = args[3:]
            mask = kwargs.get("attn_mask")
            scale = kwargs.get("scale")
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
            return efficient(*args[:3], mask, False, *rest, scale=scale)
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device(self._target, 0)}
        return super().call_function(target, args, kwargs)


def _kernels_of(nodes: Sequence[Any], position: Mapping[str, int]) -> Iterator[set[str]]:
    """Yield the names of the aten calls in each scheduled kernel.

    A call of a library (convolution, matrix product) is a kernel of its own. Generated kernels that copy its input into another
    layout or add its bias also name it as an origin. Its output is written in any case, so it does not count there. Inductor
    counts the origins of unfinished inputs to a library call, so its own origin is the last one. Nodes that do nothing (`cat` of
    parts that were written in place) are no kernels.
    """
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    generated: list[set[str]] = []
    calls: list[str] = []
    for node in nodes:
        found: set[str] = set()
        for part in node.get_nodes():
            if part.node is None or isinstance(part, NopKernelSchedulerNode):
                continue
            names = {origin.meta["from_node"][-1].name for origin in part.node.get_origins() if "from_node" in origin.meta}
            names &= position.keys()
            if isinstance(part, ExternKernelSchedulerNode):
                calls.extend([max(names, key=position.__getitem__)] if names else [])
            else:
                found |= names
        generated.append(found)
    yield from ({name} for name in calls)
    yield from (found - set(calls) for found in generated)


def _matched(called: torch.fx.GraphModule, graph: OpGraph) -> dict[str, int]:
    """Operator index in ``graph`` of each aten call that launches a kernel. Both are in the order of dispatch."""
    names = []
    calls = []
    for node in called.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view:
            name = node.target._schema.name.partition("::")[2]
            if name not in _NOT_KERNELS:
                names.append(_without_backend(name))
                calls.append(node.name)
    matcher = difflib.SequenceMatcher(None, [_without_backend(op.name) for op in graph.ops], names, autojunk=False)
    return {calls[block.b + at]: block.a + at for block in matcher.get_matching_blocks() for at in range(block.size)}


def _without_backend(name: str) -> str:
    return "attention" if name.startswith("_scaled_dot_product") else name


def labelled(draft: Draft, compiler: str) -> LabelledGraph | str:
    """Labels of the network of ``draft`` from ``compiler``, or the reason why there are none."""
    network = draft.row.network
    assert isinstance(network, Network)
    try:
        with torch.device("meta"):
            model = network.make().eval()
        target: Any = compiler.partition("-")[2]
        inputs = network.batch(_BATCH, train=False).inputs
        graph = trace(Workload(model, inputs, mode="infer"), target=target)
        if len(graph.ops) > _MOST_OPERATORS:
            return f"{len(graph.ops)} operators"
        kernels = inductor_kernels(model, inputs, graph, target)
    except Exception as error:  # whatever networks of others do under fake tensors
        return f"{type(error).__name__}: {str(error)[:200]}"
    return LabelledGraph(compiler, network.family, draft.columns["index"], graph, kernels)


def to_json(row: LabelledGraph) -> dict[str, Any]:
    """One line of the file."""
    return {**row._asdict(), "graph": base64.b64encode(row.graph.to_bytes()).decode()}


def read_labels(path: str | Path) -> Iterator[LabelledGraph]:
    """Yield the graph of each complete line. An interrupted last line ends the reading."""
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                row = json.loads(line)
                graph = OpGraph.from_bytes(base64.b64decode(row.pop("graph")))
                yield LabelledGraph(graph=graph, kernels=tuple(map(tuple, row.pop("kernels"))), **row)


def main() -> None:
    """Label until the minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--compiler", choices=COMPILERS, default=COMPILERS[0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = {(row.compiler, row.model) for row in read_labels(arguments.out)} if arguments.out.is_file() else set()
    end = time.process_time() + 60 * arguments.minutes
    with arguments.out.open("a", encoding="utf-8") as file:
        for draft in drafts(_SPACES, seed=0, device=cpu()):  # smaller networks than a GPU's
            if time.process_time() > end:
                break
            if (arguments.compiler, draft.columns["index"]) not in done:
                row = labelled(draft, arguments.compiler)
                print(f"{draft.row.model}: {row if isinstance(row, str) else 'labelled'}")
                if isinstance(row, LabelledGraph):
                    file.write(json.dumps(to_json(row)) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()

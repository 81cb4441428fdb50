"""The views "sums" and "operators" for decisions: the numbers that `sums` and `operators` give, but with arrays.

A study asks for steps that differ in their sizes alone. What their operators are and what surrounds them is worked out once, for
the first of them (`OpGraph.twin`); of another only the numbers are looked at. `sums` and `operators` say operator by operator
what the columns mean. They are what predictors are trained on, and what these functions are tested against, to the last bit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph import KIND_INDEX, OP_KINDS, Op, OpGraph, Phase, StorageKind, are_sizes, roofline_s
from perfguard_models import operators, sums
from perfguard_models.operators import COLUMNS, NAMES
from perfguard_models.sums import SUMS

if TYPE_CHECKING:
    from perfguard.devices import Device

_Array = npt.NDArray[Any]
_CONVOLUTIONS = ("conv", "conv_backward")
_MATRIX_KINDS = (*_CONVOLUTIONS, "matmul", "attention", "rnn")
_FEWER_BYTES = 2**50
"""A transform of a convolution's inputs takes a few hundred times their bytes at most."""
_ONE, _ZERO = -2, -1
"""Where a 1 and a 0 stand, after the numbers of a graph."""
_FIRST_FLAG = COLUMNS.index("launch_bound")
_PLACE = {name: at for at, name in enumerate(COLUMNS)}


def quick_sums_of(graph: OpGraph, device: Device) -> npt.NDArray[np.float32]:
    """As :func:`perfguard_models.sums.sums_of`."""
    form = _form_of(graph)
    if form is None:
        return sums.sums_of(graph, device)
    numbers, roofline = form.extended(graph), roofline_s(graph, device)
    convolutions = _Convolutions(form, numbers)
    found = {
        **_memory(graph, device, form),
        **_workspaces(graph, form, convolutions),
        **_time(graph, device, form, roofline),
        **_traits(form, numbers, roofline, convolutions),
        **_setting(graph, device, form, numbers),
    }
    return np.array([found[name] for name in SUMS], dtype=np.float32)


def quick_operators_of(graph: OpGraph, device: Device) -> dict[str, _Array]:
    """As :func:`perfguard_models.operators.operators_of`."""
    form = _form_of(graph)
    if form is None:
        return operators.operators_of(graph, device)
    roofline = roofline_s(graph, device)
    base = graph.reserved_bytes + device.context_bytes
    keys = form.keys.copy()
    x = keys[:, :-1].view(np.float16)
    _fill_columns(x, form, form.extended(graph), roofline, device)
    rows = keys.view(np.dtype((np.void, keys.shape[1] * 2))).ravel()
    _, first, inverse, count = np.unique(rows, return_index=True, return_inverse=True, return_counts=True)
    live = np.zeros(len(first))
    np.maximum.at(live, inverse, graph.live_bytes[1:] / base)
    return {
        "x": x[first],
        "name": keys[first, -1],
        "count": count.astype(np.float32),
        "roofline": roofline[first].astype(np.float32),
        "live": live.astype(np.float32),
        "device": operators._device(device),
        "reserved": np.array([math.log(base)]),
    }


class _Form:
    """What graphs have in common that differ in their numbers alone."""

    def __init__(self, graph: OpGraph) -> None:
        self._reference = weakref.ref(graph)  # forms are kept by their graphs
        columns = list(zip(*graph.ops, strict=True)) or [()] * len(Op._fields)
        names, kinds, phases, attributes = columns[0], columns[1], columns[2], columns[-1]
        self.number = len(graph.ops)
        self.starts = graph.op_starts[:-1]
        self.kinds = np.array([KIND_INDEX[kind] for kind in kinds], dtype=np.int64)
        self.of_kind = [np.flatnonzero(self.kinds == index) for index in range(len(OP_KINDS))]
        self.matrix = np.isin(self.kinds, [KIND_INDEX[kind] for kind in _MATRIX_KINDS])
        self.phases = np.array(phases, dtype=np.int64)
        self.of_phase = [np.flatnonzero(self.phases == phase) for phase in Phase]
        known = {name: at for at, name in enumerate(sums._NAMED)}
        self.named = np.array([known.get(name, len(known)) for name in names], dtype=np.int64)
        """Indices into `sums._NAMED`, or its length."""
        self.convolutions = [index for index, kind in enumerate(kinds) if kind in _CONVOLUTIONS]
        self.products = [index for index, own in enumerate(attributes) if "product" in own]
        starts = [self._where(index)["product"] for index in self.products]
        self.of_product = np.array(starts, dtype=np.int64)[:, None] + np.arange(4)
        """Where the sizes of each product are. Shape: (num_products, 4)."""
        batch = next((index for index, op in enumerate(graph.ops) if len(op.shape) > 1), None)
        self.batch_at = None if batch is None else int(self.starts[batch]) + 3

    @property
    def _graph(self) -> OpGraph:
        graph = self._reference()
        assert graph is not None
        return graph

    def extended(self, graph: OpGraph) -> npt.NDArray[np.int64]:
        """The numbers of ``graph``, then a one and a zero."""
        return np.concatenate([graph.numbers, (1, 0)])

    def _where(self, index: int) -> dict[str, int]:
        """Where the numbers of each attribute of an operator begin."""
        op, at = self._graph.ops[index], int(self.starts[index]) + 3 + len(self._graph.ops[index].shape)
        found = {}
        for key, value in op.attributes.items():
            if are_sizes(value):
                found[key] = at
                at += len(value)
        return found

    @cached_property
    def of_convolution(self) -> dict[str, npt.NDArray[np.int64]]:
        """Where the sizes of each convolution are, by attribute; those of the positions at the end, as many for all."""
        ops = [self._graph.ops[index] for index in self.convolutions]
        wheres = [self._where(index) for index in self.convolutions]
        rank = max((len(op.attributes["stride"]) for op in ops), default=1)
        plain = {"in_shape": _ONE, "weight_shape": _ONE, "stride": _ONE, "padding": _ZERO, "dilation": _ONE}
        found = {}
        for key, filler in plain.items():
            kept = 2 if key.endswith("shape") else 0
            rows = []
            for op, where in zip(ops, wheres, strict=True):
                places = list(range(where[key], where[key] + len(op.attributes[key])))
                rows.append(places + [filler] * (kept + rank - len(places)))
            found[key] = np.array(rows, dtype=np.int64).reshape(len(ops), kept + rank)
        return found

    @cached_property
    def traits(self) -> npt.NDArray[np.int64]:
        """Groups, whether it is transposed, bytes of an element and number of dimensions. Shape: (4, num_convolutions)."""
        rows = [
            (
                op.attributes["groups"],
                op.attributes["transposed"],
                2 if op.dtype in ("float16", "bfloat16") else 4,
                len(op.attributes["stride"]),
            )
            for op in (self._graph.ops[index] for index in self.convolutions)
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 4).T

    @cached_property
    def of_shape(self) -> npt.NDArray[np.int64]:
        """Where the sizes of the first output are, ones where there are none. Shape: (num_ops, most dimensions, at least 3)."""
        ranks = np.array([len(op.shape) for op in self._graph.ops], dtype=np.int64)
        along = np.arange(max(3, int(ranks.max(initial=0))))
        return np.where(along < ranks[:, None], self.starts[:, None] + 3 + along, _ONE)

    @cached_property
    def keys(self) -> npt.NDArray[np.int16]:
        """Rows of the view "operators" in 16 bits and their names, right where numbers do not matter. Shape: (num_ops, d)."""
        graph, number = self._graph, self.number
        reader, source = _reads(graph)
        num_inputs = np.bincount(reader, minlength=number)
        made, age = source >= 0, reader - source
        shares = np.maximum(num_inputs, 1)
        x = np.zeros((number, len(COLUMNS)))
        x[self.convolutions, _PLACE["transposed"]] = self.traits[1]
        for phase in Phase:
            x[:, _PLACE[phase.name.lower()]] = self.phases == phase
        x[:, _PLACE["half"]] = [op.dtype in ("float16", "bfloat16") for op in graph.ops]
        x[:, _PLACE["train"]] = graph.mode == "train"
        x[:, _PLACE["nhwc"]] = graph.layout == "nhwc"
        x[:, _PLACE["compiled"]] = "compiled" in graph.options
        x[:, _PLACE["has_weights"]] = np.bincount(reader[~made], minlength=number) > 0
        x[:, _PLACE["fresh"]] = np.bincount(reader[made & (age == 1)], minlength=number) / shares
        x[:, _PLACE["recent"]] = np.bincount(reader[made & (age <= operators._RECENT)], minlength=number) / shares
        x[:, _PLACE["num_inputs"]] = np.minimum(num_inputs, 8) / 8
        x[:, _PLACE["num_inputs"] + 1 :] = _surroundings(self.kinds, source[made], reader[made])
        name_index = {name: index for index, name in enumerate(NAMES)}
        name = np.array([name_index.get(op.name, len(NAMES)) for op in graph.ops], dtype=np.int16)
        return np.ascontiguousarray(np.concatenate([x.astype(np.float16).view(np.int16), name[:, None]], axis=1))


def _reads(graph: OpGraph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each input of each operator who reads it, and who wrote it last; -1: it was there before. Shapes: (n,), (n,)."""
    number = len(graph.ops)
    reads, writes = [op.inputs for op in graph.ops], [op.outputs for op in graph.ops]
    read, written = (np.fromiter(chain.from_iterable(some), dtype=np.int64) for some in (reads, writes))
    reader, writer = (np.repeat(np.arange(number), list(map(len, some))) for some in (reads, writes))
    # In the order of storages and, for each of them, of time; an operator reads before it writes.
    order = np.argsort(np.concatenate([read * 2 * number + 2 * reader, written * 2 * number + 2 * writer + 1]), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    is_write = order >= len(read)
    last = np.maximum.accumulate(np.where(is_write, np.arange(len(order)), -1))[place[: len(read)]]
    found = np.where(last >= 0, order[last] - len(read), -1)
    is_same = (found >= 0) & (written[found] == read) if len(written) else np.zeros(len(read), dtype=np.bool_)
    return reader, np.where(is_same, writer[found] if len(writer) else -1, -1)


def _surroundings(kinds: npt.NDArray[np.int64], source: _Array, sink: _Array) -> npt.NDArray[np.float64]:
    """Shares of the kinds before and after each operator. Shape: (num_ops, 2 * len(OP_KINDS))."""
    number = len(OP_KINDS)
    source, sink = np.divmod(np.unique(source * len(kinds) + sink), max(len(kinds), 1))
    around = np.zeros((len(kinds), 2 * number))
    np.add.at(around, (sink, kinds[source]), 1)
    np.add.at(around, (source, number + kinds[sink]), 1)
    totals = np.repeat([around[:, :number].sum(axis=1), around[:, number:].sum(axis=1)], number, axis=0).T
    return np.asarray(around / np.maximum(totals, 1))


_forms: WeakKeyDictionary[OpGraph, _Form] = WeakKeyDictionary()


def _form_of(graph: OpGraph) -> _Form | None:
    """None: where numbers or workspaces may leave 64 bits, and for operators with weights that are no convolutions."""
    first = graph.twin or graph
    form = _forms.get(first)
    if form is None:
        if any(("weight_shape" in op.attributes) != (op.kind in _CONVOLUTIONS) for op in first.ops):
            return None
        form = _forms[first] = _Form(first)
    return form if graph.numbers.dtype == np.int64 and graph.peak_live_bytes < _FEWER_BYTES else None


class _Convolutions:
    """The sizes of a graph's convolutions. Shapes: (c,), and (c, d) for what is along positions."""

    def __init__(self, form: _Form, numbers: npt.NDArray[np.int64]) -> None:
        sizes = {key: numbers[places] for key, places in form.of_convolution.items()}
        self.groups, transposed, self.element_bytes, self.rank = form.traits
        self.transposed = transposed > 0
        first, second = sizes["weight_shape"][:, 0], sizes["weight_shape"][:, 1]
        self.batch, self.channels_in = sizes["in_shape"][:, 0], sizes["in_shape"][:, 1]
        self.channels_out = np.where(self.transposed, second * self.groups, first)
        self.inputs, self.kernel = sizes["in_shape"][:, 2:], sizes["weight_shape"][:, 2:]
        stride, padding, dilation = sizes["stride"], sizes["padding"], sizes["dilation"]
        extent = dilation * (self.kernel - 1)
        self.outputs = np.where(
            self.transposed[:, None],
            (self.inputs - 1) * stride - 2 * padding + extent + 1,
            (self.inputs + 2 * padding - extent - 1) // stride + 1,
        )
        self.stride, self.dilation = stride.max(axis=1), dilation.max(axis=1)
        self.taps, self.positions_in, self.positions_out = (
            sizes.prod(axis=1) for sizes in (self.kernel, self.inputs, self.outputs)
        )


def _memory(graph: OpGraph, device: Device, form: _Form) -> dict[str, float]:
    peak, reserved = max(graph.peak_live_bytes, 1), graph.reserved_bytes
    live, num_ops = graph.live_bytes, len(graph.op_starts) - 1
    at, by_kind, num_bytes = graph.peak_index, graph.bytes_by_kind(), graph.storage_bytes
    largest = np.sort(num_bytes)[::-1][:11].tolist()
    _, births, deaths = graph.lifetimes
    passing = num_bytes[(births >= 0) & (deaths < num_ops)]
    return {
        "log_reserved": math.log(reserved + device.context_bytes),
        "log_live": math.log(peak),
        "log_slack": math.log(reserved / peak),
        **{f"share_{kind.name.lower()}": of_kind / peak for kind, of_kind in by_kind.items()},
        "log_parameters": math.log1p(by_kind[StorageKind.PARAMETER]),
        "log_activations": math.log1p(by_kind[StorageKind.ACTIVATION]),
        **{f"storage_{rank}": (largest[rank] if len(largest) > rank else 0) / peak for rank in (0, 1, 3, 10)},
        "largest_passing": int(passing.max(initial=0)) / peak,
        "peak_position": at / max(num_ops, 1),
        "peak_phase": float(form.phases[at]) if at >= 0 else -1.0,
        "live_at_start": float(live[0]) / peak,
        "live_at_end": float(live[-1]) / peak,
        "log_capacity_share": math.log((reserved + device.context_bytes) / device.memory_bytes),
    }


def _workspaces(graph: OpGraph, form: _Form, shapes: _Convolutions) -> dict[str, float]:
    peak = max(graph.peak_live_bytes, 1)
    live = graph.live_bytes[1:][form.convolutions].astype(np.float64)
    found: dict[str, float] = {}
    for name, (num_bytes, holds) in _workspace_bytes(shapes).items():
        own = num_bytes[holds]
        highest = float((live[holds] + own).max(initial=0.0))
        largest = int(own.max(initial=0))
        found[f"peak_{name}"] = math.log(max(highest / peak, 1.0))
        found[f"workspace_{name}"] = math.log(largest / peak) if largest else sums._ABSENT
    return found


def _workspace_bytes(c: _Convolutions) -> dict[str, tuple[_Array, _Array]]:
    """Of each algorithm its bytes, and for which convolutions it is possible. Shapes: (c,), (c,)."""
    gemm = c.channels_in // c.groups * c.taps * c.positions_out * 4
    lowers = (c.taps > 1) | (c.stride > 1)
    plane = (c.rank == 2) & (c.stride == 1) & (c.dilation == 1)
    dense = plane & (c.groups == 1)
    inputs, between, outputs = c.batch * c.channels_in, c.channels_in * c.channels_out, c.batch * c.channels_out
    padded = 1 << np.frexp(c.inputs + c.kernel - 2)[1].astype(np.int64)  # the next power of two
    height, width = padded[:, 0], padded[:, min(1, padded.shape[1] - 1)]
    fft = 2 * (inputs + between + outputs) * height * (width // 2 + 1) * 8
    has_fft = plane & (c.inputs.max(axis=1, initial=0) <= sums._LARGEST_FFT)
    kernel = c.kernel.max(axis=1, initial=1)
    tiles = (-(-c.outputs // np.maximum(sums._TILE + 1 - c.kernel, 1))).prod(axis=1)
    tiling = (inputs * tiles + between + outputs * tiles) * sums._TILE * (sums._TILE // 2 + 1) * 8
    quads = (-(-c.outputs // 4)).prod(axis=1)
    winograd = (3 + c.kernel[:, 0]) ** 2 * (inputs * quads + between + outputs * quads) * 4
    square = (c.kernel == c.kernel[:, :1]).all(axis=1) & ((kernel == 3) | (kernel == 5))
    padded_in, padded_out = -(-c.channels_in // 8) * 8, -(-c.channels_out // 8) * 8
    nhwc = c.element_bytes * (
        c.batch * (padded_in * c.positions_in + padded_out * c.positions_out) + padded_in * padded_out // c.groups * c.taps
    )
    return {
        "gemm": (gemm, lowers),
        "columns": (c.batch * gemm, lowers),
        "fft": (fft, has_fft & (c.groups == 1) & (c.taps > 1)),
        "fft_pointwise": (fft, has_fft & (c.groups == 1) & (c.taps == 1)),
        "fft_grouped": (fft, has_fft & (c.groups > 1)),
        "fft_tiling": (tiling, dense & (kernel > 1) & (kernel < sums._TILE)),
        "winograd": (winograd, dense & square),
        "nhwc": (nhwc, np.ones(len(nhwc), dtype=np.bool_)),
    }


def _time(graph: OpGraph, device: Device, form: _Form, roofline: npt.NDArray[np.float64]) -> dict[str, float]:
    number, total = form.number, max(float(roofline.sum()), 1e-9)
    flops, read, written = graph.costs
    all_flops = sum(flops.tolist())
    num_bytes = (read + written).astype(np.float64)
    traffic = num_bytes / device.bandwidth_bytes_per_s
    launch_bound = roofline <= device.launch_overhead_s
    by_name = np.bincount(form.named, weights=roofline, minlength=len(sums._NAMED) + 1).tolist()
    counts = [len(some) for some in form.of_kind]
    return {
        "log_roofline": math.log(total),
        "log_operators": math.log(max(number, 1)),
        "log_mean_operator": math.log(total / max(number, 1)),
        "launch_share": float(roofline[launch_bound].sum()) / total,
        "launch_count": float(launch_bound.mean()) if number else 0.0,
        **{f"time_{kind}": float(roofline[some].sum()) / total for kind, some in zip(OP_KINDS, form.of_kind, strict=True)},
        **{f"count_{kind}": math.log1p(count) for kind, count in zip(OP_KINDS[:12], counts, strict=False)},
        **{f"phase_{phase.name.lower()}": float(roofline[form.of_phase[phase]].sum()) / total for phase in Phase},
        **{f"name_{name}": seconds / total for name, seconds in zip(sums._NAMED, by_name, strict=False)},
        "traffic_share": float(traffic.sum()) / total,
        "matrix_traffic_share": float(traffic[form.matrix].sum()) / total,
        "log_flops": math.log1p(all_flops),
        "log_bytes": math.log1p(float(num_bytes.sum())),
        "log_intensity": math.log1p(all_flops) - math.log1p(float(num_bytes.sum())),
    }


def _traits(form: _Form, numbers: npt.NDArray[np.int64], roofline: npt.NDArray[np.float64], c: _Convolutions) -> dict[str, float]:
    total = max(float(roofline.sum()), 1e-9)
    seconds = roofline[form.convolutions]
    narrow_in, narrow_out = c.channels_in // c.groups, c.channels_out // c.groups
    single = c.groups == 1
    holds = {
        "depthwise": (c.groups > 1) & (c.groups == c.channels_in),
        "grouped": (c.groups > 1) & (c.groups < c.channels_in),
        "pointwise": single & (c.taps == 1),
        "three": single & (c.taps > 1) & (c.taps <= 9),
        "large": single & (c.taps > 9),
        "image": c.channels_in <= 4,
        "odd": (narrow_in % 8 > 0) | (narrow_out % 8 > 0),
        "strided": c.stride > 1,
        "narrow": narrow_in < 64,
    }
    shares = dict(zip(holds, _summed(seconds, list(holds.values())), strict=True))
    logs = [[math.log(max(size, 1)) for size in sizes.tolist()] for sizes in (narrow_in, narrow_out, c.positions_out)]
    weight, *sizes = _summed(seconds, [np.ones(len(seconds)), *map(np.array, logs)])
    means = np.array(sizes) / weight if weight else np.full(3, -1.0)
    products, m, n, k = numbers[form.of_product].T if form.products else np.zeros((4, 0), dtype=np.int64)
    of_product = {
        "batched": products > 1,
        "odd": (m % 8 > 0) | (n % 8 > 0) | (k % 8 > 0),
        "narrow": np.minimum(n, k) < 64,
        "short": m < 256,
    }
    of_products = dict(zip(of_product, _summed(roofline[form.products], list(of_product.values())), strict=True))
    return {
        **{f"conv_{name}": share / total for name, share in shares.items()},
        **{f"product_{name}": share / total for name, share in of_products.items()},
        **dict(zip(("conv_log_in", "conv_log_out", "conv_log_positions"), map(float, means), strict=True)),
    }


def _summed(seconds: npt.NDArray[np.float64], factors: Sequence[_Array]) -> list[float]:
    """The seconds times each of ``factors``, added up one after the other, as a loop would."""
    if not len(seconds):
        return [0.0] * len(factors)
    sums: list[float] = np.cumsum(seconds[:, None] * np.stack(factors, axis=1), axis=0)[-1].tolist()
    return sums


def _setting(graph: OpGraph, device: Device, form: _Form, numbers: npt.NDArray[np.int64]) -> dict[str, float]:
    without_operators = OpGraph((), (), graph.mode, graph.precision, graph.layout, graph.options)
    batch = 1 if form.batch_at is None else int(numbers[form.batch_at])
    return sums._setting(without_operators, device) | {"log_batch": math.log(max(batch, 1))}


def _fill_columns(
    x: npt.NDArray[np.float16], form: _Form, numbers: npt.NDArray[np.int64], roofline: npt.NDArray[np.float64], device: Device
) -> None:
    """What depends on numbers, into ``x`` (num_ops, len(COLUMNS))."""
    c, some = _Convolutions(form, numbers), form.convolutions
    raw = np.zeros((form.number, len(operators._SIZES) - 5))
    sizes = numbers[form.of_shape]
    raw[:, :3] = numbers[form.starts[:, None] + np.arange(3)]
    raw[:, 3], raw[:, 4], raw[:, 5] = sizes[:, 0], sizes[:, 1], sizes[:, 2:].prod(axis=1)
    raw[:, 9] = 1
    narrow_in, narrow_out = c.channels_in // c.groups, c.channels_out // c.groups
    raw[some, 6:11] = np.stack([c.taps, narrow_in, narrow_out, c.groups, c.positions_in], axis=1)
    if form.products:
        raw[form.products, 11:] = np.roll(numbers[form.of_product], -1, axis=1)
        x[form.products, _PLACE["odd_product"]] = (numbers[form.of_product][:, 1:] % 8 > 0).any(axis=1)
    x[:, :_FIRST_FLAG] = _logs(raw, roofline, device)
    x[:, _PLACE["launch_bound"]] = roofline <= device.launch_overhead_s
    for name, holds in {
        "depthwise": (c.groups > 1) & (c.groups == c.channels_in),
        "pointwise": c.taps == 1,
        "strided": c.stride > 1,
        "dilated": c.dilation > 1,
        "few_channels": c.channels_in <= 4,
        "odd_in": narrow_in % 8 > 0,
        "odd_out": narrow_out % 8 > 0,
    }.items():
        x[some, _PLACE[name]] = holds


def _logs(raw: npt.NDArray[np.float64], roofline: npt.NDArray[np.float64], device: Device) -> npt.NDArray[np.float64]:
    """The columns of sizes. Shape: (num_ops, _FIRST_FLAG)."""
    flops, moved, elements = raw[:, 0], raw[:, 1] + raw[:, 2], raw[:, 3] * raw[:, 4] * raw[:, 5]
    derived = [
        flops / device.flops_per_s("fp16") * 1e6,
        moved / device.bandwidth_bytes_per_s * 1e6,
        roofline * 1e6,
        moved / max(device.l2_bytes, 1),
        elements / (device.num_sms * operators._THREADS),
    ]
    logs, plain = np.log(np.maximum(np.stack(derived, axis=1), 1e-4)), np.log1p(raw)
    return np.concatenate([plain[:, :3], logs, plain[:, 3:]], axis=1)

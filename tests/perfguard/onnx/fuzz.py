"""Reads damaged ONNX files until one crashes, hangs or raises what it should not. A script, so that a crash is one of its own.

    python fuzz.py NUMBER SEED FOLDER

Prints how many files were read and refused, and the peak memory. A file that takes more than thirty seconds, on a busy machine,
ends the process by SIGALRM; the file is left in FOLDER.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections import Counter
from pathlib import Path

import onnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from perfguard import OpGraph
from perfguard.exceptions import PerfGuardError
from perfguard.onnx import graph_from_onnx

LONGEST_S = 30.0
_ODD_SIZES = (-1, 0, 1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
_ODD_VARINTS = (b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x10", b"\xff\xff\xff\xff\x07", b"\x00", b"\x80")


_DATA = Path(onnx.__file__).parent / "backend/test/data"
SEEDS = [path.read_bytes() for path in sorted(_DATA.rglob("*.onnx")) if path.stat().st_size <= 20_000]
"""Real models of every sort: those of the backend suite that are small."""


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A model with some bytes flipped, cut, repeated or put in, or some of its fields changed."""
    model = draw(st.sampled_from(SEEDS))
    if draw(st.booleans()):
        model = _with_odd_fields(draw, model)
    data = bytearray(model)
    for _ in range(draw(st.integers(0, 6))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        length = draw(st.integers(1, 40))
        match draw(st.sampled_from(("flip", "cut", "repeat", "insert", "varint", "truncate"))):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + length]
            case "repeat":
                data[at:at] = data[at : at + length] * draw(st.integers(1, 4))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "varint":
                data[at : at + 1] = draw(st.sampled_from(_ODD_VARINTS))
            case "truncate":
                del data[at:]
    return bytes(data)


def _with_odd_fields(draw: st.DrawFn, data: bytes) -> bytes:
    """Damage that is still a valid protocol buffer: sizes, names, attributes, versions."""
    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from(_ODD_SIZES))
        node = draw(st.sampled_from(list(graph.node))) if graph.node else None
        match draw(st.sampled_from(("input", "weight", "attribute", "rewire", "operator", "opset", "duplicate"))):
            case "input" if graph.input and graph.input[0].type.tensor_type.shape.dim:
                value = draw(st.sampled_from(list(graph.input)))
                for dim in value.type.tensor_type.shape.dim[: draw(st.integers(1, 3))]:
                    dim.dim_value = size
            case "weight" if graph.initializer:
                tensor = draw(st.sampled_from(list(graph.initializer)))
                tensor.dims[:] = [size] * draw(st.integers(0, 4))
            case "attribute" if node is not None and node.attribute:
                attribute = draw(st.sampled_from(list(node.attribute)))
                attribute.i = size
                attribute.ints[:] = [size] * max(len(attribute.ints), draw(st.integers(0, 3)))
            case "rewire" if node is not None and node.input:
                names = [name for other in graph.node for name in (*other.input, *other.output)]
                node.input[draw(st.integers(0, len(node.input) - 1))] = draw(st.sampled_from(names))
            case "operator" if node is not None:
                node.op_type = draw(st.sampled_from([schema.name for schema in onnx.defs.get_all_schemas()]))
            case "opset" if model.opset_import:
                model.opset_import[0].version = draw(st.integers(-1, 40))
            case "duplicate" if node is not None:
                graph.node.append(node)
    return bytes(model.SerializeToString())


def run(number: int, seed_: int, folder: Path) -> Counter[str]:
    """Read ``number`` damaged files; what happened, by kind."""
    outcomes: Counter[str] = Counter()
    path = folder / "damaged.onnx"

    @seed(seed_)
    @settings(max_examples=number, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(damaged())
    def read(data: bytes) -> None:
        path.write_bytes(data)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)  # nobody handles SIGALRM, so it ends the process, C++ or not
        try:
            graph = graph_from_onnx(path)
            OpGraph.from_bytes(graph.to_bytes())
            outcomes["read"] += 1
        except PerfGuardError as error:
            outcomes["refused" if str(path) in str(error) else "refused without a name"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    read()
    # ru_maxrss of this process would be that of the process that started it, until this one needs more.
    own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    outcomes["peak_mib"] = max(int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024
    return outcomes


if __name__ == "__main__":
    for key, value in run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])).items():
        print(key, value)

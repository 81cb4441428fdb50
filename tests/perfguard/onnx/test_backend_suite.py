"""Models of ONNX's own backend test suite are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from perfguard import OpGraph
from perfguard.onnx import graph_from_onnx

_SIZE_OF_OPEN_DIMENSIONS = 3


def suite_files() -> list[Path]:
    return sorted((Path(onnx.__file__).parent / "backend/test/data").rglob("*.onnx"))


def node_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own overflows and divisions by zero
        from onnx.backend.test.case.node import collect_testcases

        yield from ((case.name, case.model) for case in collect_testcases(None) if case.model is not None)


def bound(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes for the inputs that leave a size open or have an empty one, which a user has to confirm."""
    shapes = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_value < 1 for dim in dims):
            shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else _SIZE_OF_OPEN_DIMENSIONS for dim in dims)
    return shapes


def test_files_of_the_suite_are_read() -> None:
    """A sample, since each is read in a process of its own. All were when this was written."""
    files = suite_files()
    assert len(files) > 100
    for path in files[::15]:
        graph = graph_from_onnx(path, dims=bound(onnx.load(path, load_external_data=False)))
        assert OpGraph.from_bytes(graph.to_bytes()).content_hash == graph.content_hash


@pytest.mark.slow
def test_operators_of_the_suite_are_read(tmp_path: Path) -> None:
    """A sample of about forty: each is read in a process of its own. All were when this was written."""
    path = tmp_path / "model.onnx"
    models = list(node_models())
    assert len(models) > 1500
    for name, model in models[::40]:
        path.write_bytes(model.SerializeToString())
        assert graph_from_onnx(path, dims=bound(model)).flops >= 0, name

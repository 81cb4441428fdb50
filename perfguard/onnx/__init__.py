"""Networks from ONNX files. Users call `perfguard.OpGraph.from_onnx`, and :func:`measure_onnx`."""

from perfguard.onnx._build import DEFAULT_MAX_BYTES, graph_from_onnx
from perfguard.onnx._measure import measure_onnx

__all__ = ["DEFAULT_MAX_BYTES", "graph_from_onnx", "measure_onnx"]

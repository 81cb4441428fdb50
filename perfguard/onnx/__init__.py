"""Networks from ONNX files: :func:`graph_from_onnx` reads one, :func:`measure_onnx` runs one."""

from perfguard.onnx._build import DEFAULT_MAX_BYTES, graph_from_onnx
from perfguard.onnx._measure import measure_onnx

__all__ = ["DEFAULT_MAX_BYTES", "graph_from_onnx", "measure_onnx"]

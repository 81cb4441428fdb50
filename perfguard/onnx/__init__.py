"""Networks from ONNX files: :func:`graph_from_onnx` reads one."""

from perfguard.onnx.graph import graph_from_onnx
from perfguard.onnx.read import DEFAULT_MAX_BYTES

__all__ = ["DEFAULT_MAX_BYTES", "graph_from_onnx"]

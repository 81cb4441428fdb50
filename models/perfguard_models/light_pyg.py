"""Imports torch_geometric without what its package drags along and messages never use.

`import torch_geometric` imports its data sets, which import Transformers and pandas. Here they are imported when somebody uses them.
`torch._dynamo`, which it imports too, stays: PyTorch imports it with the first optimizer, and what is imported before a dry run is
forked need not be imported in each.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - whole, so before the block below


class LazyModule(ModuleType):
    """Stands for a module until an attribute of it is used. Then the module is imported.

    While it stands in `sys.modules`, it has no file and the like: `inspect` and `unittest` ask all modules there for these, on
    any thread, and in the middle of an import.
    """

    def __getattr__(self, name: str) -> Any:
        stands_in = sys.modules.get(self.__name__) is self
        if stands_in and name.startswith("__") and name not in _OF_IMPORTS:
            raise AttributeError(f"{self.__name__!r} is not imported yet, so it has no {name!r}.")
        if stands_in:
            sys.modules.pop(self.__name__, None)  # another thread may have done so
        return getattr(importlib.import_module(self.__name__), name)


_OF_IMPORTS = ("__path__", "__all__")
"""What `import a.b.c` and `from a.b import *` ask of a module."""


@contextmanager
def importing_lazily(*names: str) -> Iterator[None]:
    """Within the block, an import of one of the modules ``names`` imports nothing yet. What is imported already stays."""
    lazy = {name: LazyModule(name) for name in names if name not in sys.modules}
    sys.modules.update(lazy)
    try:
        yield
    finally:
        for name, module in lazy.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


with warnings.catch_warnings():  # PyG uses what torch has deprecated, and a script may turn warnings into errors
    warnings.simplefilter("ignore")
    with importing_lazily("torch_geometric.datasets"):
        import torch_geometric
        from torch_geometric.nn.conv import MessagePassing

if not TYPE_CHECKING and not hasattr(torch_geometric, "datasets"):
    torch_geometric.datasets = LazyModule("torch_geometric.datasets")

__all__ = ["MessagePassing"]

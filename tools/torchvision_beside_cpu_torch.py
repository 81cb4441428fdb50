"""Lets PyPI's torchvision be imported beside a CPU build of PyTorch. `make venv` installs it; only .venv has it.

PyPI's wheel is built for CUDA, and its C library does not load where PyTorch has none. torchvision is ready for that
(`torchvision.ops.nms` then raises "Couldn't load custom C++ ops"), but version 0.28 cannot be imported any more: it describes
operators that only the C library declares, and PyTorch answers "operator torchvision::nms does not exist". With torchvision come
down timm, torchmetrics, Lightning and Transformers.

The `.pth` file of the same name imports this module at every start of Python. It waits for torchvision's import, and declares the
operators' names if the C library did not load. Where it did, or without torchvision, nothing happens. No operator can be called
that could not be called before. PyTorch's own index has builds of torchvision that fit (CONTRIBUTING.md); they do not need this.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip
_declared: list[object] = []  # what is declared lasts as long as somebody holds it


class _Finder:
    """Finds ``torchvision.extension``, the module that loads the C library, and looks at it after it was imported."""

    @staticmethod
    def find_spec(name: str, path: list[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision.extension":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_look(module: ModuleType) -> None:
            load(module)
            if not module._has_ops():
                _declare()

        spec.loader.exec_module = load_and_look  # type: ignore[method-assign]
        return spec


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}() -> ()")
    _declared.append(library)


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]

"""The predictors that can be trained from tables, by name."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from perfguard.exceptions import PredictorError
from perfguard_research.dataset import feature_sets
from perfguard_research.learner import Trainable

_PACKAGES = ("perfguard_models.", "perfguard_research.")
_RUNS = "perfguard_research.dataset"
_WHERE = {
    "memory-forest": ("perfguard_research.memory_forest", "TrainableMemory"),
    "two-clocks": ("perfguard_research.two_clocks", "TrainableClocks"),
    "trees": ("perfguard_research.papers.baselines", "Trees"),
    "trees-no-replay": ("perfguard_research.papers.baselines", "TreesWithoutReplay"),
    "dnnperf": ("perfguard_research.papers.dnnperf", "DNNPerf"),
    "dnnabacus": ("perfguard_research.papers.dnnabacus", "DNNAbacus"),
    "perfseer": ("perfguard_research.papers.perfseer", "PerfSeer"),
    "dippm": ("perfguard_research.papers.dippm", "DIPPM"),
    "lilou": ("perfguard_research.papers.lilou", "Lilou"),
    "roofline": ("perfguard_research.papers.baselines", "Roofline"),
    "flops": ("perfguard_research.papers.baselines", "FlopsLinear"),
}
"""Modules by name. They are imported late, because the papers' package imports this one."""
NAMES = tuple(_WHERE)


def learner_class(name: str) -> type[Trainable]:
    """The class of the learner ``name``.

    Raises:
        PredictorError: for a name that there is not.
    """
    if name not in _WHERE:
        raise PredictorError(f"No predictor that can be trained is called {name!r}. There are {', '.join(NAMES)}.")
    module, attribute = _WHERE[name]
    found: Any = getattr(importlib.import_module(module), attribute)
    return found  # type: ignore[no-any-return]


def source_of(name: str) -> str:
    """A hash of the code that the learner ``name`` consists of: its module, what that imports from here, and its views.

    Comments and docstrings do not count. How graphs are traced and tables are read does not either: `perfguard_research.dataset`
    says what runs are, and they are hashed themselves.
    """
    waiting = [_WHERE[name][0], *(feature_sets()[view].module for view in learner_class(name).views)]
    code: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        if module not in code and module != _RUNS:
            code[module], imported = _code_of(module)
            waiting += imported
    return hashlib.sha256(repr(sorted(code.items())).encode()).hexdigest()


@functools.cache
def _code_of(module: str) -> tuple[str, list[str]]:
    """The code of a module without comments and docstrings, and which of our modules it imports."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    imports = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return ast.dump(tree), [name for name in imports if name.startswith(_PACKAGES)]

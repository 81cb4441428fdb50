"""The predictors that can be trained from tables, by name."""

from __future__ import annotations

import importlib
from typing import Any

from perfguard.exceptions import PredictorError
from perfguard_models.learner import Learner

_WHERE = {
    "guardnet": ("perfguard_models.ensemble", "GuardEnsemble"),
    "guardnet-network": ("perfguard_models.operator_network", "OperatorNetwork"),
    "trees": ("perfguard_models.baselines", "Trees"),
    "trees-no-replay": ("perfguard_models.baselines", "TreesWithoutReplay"),
    "dnnperf": ("perfguard_models.dnnperf", "DNNPerf"),
    "dnnabacus": ("perfguard_models.dnnabacus", "DNNAbacus"),
    "perfseer": ("perfguard_models.perfseer", "PerfSeer"),
    "dippm": ("perfguard_models.dippm", "DIPPM"),
    "lilou": ("perfguard_models.lilou", "Lilou"),
    "roofline": ("perfguard_models.baselines", "Roofline"),
    "flops": ("perfguard_models.baselines", "FlopsLinear"),
}
NAMES = tuple(_WHERE)


def learner_class(name: str) -> type[Learner]:
    """The class of the learner ``name``.

    Raises:
        PredictorError: for a name that there is not.
    """
    if name not in _WHERE:
        raise PredictorError(f"No predictor that can be trained is called {name!r}. There are {', '.join(NAMES)}.")
    module, attribute = _WHERE[name]
    found: Any = getattr(importlib.import_module(module), attribute)
    return found  # type: ignore[no-any-return]

"""The search of a study, and its memory of rejected configurations. Every tuner's plugin shares both.

A configuration that does not fit is judged once more after another trial has ended, because the guard may have learnt from it.
Then it is not judged again, so a search that proposes it for ever costs nothing. The 1,024 rejections that were used last are
remembered. An older one is judged as a new one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfguard.exceptions import BudgetWarning, NothingFeasibleWarning, warn_user
from perfguard.last_used import LastUsed
from perfguard.verdict import EVEN_CHANCE, Verdict

if TYPE_CHECKING:
    from perfguard.guard import Guard


@dataclass(slots=True)
class Rejection:
    """A configuration that does not fit."""

    verdict: Verdict
    """The latest on it."""
    num_ended: int
    """Trials of the study that had ended by then."""
    num_judged: int = 1
    num_proposed: int = 1
    """Proposals of it, those that were rejected from memory among them."""
    decision_id: str = ""
    """Key of the verdict in the measurement log."""


@dataclass(slots=True)
class Search:
    """The proposals of a study since its last launch, and its latest rejections."""

    patience: int = 30
    """Rejections in a row after which a search that finds nothing sure launches what more likely fits than not."""
    most_rejected: int = 300
    """Rejections in a row after which nothing is to be found."""
    num_launched: int = 0
    num_rejected: int = 0
    """Proposals in a row that do not fit."""
    least_doubtful: float = 1.0
    """Their least chance of breaking a limit."""
    last: Verdict | None = None
    """Verdict on the last of them."""
    has_warned: bool = False
    num_ended: int = 0
    """Trials of the study that have ended, from which the guard may have learnt."""
    rejected: LastUsed[Hashable, Rejection] = field(default_factory=lambda: LastUsed(1024))
    """By :meth:`perfguard.guard.Guard.key_of`."""
    any_repeated: bool = False
    """Whether a configuration was rejected more than once."""

    def begin(self) -> None:
        """Begin to search again, with what is remembered."""
        self.num_launched, self.num_rejected, self.least_doubtful = 0, 0, 1.0
        self.last, self.has_warned = None, False

    def recall(self, key: Hashable, guard: Guard) -> Rejection | None:
        """Return the rejection of ``key``, if judging it again would come to the same.

        It is void if the accepted chance has risen enough, or if a trial has ended since ``key`` was judged for the first time.
        """
        known = self.rejected.get(key)
        if known is None or known.verdict.p_violation <= (self.threshold(guard) or guard.threshold):
            return None
        if known.num_judged == 1 and known.num_ended != self.num_ended:
            return None
        known.num_proposed += 1
        self.any_repeated = True
        return known

    def remember(self, key: Hashable, verdict: Verdict, *, decision_id: str = "") -> Rejection | None:
        """Remember that ``key`` does not fit, or forget it where it does now. Return what was known of it."""
        before = self.rejected.get(key)
        if verdict.action != "prune":
            return self.rejected.pop(key)
        known = Rejection(verdict, self.num_ended, decision_id=decision_id)
        if before is not None:
            known.num_judged, known.num_proposed = before.num_judged + 1, before.num_proposed + 1
            self.any_repeated = True
        self.rejected.put(key, known)
        return before

    @property
    def is_over(self) -> bool:
        """Whether so much was rejected that there is nothing to be found."""
        return self.num_rejected >= self.most_rejected

    def threshold(self, guard: Guard) -> float | None:
        """Return the chance of breaking a limit to accept next. None: what the guard's risk has left."""
        is_patient = self.num_rejected >= self.patience and self.least_doubtful <= guard.patient_threshold
        return guard.patient_threshold if is_patient else None

    def count(self, verdict: Verdict, guard: Guard) -> None:
        """Count a proposal. A launch that is not sure to fit is warned of once."""
        if verdict.action == "prune":
            self.num_rejected, self.last = self.num_rejected + 1, verdict
            self.least_doubtful = min(self.least_doubtful, verdict.p_violation)
            return
        if self.num_rejected >= self.patience and verdict.p_violation > guard.risk:
            guard.warn_once(
                BudgetWarning,
                f"No proposal is certain to fit ({self.num_rejected} in a row), so PerfGuard launches a trial that more "
                "likely fits than not (shown once). More trials may break a budget than `risk` says. Raise one of the two.",
                about="patience",
            )
        self.num_launched, self.num_rejected, self.least_doubtful = self.num_launched + 1, 0, 1.0

    def warn_that_nothing_fits(self) -> None:
        """Warn once that the search finds nothing, and how to fix it. Without a proposal there is no warning."""
        if self.last is None or self.has_warned:
            return
        self.has_warned = True
        what, verb, remedy = "fits", "would", ""
        if self.last.p_violation <= EVEN_CHANCE:
            more_risk = math.ceil(10 * self.last.p_violation) / 10
            what, verb, remedy = "is sure to fit", "may", f", accept more risk (risk={more_risk:g})"
        warn_user(
            f"Nothing {what}: {self.num_rejected} proposals in a row {verb} break a budget, the last of them {self.last.reason}. "
            f"The study ends here. Raise the budget, widen the search space towards smaller trials{remedy}, "
            "or allow repairs (on_violation='repair').",
            NothingFeasibleWarning,
        )

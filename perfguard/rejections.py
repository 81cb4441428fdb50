"""The search of a study, and its memory of rejected configurations. Every tuner's plugin shares both.

A configuration that does not fit is judged again when a trial has ended since, because the guard may have learnt from it. Until
then it is rejected from memory, so a search that proposes it for ever costs nothing. The 1,024 rejections that were used last are
remembered. An older one is judged as a new one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import NothingFeasibleWarning, warn_user
from perfguard.last_used import LastUsed
from perfguard.risk_budget import DEFAULT_RISK, EVEN_CHANCE
from perfguard.verdict import Verdict

if TYPE_CHECKING:
    from perfguard.guard import Guard


@dataclass(slots=True)
class Rejection:
    """A configuration that does not fit."""

    verdict: Verdict
    """The latest on it."""
    num_ended: int
    """Trials of the study that had ended by then."""
    num_proposed: int = 1
    """Proposals of it, those that were rejected from memory among them."""
    decision_id: str = ""
    """Key of the verdict in the measurement log."""


@dataclass(frozen=True, slots=True)
class LeastDoubtful:
    """The rejected proposal that breaks a limit with the smallest chance."""

    verdict: Verdict
    key: Hashable
    """Its key in :attr:`Search.rejected`."""
    params: Mapping[str, Any]
    """The hyperparameters by which its tuner proposes it again."""

    @property
    def doubt(self) -> tuple[float, float]:
        """Chance of breaking a limit, and the largest margin, since chances near one are alike."""
        return self.verdict.p_violation, max(self.verdict.margins.values(), default=0.0)


@dataclass(slots=True)
class Search:
    """The proposals of a study since its last launch, and its latest rejections."""

    most_rejected: int = 300
    """Rejections in a row after which nothing is to be found."""
    num_launched: int = 0
    num_rejected: int = 0
    """Proposals in a row that do not fit."""
    last: Verdict | None = None
    """Verdict on the last of them."""
    least_doubtful: LeastDoubtful | None = None
    """The one to try before the search ends with nothing. None: physics rules all of them out, or it was tried."""
    tried: Hashable = None
    """Key of the one that is tried, or was. None: none was."""
    has_warned: bool = False
    num_ended: int = 0
    """Trials of the study that have ended, from which the guard may have learnt."""
    rejected: LastUsed[Hashable, Rejection] = field(default_factory=lambda: LastUsed(1024))
    """By :meth:`perfguard.guard.Guard.key_of`."""
    any_repeated: bool = False
    """Whether a configuration was rejected more than once."""
    num_repeated: int = 0
    """Proposals that were rejected from memory."""
    superseded: set[str] = field(default_factory=set)
    """Keys of the verdicts in the measurement log that a second look has taken the place of."""

    def begin(self) -> None:
        """Begin to search again, with what is remembered."""
        self.num_launched = 0
        self.num_rejected = 0
        self.last = None
        self.least_doubtful = None
        self.tried = None
        self.has_warned = False

    def recall(self, key: Hashable) -> Rejection | None:
        """Return the rejection of ``key``. None: it is to be judged, because a trial has ended since, or it is to be tried."""
        known = self.rejected.get(key)
        if known is None or known.num_ended != self.num_ended or self._is_tried(key):
            return None
        known.num_proposed += 1
        self.num_repeated += 1
        self.any_repeated = True
        return known

    def remember(
        self, key: Hashable, verdict: Verdict, *, params: Mapping[str, object], decision_id: str = ""
    ) -> Rejection | None:
        """Remember that ``key`` does not fit, or forget it where it does now. Return what was known of it.

        ``params`` are those by which the tuner can propose it again.
        """
        before = self.rejected.get(key)
        if before is not None:
            self.superseded.add(before.decision_id)
        if verdict.action != "prune":
            return self.rejected.pop(key)
        known = Rejection(verdict, self.num_ended, decision_id=decision_id)
        if before is not None:
            known.num_proposed = before.num_proposed + 1
            self.any_repeated = True
        self.rejected.put(key, known)
        found = LeastDoubtful(verdict, key, params)
        if not verdict.is_ruled_out and (self.least_doubtful is None or found.doubt < self.least_doubtful.doubt):
            self.least_doubtful = found
        return before

    def last_try(self, guard: Guard) -> Mapping[str, Any] | None:
        """Return the proposal to try before the search ends with nothing, once. None: there is none, or a trial was launched.

        A guard that can afford no failure tries none.
        """
        if self.num_launched or self.tried is not None or self.least_doubtful is None or not guard.risk:
            return None
        self.tried = self.least_doubtful.key
        self.num_rejected = 0
        return self.least_doubtful.params

    def _is_tried(self, key: Hashable) -> bool:
        return self.tried is not None and key == self.tried and not self.num_launched

    def grounds(self, key: Hashable) -> str:
        """Return why ``key`` is launched whatever is predicted. Empty: it is not."""
        return "but it is the least doubtful of all proposals, and none fits" if self._is_tried(key) else ""

    @property
    def is_over(self) -> bool:
        """Whether so much was rejected that there is nothing to be found."""
        return self.num_rejected >= self.most_rejected

    def count(self, verdict: Verdict) -> None:
        """Count a proposal."""
        if verdict.action == "prune":
            self.num_rejected += 1
            self.last = verdict
            return
        self.num_launched += 1
        self.num_rejected = 0

    def warn_that_nothing_fits(self) -> None:
        """Warn once that the search finds nothing, and how to fix it. Without a proposal there is no warning."""
        if self.last is None or self.has_warned:
            return
        self.has_warned = True
        what = "fits"
        verb = "would"
        remedy = ""
        if self.last.p_violation <= EVEN_CHANCE:
            what = "is sure to fit"
            verb = "may"
            remedy = f", accept failures (risk={DEFAULT_RISK:g})"
        warn_user(
            f"Nothing {what}: {self.num_rejected} proposals in a row {verb} break a budget, the last of them {self.last.reason}. "
            f"The study ends here. Raise the budget, widen the search space towards smaller trials{remedy}, "
            "or allow repairs (on_violation='repair').",
            NothingFeasibleWarning,
        )

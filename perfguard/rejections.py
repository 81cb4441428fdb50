"""The memory of rejected configurations, which every tuner's plugin shares.

A configuration that does not fit is judged once more after another trial has ended, because the guard may have learnt from it.
Then it is never judged again, so a search that proposes it for ever costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from perfguard.verdict import Verdict


@dataclass(slots=True)
class Rejection:
    """A configuration that does not fit."""

    verdict: Verdict
    """The latest on it."""
    num_ended: int
    """Trials that had ended by then."""
    num_judged: int = 1
    num_proposed: int = 1
    """Proposals of it, those that were rejected from memory among them."""
    decision_id: str = ""
    """Key of the verdict in the measurement log."""


class Rejections:
    """Remembers rejected configurations by a key that the plugin chooses: whatever decides what the trial runs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Rejection] = {}

    def get(self, key: Hashable) -> Rejection | None:
        """Return what is known of ``key``. None: it was never rejected, or has been launched since."""
        return self._known.get(key)

    def recall(self, key: Hashable, *, num_ended: int, accepted: float) -> Rejection | None:
        """Return the rejection of ``key``, if judging it again would come to the same.

        After ``num_ended`` trials the guard may have learnt more. If the ``accepted`` chance has risen enough, it is void.
        """
        known = self._known.get(key)
        if known is None or known.verdict.p_violation <= accepted:
            return None
        if known.num_judged == 1 and known.num_ended != num_ended:
            return None  # a trial has ended since
        known.num_proposed += 1
        return known

    def add(self, key: Hashable, verdict: Verdict, *, num_ended: int, decision_id: str = "") -> Rejection:
        """Remember that ``key`` does not fit."""
        before = self._known.get(key)
        known = Rejection(verdict, num_ended, decision_id=decision_id)
        if before is not None:
            known.num_judged, known.num_proposed = before.num_judged + 1, before.num_proposed + 1
        self._known[key] = known
        return known

    def forget(self, rejection: Rejection) -> None:
        """Remove a rejection that another verdict has replaced, under all its keys."""
        for key, known in list(self._known.items()):  # a copy: other threads add meanwhile
            if known is rejection:
                self._known.pop(key, None)

    def clear(self) -> None:
        """Forget everything: the trials run something else now."""
        self._known.clear()

    @property
    def any_repeated(self) -> bool:
        """Whether a configuration was rejected more than once."""
        return any(rejection.num_proposed > 1 for rejection in list(self._known.values()))

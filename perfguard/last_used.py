"""LastUsed: a mapping with a bound, for what is remembered over a long study."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def _weightless(value: object) -> int:
    return 0


def _may_go(value: object) -> bool:
    return False


class LastUsed(Generic[K, V]):
    """A mapping that keeps the entries that were used last, and forgets the others. Threads may share it.

    An entry is used when it is put in and when it is got. The newest entry is kept, however heavy it is.

    Example:
        >>> squares: LastUsed[int, int] = LastUsed(most=2)
        >>> for number in (2, 3):
        ...     squares.put(number, number**2)
        >>> squares.get(2)
        4
        >>> squares.put(4, 16)
        >>> squares.get(3) is None, squares.get(2)
        (True, 4)

    Args:
        most: the largest number of entries.
        most_weight: the largest sum of the weights of all entries. None: there is no such bound.
        weigh: returns the weight of a value, at least 0. It is called once for each value.
        must_stay: whether a value must not be forgotten now. If all must stay, there are more than ``most`` for a while.
    """

    def __init__(
        self,
        most: int,
        *,
        most_weight: int | None = None,
        weigh: Callable[[V], int] = _weightless,
        must_stay: Callable[[V], bool] = _may_go,
    ) -> None:
        self._most = most
        self._most_weight = most_weight
        self._weigh = weigh
        self._must_stay = must_stay
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        """Values with their weights, the one that was used last at the end."""
        self._weight = 0
        self._lock = threading.RLock()

    def get(self, key: K) -> V | None:
        """Return the value of ``key``. None: there is no such entry, or not any more."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V) -> None:
        """Put ``value`` in the place of what ``key`` had."""
        weight = self._weigh(value)
        with self._lock:
            self.pop(key)
            self._entries[key] = value, weight
            self._weight += weight
            self._forget()

    def get_or_put(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of ``key``. If there is none, ``make`` it."""
        with self._lock:
            found = self.get(key)
            if found is None:
                found = make()
                self.put(key, found)
            return found

    def pop(self, key: K) -> V | None:
        """Remove the entry of ``key`` and return its value. None: there is no such entry."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._weight -= entry[1]
            return entry[0]

    def newest_first(self) -> list[tuple[K, V]]:
        """Return all entries, the one that was used last first. They do not count as used."""
        with self._lock:
            return [(key, value) for key, (value, _) in reversed(self._entries.items())]

    def _forget(self) -> None:
        """Forget what was used longest ago, until both bounds hold."""
        newest = next(reversed(self._entries))
        for key in [*self._entries] if self._is_full else ():
            if not self._is_full:
                return
            if key != newest and not self._must_stay(self._entries[key][0]):
                self.pop(key)

    @property
    def _is_full(self) -> bool:
        return len(self._entries) > self._most or (self._most_weight is not None and self._weight > self._most_weight)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"} | {"_entries": self._entries.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

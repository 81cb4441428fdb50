"""A LastUsed keeps what was used last within its bounds, in threads and in a pickle."""

from __future__ import annotations

import copy
import pickle
import threading

from hypothesis import given
from hypothesis import strategies as st

from perfguard.last_used import LastUsed


def identity(value: int) -> int:
    return value


def is_odd(value: int) -> bool:
    return value % 2 == 1


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["get", "put", "pop"]), st.integers(0, 8)), max_size=60))
def test_same_as_a_list_from_which_the_oldest_goes(most: int, calls: list[tuple[str, int]]) -> None:
    found: LastUsed[int, int] = LastUsed(most)
    plain: list[int] = []  # the one that was used last at the end
    for call, key in calls:
        known = key if key in plain else None
        if call == "get":
            assert found.get(key) == known
        elif call == "pop":
            assert found.pop(key) == known
        else:
            found.put(key, key)
        if key in plain:
            plain.remove(key)
        if call == "put" or (call == "get" and known is not None):
            plain = [*plain, key][-most:]
        assert [key for key, _ in found.newest_first()] == plain[::-1]


def test_weights_have_a_bound_of_their_own_and_the_newest_stays() -> None:
    found: LastUsed[str, int] = LastUsed(100, most_weight=10, weigh=identity)
    for name, weight in (("a", 4), ("b", 4), ("c", 2)):
        found.put(name, weight)
    assert [name for name, _ in found.newest_first()] == ["c", "b", "a"]
    found.get("a")
    found.put("d", 5)  # "b" goes, and "c": 4 + 2 + 5 is too much
    assert [name for name, _ in found.newest_first()] == ["d", "a"]
    found.put("huge", 1000)
    assert [name for name, _ in found.newest_first()] == ["huge"]
    found.put("huge", 1)  # in the place of the heavy one
    found.put("e", 9)
    assert len(found) == 2


def test_what_must_stay_is_not_forgotten() -> None:
    found: LastUsed[int, int] = LastUsed(2, must_stay=is_odd)
    for number in (1, 3, 5, 2, 4):
        found.put(number, number)
    assert [number for number, _ in found.newest_first()] == [4, 5, 3, 1]


def test_pickle_and_copy_are_independent() -> None:
    found: LastUsed[str, int] = LastUsed(2, most_weight=10, weigh=identity, must_stay=is_odd)
    found.put("a", 4)
    for other in (pickle.loads(pickle.dumps(found)), copy.copy(found)):
        other.put("b", 4)
        other.put("c", 4)
        assert [name for name, _ in other.newest_first()] == ["c", "b"]
    assert [name for name, _ in found.newest_first()] == ["a"]


def test_threads_make_an_entry_once() -> None:
    found: LastUsed[int, object] = LastUsed(8)
    seen: list[object] = []
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        for number in range(500):
            seen.append((number % 8, found.get_or_put(number % 8, object)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 8

"""A search remembers its latest rejections, and says whether any was proposed twice."""

from __future__ import annotations

from dataclasses import replace

from perfguard.guard import key_of_params
from perfguard.rejections import Search
from perfguard.verdict import Verdict
from tests.perfguard.log_rows import PRUNED


def test_thousands_of_rejections_are_bounded_and_an_old_one_is_judged_as_new() -> None:
    search = Search()
    for number in range(5000):
        assert search.recall(number) is None
        search.remember(number, PRUNED, params={})
    assert len(search.rejected) == 1024
    assert not search.any_repeated
    assert search.recall(0) is None, "forgotten, so it is judged again"
    known = search.recall(4999)
    assert known is not None
    assert known.verdict is PRUNED
    assert search.any_repeated


def test_one_that_is_proposed_for_ever_is_never_forgotten() -> None:
    search = Search()
    search.remember("again", PRUNED, params={})
    for number in range(3000):
        search.remember(number, PRUNED, params={})
        assert search.recall("again") is not None


def test_judged_twice_counts_as_repeated_and_a_launch_forgets() -> None:
    search = Search()
    search.remember("a", PRUNED, params={})
    assert not search.any_repeated
    before = search.remember("a", replace(PRUNED), params={})
    assert before is not None
    assert search.any_repeated
    search.remember("a", Verdict(action="launch", unjudged="it fits now"), params={})
    assert len(search.rejected) == 0


def test_key_of_large_parameters_is_short() -> None:
    assert len(key_of_params({"table": list(range(100_000))})) == 64
    assert key_of_params({"a": 1, "b": object}) == key_of_params({"b": object, "a": 1})
    assert key_of_params({"a": 1}) != key_of_params({"a": 2})

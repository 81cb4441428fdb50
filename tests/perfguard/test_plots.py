"""The pictures show the records' numbers, and say so where there is nothing to show."""

from __future__ import annotations

import pytest

from perfguard.budget import Limit
from perfguard.exceptions import ConfigurationError
from perfguard.plots import outcome_of, plot_budget, plot_savings
from perfguard.predictor import Estimate
from perfguard.record import TrialRecord
from perfguard.verdict import Verdict
from tests.perfguard.test_record import GIB, record
from tests.perfguard.test_summary import STUDY

pytest.importorskip("plotly")


def test_each_trial_has_one_outcome() -> None:
    found = [outcome_of(one) for one in STUDY]
    assert found == [
        "launched",
        "over",
        "failed",
        "unmeasured",
        "repaired",
        "pruned",
        "pruned",
        "pruned",
        "unguarded",
        "unguarded",
    ]


def test_budget_shows_predicted_and_measured() -> None:
    figure = plot_budget(STUDY, quantity="memory")
    layers = {trace.name: trace for trace in figure.data}
    launched = layers["ran within budget (1)"]
    assert (list(launched.x), list(launched.y)) == ([5.0], [5.0])
    assert layers["ran, broke a budget (1)"].x[0] == 4.0
    assert len(layers["pruned before launch (3)"].y) == 3
    assert max(layers["pruned before launch (3)"].x) < 4.0, "in the margin"
    assert "budget, 10 GiB" in layers
    assert "2 of 3 measured trials lie in their 90% interval" in figure.layout.title.text


def test_host_memory_is_drawn_in_bytes() -> None:
    estimate = Estimate(24 * GIB, 0.1)
    verdict = Verdict(action="launch", predicted={"host_memory": estimate}, limits=(Limit("host_memory", 32 * GIB, estimate),))
    figure = plot_budget([TrialRecord(number=0, verdict=verdict, status="ok")], quantity="host_memory")
    assert figure.layout.yaxis.title.text == "predicted host memory (GiB)"
    assert "budget, 32 GiB" in {trace.name for trace in figure.data}


def test_savings_add_up() -> None:
    figure = plot_savings(STUDY)
    layers = {trace.name: trace for trace in figure.data if trace.name}
    assert "pruned: trial time (1, 50.0 s predicted)" in layers
    assert "pruned: peak memory (2, 0 s predicted)" in layers, "a trial that fails at once takes no time"
    assert layers["launched, broke a budget (1, 80.0 s)"].y[-1] == pytest.approx(80 / 60), "minutes"
    assert "about 50.0 s saved" in figure.layout.title.text


@pytest.mark.parametrize(
    ("records", "quantity", "message"),
    [
        ([], "memory", "No trial has finished yet"),
        ([TrialRecord(number=0, verdict=None)], "memory", "No trial was judged"),
        (STUDY, "energy", "Energy was not predicted, only peak memory, trial time, step time"),
        (STUDY, "cost", "price_per_hour="),
    ],
)
def test_an_empty_picture_says_why(records: list[TrialRecord], quantity: str, message: str) -> None:
    """STRANGERS.md A7: the picture of the cost asked for steps where the price was missing."""
    figure = plot_budget(records, quantity=quantity)  # type: ignore[arg-type]
    assert message in " ".join(figure.layout.annotations[0].text.split("<br>"))


def test_an_unknown_quantity_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"quantity must be one of memory, .* but got 'speed'"):
        plot_budget(STUDY, quantity="speed")  # type: ignore[arg-type]


def test_names_are_text_in_the_pictures() -> None:
    hostile = record("launched", params={"<img src=x>": "<script>"}, status="ok", measured={"memory": 5 * GIB})
    assert "<img" not in plot_budget([hostile]).to_json()

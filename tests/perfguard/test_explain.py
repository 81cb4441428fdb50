"""The account of a trial, as a person reads it: each line beside the measurement, and a trial is found or named."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from perfguard.budget import Limit
from perfguard.exceptions import ConfigurationError
from perfguard.explain import as_json, explained, find_trial, furthest, lines_of, tables_of
from perfguard.plots import plot_account
from perfguard.predictor import Estimate
from perfguard.quantities import Quantity
from perfguard.record import TrialRecord, columns_of, verdict_from
from perfguard.verdict import Verdict

GIB = 2**30
MEMORY = (
    Estimate.of_physics(2 * GIB, 0.2, "tensors that live at once")
    .then("trees", "workspaces of cuDNN", median=3 * GIB, log_sigma=0.3)
    .then("width", "runs scatter less", log_sigma=0.1)
)
STEP_TIME = Estimate.of_physics(0.1, 1.4, "peak rates").then("network", "as measured steps", median=0.4, log_sigma=0.2)
PREDICTED: dict[Quantity, Estimate] = {"memory": MEMORY, "step_time": STEP_TIME, "epoch_time": STEP_TIME.scaled(50)}
LIMITS = (Limit("memory", 8 * GIB, MEMORY),)
VERDICT = Verdict(action="launch", predicted=PREDICTED, limits=LIMITS)


def record(number: int | None = 0, study: str = "s", **fields: object) -> TrialRecord:
    """A trial that took 4 GiB, and twice the predicted time of a step."""
    read = verdict_from(columns_of(VERDICT))
    measured = {"memory": 4.0 * GIB, "step_time": 0.8}
    return TrialRecord(number=number, verdict=read, study=study, status="ok", measured=measured, **fields)  # type: ignore[arg-type]


def text_of(**beside: dict[Quantity, float]) -> str:
    console = Console(file=io.StringIO(), width=120)
    for table in tables_of(PREDICTED, **beside):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_lines_go_from_physics_to_the_median_that_decided() -> None:
    lines = lines_of(MEMORY)
    assert [line.name for line in lines] == ["physics", "trees", "width"]
    assert lines[0].median == pytest.approx(2 * GIB)
    assert lines[1].factor == pytest.approx(1.5)
    assert lines[-1].median == pytest.approx(MEMORY.median)
    assert (lines[-1].low, lines[-1].high) == pytest.approx(MEMORY.interval())
    assert lines_of(Estimate(1.0, 0.1)) == []


def test_what_is_a_multiple_of_another_quantity_is_explained_once() -> None:
    assert list(explained(PREDICTED)) == ["memory", "step_time"]
    assert list(explained({"cost": STEP_TIME})) == ["cost"], "alone, it has its own"
    document = as_json(PREDICTED)
    assert math.prod(line["factor"] for line in document["step_time"]) == pytest.approx(4.0)


def test_tables_show_each_stage_beside_measurement_and_limit() -> None:
    text = text_of(measured={"memory": 4.5 * GIB}, limits={"memory": 8.0 * GIB})
    for expected in ("account of the peak memory", "workspaces of cuDNN", "×1.5", "measured", "4.50 GiB", "limit", "×2.67 the"):
        assert expected in text
    assert "account of the step time" in text
    assert " to 2.78 GiB" not in text, "how wrong physics alone would be is a guess"
    assert "×1 " not in text, "a stage that changes only the interval has no factor"


def test_the_account_comes_back_with_the_trial() -> None:
    read = record()
    for quantity, estimate in PREDICTED.items():
        found = read.predicted[quantity].stages
        assert [stage.name for stage in found] == [stage.name for stage in estimate.stages]
        assert sum(stage.shift for stage in found) == pytest.approx(sum(stage.shift for stage in estimate.stages), abs=1e-4)


def test_predictor_without_an_account_has_the_stages_of_the_guard_alone() -> None:
    bare = Estimate(3.0 * GIB, 0.2).then("width", "runs scatter less", log_sigma=0.1)
    console = Console(file=io.StringIO(), width=120)
    console.print(*tables_of({"memory": bare}))
    assert "2.54 GiB to 3.54 GiB" in console.file.getvalue()  # type: ignore[attr-defined]


def test_trial_is_found_by_its_number_or_its_name() -> None:
    records = [record(0), record(1, trial_id="a1b2_00001"), record(1, trial_id="a1b2_00001"), record(0, "other")]
    assert find_trial(records[:3], "a1b2_00001", title="The log") is records[2], "the newest of its tries"
    with pytest.raises(ConfigurationError, match=r"The log has no trial '7'\. Its 2 trials .* are from 0 to 1"):
        find_trial(records, "7", title="The log")
    with pytest.raises(ConfigurationError, match=r"2 studies have a trial '0'\. Add --study, which is one of 's', 'other'"):
        find_trial(records, "0", title="The log")
    with pytest.raises(ConfigurationError, match="It has 'a_1'"):
        find_trial([record(None, trial_id="a_1")], "0", title="The log")


def test_quantity_that_is_furthest_from_its_measurement_is_drawn() -> None:
    assert furthest(record(), PREDICTED) == "step_time"
    assert furthest(TrialRecord(number=0, verdict=VERDICT), PREDICTED) == "memory", "nothing was measured"


def test_waterfall_reaches_from_physics_to_the_prediction() -> None:
    pytest.importorskip("plotly")
    figure = plot_account(MEMORY, quantity="memory", of="trial 3", measured=4.0 * GIB, limit=8.0 * GIB)
    bars, medians = figure.data[:2]
    assert list(bars.base) == pytest.approx([2.0, 2.0, 3.0])
    assert list(bars.x) == pytest.approx([0.0, 1.0, 0.0])
    assert list(medians.x) == pytest.approx([2.0, 3.0, 3.0])
    assert list(figure.layout.yaxis.ticktext) == ["physics", "trees", "width"]
    assert {"measured 4.00 GiB", "budget 8.00 GiB"} <= {trace.name for trace in figure.data}
    assert "trial 3, predicted 3.00 GiB, measured 4.00 GiB" in figure.layout.title.text
    assert "has no account" in plot_account(Estimate(1.0, 0.1), quantity="memory").layout.annotations[0].text

"""The report of a measurement log: its numbers are the log's, it is accessible, and nothing that users name runs in it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perfguard import Estimate, MeasurementStore
from perfguard.cli import main
from perfguard.exceptions import ConfigurationError, LogError
from perfguard.report import Report, page_of, read_report, report_of_log, write_report
from perfguard.report._advice import advice_of, honest_notes
from perfguard.report._border import axes_of, fit_border
from tests.perfguard.report.made_up import BUDGETS, CARD, GIB, HOSTILE, write_study
from tests.perfguard.report.pages import Page
from tests.perfguard.log_rows import MEASUREMENT, PREDICTION, make_graph, record

pytest.importorskip("plotly")


@pytest.fixture
def store() -> Iterator[MeasurementStore]:
    with MeasurementStore(":memory:") as store:
        yield store


@pytest.fixture(scope="module")
def studied() -> Iterator[MeasurementStore]:
    with MeasurementStore(":memory:") as store:
        write_study(store, 60)
        yield store


@pytest.fixture(scope="module")
def report(studied: MeasurementStore) -> Report:
    return report_of_log(studied)


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    return Page(page_of(report))


def test_numbers_of_the_table_are_those_of_the_log(studied: MeasurementStore, page: Page) -> None:
    rows = studied.decisions()
    assert {row.action for row in rows} == {"launch", "prune"}
    assert page.values("trials", "Trial") == [row.trial for row in rows]
    assert page.values("trials", "Peak memory, predicted") == [row.predicted_peak_memory_bytes for row in rows]
    assert page.values("trials", "Peak memory, measured") == [row.measured_peak_memory_bytes for row in rows]
    assert page.values("trials", "Trial time, predicted") == [row.predicted_total_time_s for row in rows]
    assert page.values("trials", "Trial time, measured") == [row.measured_total_time_s for row in rows]
    assert page.values("trials", "Step time, measured") == [row.measured_step_time_s for row in rows]
    assert [text for text, _ in page.column("trials", "Reason")] == [row.reason for row in rows]


def test_numbers_of_the_charts_are_those_of_the_log(studied: MeasurementStore, page: Page) -> None:
    document = json.loads(next(text for attributes, text in page.scripts if attributes.get("id") == "data"))
    rows, memory = studied.decisions(), document["quantities"]["memory"]
    assert memory["predicted"] == pytest.approx([row.predicted_peak_memory_bytes for row in rows], rel=1e-5)
    assert memory["high"] == pytest.approx([row.predicted_peak_memory_high_bytes for row in rows], rel=1e-5)
    assert set(memory["limit"]) == {32 * GIB}
    time = document["quantities"]["time"]
    measured = [row.measured_total_time_s for row in rows]
    assert [value is None for value in time["measured"]] == [value is None for value in measured]
    assert time["low"] == pytest.approx([row.predicted_total_time_low_s for row in rows], rel=1e-5)
    assert len(document["names"]) == len(document["outcomes"]) == len(rows)


def test_outcomes_add_up_to_the_summary(report: Report) -> None:
    summary = report.summary
    assert report.count("pruned") == summary.num_pruned > 0
    assert summary.num_violations == report.count("over") > 0
    assert len(report.trials) == summary.num_pruned + summary.num_launched
    assert {quantity for quantity in summary.pruned_for if quantity} == {"memory", "time"}
    over = [trial for trial in report.trials if trial.outcome == "over"]
    assert all(any(trial.record.measured[quantity] > limit for quantity, limit in BUDGETS.items()) for trial in over)


def test_page_prints_the_summary_of_the_guard(report: Report, page: Page) -> None:
    assert [(label, value) for (label, _), (value, _) in page.tables["summary"]] == list(report.summary.rows())
    for note in honest_notes(report):
        assert note in page.text


def test_crash_at_the_start_saves_no_time(store: MeasurementStore) -> None:
    too_large = replace(PREDICTION, peak_memory=Estimate(2.0 * CARD.memory_bytes, 0.1))
    record(store, action="prune", device=CARD, prediction=too_large, reason="needs 80.0 GiB (1 to 2), the budget is 32.0 GiB")
    report = report_of_log(store)
    assert report.summary.num_crashes_avoided == 1
    assert report.summary.saved_s is None
    (note,) = [note for note in honest_notes(report) if "first steps" in note]
    assert "no training time" in note


def test_headings_tables_and_charts_have_names(page: Page) -> None:
    names = [tag for tag, _ in page.tags]
    assert names.count("h1") == names.count("main") == names.count("nav") == 1
    levels = [int(tag[1]) for tag in names if tag in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in pairwise(levels)), "no level is left out"
    assert set(page.captions) == set(page.tables), "each table has a caption"
    for tag, attributes in page.tags:
        if tag == "th":
            assert attributes["scope"] in ("col", "row")
        if "data-chart" in attributes:
            assert attributes["role"] == "img"
            assert str(attributes["aria-label"]).endswith(".")
    labelled = {attributes["for"] for tag, attributes in page.tags if tag == "label"}
    assert {attributes["id"] for tag, attributes in page.tags if tag in ("select", "input")} == labelled
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {str(attributes["href"])[1:] for tag, attributes in page.tags if tag == "a"} <= set(ids)


def test_hostile_names_are_text(store: MeasurementStore) -> None:
    write_study(store, 12, study=HOSTILE, hostile=True)
    plain = page_of(report_of_log(store))
    page = Page(plain)
    assert [(attributes.get("id"), attributes.get("type")) for attributes, _ in page.scripts] == [
        ("data", "application/json"),
        ("plotly", "text/plain"),
        (None, None),
    ]
    assert "img" not in {tag for tag, _ in page.tags}
    assert not {name for _, attributes in page.tags for name in attributes if name.startswith("on")}
    assert HOSTILE in page.text
    assert HOSTILE in page.tables["trials"][1][-1][0]
    document = json.loads(page.scripts[0][1])
    assert HOSTILE in {param["name"] for param in document["params"]}
    # Should an escape be missing some day, the policy allows our own scripts alone.
    policy = next(str(attributes["content"]) for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(page.scripts[2][1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"'sha256-{digest}'" in policy
    assert "script-src 'unsafe" not in policy


@pytest.mark.parametrize("value", ["\ud800", "\0", "x" * 10_000, math.nan, math.inf, 10**400, None, [1, "<b>"]])
def test_odd_values_of_hyperparameters_are_shown(store: MeasurementStore, tmp_path: Path, value: Any) -> None:
    for number, lr in enumerate((0.1, value, 0.3)):
        record(
            store, number, params={"lr": lr}, device=CARD, prediction=PREDICTION, reason="needs 1000 B, the budget is 32.0 GiB"
        )
    path = write_report(store, tmp_path / "deep" / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.tables["trials"]) == 4


def test_border_of_a_product_is_where_it_equals_the_budget(store: MeasurementStore) -> None:
    for number in range(40):
        batch_size, width = 2 ** (number % 8), 8 * 2 ** (number // 8)
        memory = Estimate(GIB * batch_size * width / 32, 0.1)
        params = {"batch_size": batch_size, "width": width, "name": f"n{number}", "same": 3}
        record(
            store,
            number,
            params=params,
            device=CARD,
            prediction=replace(PREDICTION, peak_memory=memory),
            reason="needs 1.00 GiB (1 to 2), the budget is 8.00 GiB",
        )
    report = report_of_log(store)
    axes = axes_of(report)
    assert [(axis.name, axis.is_log) for axis in axes] == [("batch_size", True), ("width", True)]
    border = fit_border(report, axes, "memory")
    assert border is not None
    assert border.factor("batch_size") == pytest.approx(128, rel=0.01)
    assert border.ranked()[0][0] == "batch_size"
    assert border.r_squared > 0.999
    crossing = border.crossing(axes[0])
    assert crossing == pytest.approx(8 * 32 / 32, rel=0.01), "with width at its median, 32"
    assert report.trials[0].record.limits == {"memory": 8 * GIB}


def test_doubts_and_changed_conditions_come_from_the_log(store: MeasurementStore) -> None:
    graph, device = make_graph(), replace(CARD, id="toy")
    for number in range(6):
        decision_id = record(store, number, graph=graph, device=device, prediction=PREDICTION)
        driver = "550.54" if number < 3 else "580.1"
        peak = 10 * CARD.memory_bytes if number == 1 else 2**29
        store.record_measurement(decision_id, replace(MEASUREMENT, peak_memory_bytes=peak, driver=driver))
    report = report_of_log(store)
    assert "but the device has 40.0 GiB" in report.trials[1].doubt
    assert (3, "driver: 550.54 is now 580.1") in report.history.drifts
    page = Page(page_of(report))
    assert "From trial 3 on: driver: 550.54 is now 580.1." in page.text
    assert any("not believed" in advice for advice in advice_of(report, (), {}))
    assert "1" in {text for text, _ in page.column("doubts", "Trial")}


def test_advice_names_the_parameter_that_was_turned_down(report: Report) -> None:
    axes = axes_of(report)
    border = fit_border(report, axes, "time")
    assert border is not None
    advice = advice_of(report, axes, {"time": border})
    (refused,) = [text for text in advice if "rejected for their trial time" in text]
    assert "width changes it most" in refused


def test_advice_says_what_runs_unguarded(store: MeasurementStore) -> None:
    record(store, reason="not judged: BuildError: no width")
    report = report_of_log(store)
    assert report.count("unguarded") == 1
    (first, *_) = advice_of(report, (), {})
    assert "1 trial ran without a verdict" in first
    assert "BuildError: no width." in first


def test_log_of_several_studies_is_reported_whole_or_by_study(store: MeasurementStore) -> None:
    write_study(store, 3, study="one")
    write_study(store, 2, study="two")
    assert report_of_log(store).title == "2 studies"
    whole = Page(page_of(report_of_log(store)))
    assert [text for text, _ in whole.column("trials", "Study")] == ["one"] * 3 + ["two"] * 2
    assert len(report_of_log(store, "two").trials) == 2
    with pytest.raises(LogError, match=r"no decision of study 'three'\. It has 'one', 'two'"):
        report_of_log(store, "three")


def test_command_writes_the_report_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MeasurementStore(tmp_path / "log.db") as store:
        write_study(store, 3)
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "log.db"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "made up" in Page(out.read_text(encoding="utf-8")).text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.db"], "There is no file 'nowhere.db'"),
        (["sqlite:///nowhere.db"], "There is no database at 'sqlite:///nowhere.db'"),
        (["no url://"], "That is no URL of a database"),
        ([__file__], "neither a measurement log nor a study"),
        ([], "There is no measurement log at"),
    ],
)
def test_command_says_what_it_cannot_read(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 1
    assert message in capsys.readouterr().err


def test_other_objects_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="neither a measurement log nor a study"):
        read_report(3)

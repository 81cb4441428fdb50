"""The summary counts each trial once, and says of what each figure is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perfguard.record import TrialRecord
from perfguard.summary import Errors, summarize
from tests.perfguard.test_record import GIB, record, verdict

STUDY = [
    record("launched", status="ok", measured={"memory": 5 * GIB, "time": 50.0}),
    record("launched", status="ok", measured={"memory": 4 * GIB, "time": 80.0}),
    record("launched", status="failed"),
    record("launched", status="ok", not_measured="it ran on AMD EPYC", duration_s=7.0),
    record("repaired", status="ok", measured={"memory": 5 * GIB, "time": 40.0}),
    record("pruned for memory"),
    record("pruned for time"),
    record("pruned by the bound"),
    record("unguarded", status="ok", measured={"time": 10.0}),
    TrialRecord(number=9, verdict=None),
]


def test_every_trial_is_counted_once() -> None:
    summary = summarize(STUDY, title="study", num_repeated=3)
    assert (summary.num_launched, summary.num_repaired, summary.num_pruned) == (7, 1, 3)
    assert summary.pruned_for == {"memory": 2, "time": 1}
    assert (summary.num_unguarded, summary.why_unguarded) == (2, "ValueError: no batches")
    assert (summary.num_measured, summary.num_violations, summary.num_failed) == (3, 1, 1)
    assert summary.not_measured == {"it ran on AMD EPYC": 1}
    assert (summary.num_crashes_avoided, summary.saved_s, summary.launched_s) == (2, 50.0, 187.0)


def test_memory_and_time_have_an_error_each() -> None:
    """STRANGERS.md A3: the summary's "prediction error" mixed memory with time."""
    rows = dict(summarize(STUDY).rows())
    assert rows["prediction error, peak memory"] == "8.3%"
    assert rows["prediction error, trial time"] == "20.8%"
    assert rows["pruned before launch"] == "3 (peak memory 2, trial time 1)"
    assert rows["budget violations"] == "1 of 3 measured trials"


def test_errors_show_learning() -> None:
    runs = [record("launched", status="ok", measured={"memory": 10 * GIB}) for _ in range(5)]
    runs += [record("launched", status="ok", measured={"memory": 5 * GIB}) for _ in range(10)]
    assert str(Errors.of(runs, "memory")) == "50.0% in the first 5 trials, 0.0% in the last 10"
    assert Errors.of([], "memory") is None


def test_nothing_is_an_empty_summary() -> None:
    summary = summarize([])
    assert (summary.num_launched, summary.num_violations, summary.launched_s, summary.saved_s) == (0, None, None, None)
    assert "trials launched" in str(summary)


def test_overruled_launch_counts_as_against_its_verdict() -> None:
    overruled = TrialRecord(number=0, verdict=replace(verdict(20.0), action="launch"), status="ok")
    assert summarize([overruled]).num_unguarded == 1


def timed(name: str, guard_s: float, **fields: Any) -> TrialRecord:
    made = record(name, **fields)
    assert made.verdict is not None
    return replace(made, verdict=replace(made.verdict, guard_s=guard_s))


def test_guard_time_stands_beside_what_it_saved() -> None:
    """A third of the demo's time went to dry runs and imports, and no line said so."""
    study = [
        timed("launched", 4.0, status="ok", measured={"time": 20.0}, first_step_s=3.0),
        timed("launched", 1.0, status="failed", duration_s=6.0),  # by the tuner's clock, the guard's second in it
        timed("pruned for memory", 0.5),
        timed("pruned for time", 0.5),
    ]
    summary = summarize(study)
    assert summary.launched_s == 25.0
    assert summary.crash_s == 3.0
    rows = dict(summary.rows())
    assert rows["time of the guard"] == "6.00 s, 19% of the study; the pruned trials would have taken about 53.0 s (an estimate)"
    assert rows["would have run out of memory at once"] == "1, each after about 3.00 s"
    assert dict(summarize(study, more_guard_s=4.0).rows())["time of the guard"].startswith("10.0 s, 29% of the study")


def test_trials_that_ran_out_of_memory_show_how_long_that_takes() -> None:
    study = [
        timed("launched", 1.0, status="oom", measured={"time": 7.0}, first_step_s=3.0),
        timed("pruned for memory", 1.0),
    ]
    assert summarize(study).crash_s == 7.0
    unknown = summarize(study[1:])
    assert unknown.crash_s is None
    assert unknown.cost is not None
    assert unknown.cost.saved_s is None, "nothing has shown how long it takes to crash"
    assert summarize([record("launched")]).cost is None, "a log of before has no time of the guard"


def test_notebook_shows_the_table_and_names_as_text() -> None:
    """The last line of a cell showed the dataclass."""
    page = summarize([record("unguarded", status="ok")], title="<script>")._repr_html_()
    assert "<caption>&lt;script&gt;</caption>" in page
    assert ">trials launched</th>" in page

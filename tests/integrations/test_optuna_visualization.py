"""The pictures, in both libraries, of studies made by hand."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from perfguard.budget import Quantity
from perfguard.exceptions import ConfigurationError
from perfguard_optuna import visualization
from perfguard_optuna.visualization._views import budget_view, log_ticks, savings_view, tick_text

pytest.importorskip("plotly")
pyplot = pytest.importorskip("matplotlib.pyplot")

MIB = 2**20
Amounts = Mapping[Quantity, float]


@pytest.fixture(autouse=True)
def _no_figures_are_left_open() -> Iterator[None]:
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def attributes(
    verdict: str,
    predicted: Amounts,
    measured: Amounts | None = None,
    *,
    limits: Amounts | None = None,
    status: str = "ok",
    reason: str = "because",
) -> dict[str, Any]:
    """What the guard writes: predictions with an interval from half to twice; a budget of 100 MiB and 10 s."""
    result: dict[str, Any] = {"perfguard:schema": 1, "perfguard:verdict": verdict, "perfguard:reason": reason}
    for quantity, value in predicted.items():
        result |= {
            f"perfguard:{quantity}:predicted": value,
            f"perfguard:{quantity}:low": value / 2,
            f"perfguard:{quantity}:high": value * 2,
        }
    default: Amounts = {"memory": 100 * MIB, "time": 10}
    result |= {f"perfguard:{quantity}:limit": limit for quantity, limit in (default if limits is None else limits).items()}
    if measured is not None:
        result["perfguard:status"] = status
        result |= {f"perfguard:{quantity}:measured": value for quantity, value in measured.items()}
    return result


def trial_of(user_attrs: Mapping[str, Any], *, state: TrialState = TrialState.COMPLETE, num_values: int = 1) -> FrozenTrial:
    return create_trial(
        state=state,
        values=[0.5] * num_values if state == TrialState.COMPLETE else None,
        params={"lr": 0.0123456, "name": "<b>"},
        distributions={"lr": FloatDistribution(0, 1), "name": CategoricalDistribution(["<b>", "c"])},
        user_attrs=dict(user_attrs),
    )


def study_of(*trials: FrozenTrial) -> optuna.Study:
    study = optuna.create_study()
    study.add_trials(trials)
    return study


def amounts(memory_mib: float, time_s: float) -> Amounts:
    return {"memory": memory_mib * MIB, "time": time_s}


PRUNED = TrialState.PRUNED


@pytest.fixture
def study() -> optuna.Study:
    """One trial of each fate."""
    return study_of(
        trial_of(attributes("launch", amounts(60, 4), amounts(50, 5))),
        trial_of(attributes("repair", amounts(80, 8), amounts(85, 9))),
        trial_of(attributes("launch", amounts(90, 2), amounts(300, 3))),  # over the memory budget, and its interval
        trial_of(attributes("launch", amounts(50, 3), amounts(40, 1), status="oom"), state=PRUNED),
        trial_of(attributes("launch", amounts(50, 3))),
        trial_of(attributes("prune", amounts(400, 30), reason="needs 400 MiB"), state=PRUNED),
        trial_of(attributes("prune", amounts(50, 12.5), reason="takes 12.5 s"), state=PRUNED),
        trial_of({}),
    )


def test_each_trial_stands_where_its_fate_puts_it(study: optuna.Study) -> None:
    view = budget_view(study, "memory")
    assert [(point.number, point.group, round(point.predicted), point.measured) for point in view.points] == [
        (0, "launched", 60, 50),
        (1, "repaired", 80, 85),
        (2, "over", 90, 300),
        (3, "over", 50, 40),
        (4, "unmeasured", 50, None),
        (5, "pruned", 400, None),
        (6, "pruned_elsewhere", 50, None),
    ]
    assert (view.unit, view.limits, view.noun) == ("MiB", [100], "peak memory")
    assert view.headline == "2 of 3 completed trials lie in their 90% interval"
    by_time = {point.number: point.group for point in budget_view(study, "time").points}
    assert by_time == {
        0: "launched", 1: "repaired", 2: "launched", 3: "unmeasured", 4: "unmeasured", 5: "pruned", 6: "pruned"
    }  # fmt: skip


def test_axes_hold_points_and_margin_unmeasured_ones(study: optuna.Study) -> None:
    view = budget_view(study, "memory")
    low, high = view.bounds
    for point in view.points:
        assert low < point.predicted < high
        assert (view.left < view.x_of(point) < low) == (point.measured is None)
        assert view.left < view.x_of(point) < high


def test_hovering_over_a_point_tells_its_story(study: optuna.Study) -> None:
    assert budget_view(study, "memory").points[3].hover == (
        "trial 3",
        "predicted 50.0 MiB (90%: 25.0 MiB to 100 MiB)",
        "measured 40.0 MiB",
        "lr: 0.01235",
        "name: <b>",
        "status: oom",
        "because",
    )
    (trace,) = [trace for trace in visualization.plot_budget(study).data if trace.name == "pruned: peak memory (1)"]
    (text,) = trace.hovertext
    assert text.startswith("trial 5<br>predicted 400 MiB")
    assert "name: &lt;b&gt;" in text
    assert text.endswith("needs 400 MiB")


def legend_of(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_both_libraries_show_the_same_groups(study: optuna.Study) -> None:
    labels = [
        "launched (1)",
        "repaired, then launched (1)",
        "launched, broke the budget (2)",
        "launched, not measured in full (1)",
        "pruned: peak memory (1)",
        "pruned for another limit (1)",
        "budget, 100 MiB",
    ]
    figure, ax = visualization.plot_budget(study), visualization.matplotlib.plot_budget(study)
    assert [trace.name for trace in figure.data] == labels
    assert legend_of(ax) == labels
    assert figure.layout.xaxis.title.text == ax.get_xlabel() == "measured peak memory (MiB)"
    assert figure.layout.yaxis.title.text == ax.get_ylabel() == "predicted peak memory (MiB)"


def test_the_budget_is_drawn_where_it_is(study: optuna.Study) -> None:
    lines = [(shape.x0, shape.y0, shape.x1, shape.y1) for shape in visualization.plot_budget(study).layout.shapes]
    assert (0, 100, 1, 100) in lines
    assert (100, 0, 100, 1) in lines
    ax = visualization.matplotlib.plot_budget(study)
    assert [np.asarray(line.get_ydata()).tolist() for line in ax.lines if line.get_label() == "budget, 100 MiB"] == [[100, 100]]


def test_changing_budgets_are_drawn_as_one_band() -> None:
    trials = [trial_of(attributes("launch", amounts(9, 9), amounts(9, 9), limits={"time": limit})) for limit in (60, 50, 40, 20)]
    assert budget_view(study_of(*trials), "time").budget_label == "budget, 20 to 60 s"
    figure = visualization.plot_budget(study_of(*trials), quantity="time")
    assert (20, 60) in {(shape.y0, shape.y1) for shape in figure.layout.shapes}
    assert "budget, 20 to 60 s" in legend_of(visualization.matplotlib.plot_budget(study_of(*trials), quantity="time"))


@pytest.mark.parametrize(
    ("quantity", "values", "unit"),
    [
        ("memory", [5000.0, 6000.0], "KiB"),
        ("memory", [40 * 2**30, 70 * 2**30, 2**20], "GiB"),
        ("step_time", [0.05, 0.2], "ms"),
        ("epoch_time", [90.0, 500.0], "min"),
        ("latency", [3e-6], "us"),
        ("energy", [0.5], "mJ"),
    ],
)
def test_axes_are_in_a_unit_that_people_would_choose(quantity: Quantity, values: list[float], unit: str) -> None:
    trials = [trial_of(attributes("launch", {quantity: value}, limits={quantity: value})) for value in values]
    assert budget_view(study_of(*trials), quantity).unit == unit


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (45, 210, ["50", "70", "100", "150", "200"]),
        (0.9, 1100, ["1", "3", "10", "30", "100", "300", "1,000"]),
        (1e-3, 1e4, ["0.001", "0.01", "0.1", "1", "10", "100", "1,000", "10,000"]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, texts: list[str]) -> None:
    assert list(map(tick_text, log_ticks(low, high))) == texts


def test_one_point_is_enough_for_a_picture() -> None:
    study = study_of(trial_of(attributes("launch", amounts(60, 4), amounts(60, 4), limits={})))
    view = budget_view(study, "memory")
    assert view.limits == []
    assert len(log_ticks(*view.bounds)) >= 2
    all_text_of(visualization.matplotlib.plot_budget(study))
    assert [trace.name for trace in visualization.plot_budget(study).data] == ["launched (1)"]


def test_what_is_not_a_number_is_left_out() -> None:
    nan, inf = math.nan, math.inf
    study = study_of(
        trial_of(attributes("launch", amounts(nan, 1), amounts(1, 1))),
        trial_of(attributes("launch", amounts(inf, nan), amounts(inf, nan))),
        trial_of(attributes("launch", amounts(0, 1), amounts(1, -1))),
        trial_of(attributes("prune", amounts(500, nan)), state=PRUNED),
        trial_of(attributes("launch", amounts(60, 4), amounts(nan, 4))),
    )
    assert [(point.number, point.measured) for point in budget_view(study, "memory").points] == [(3, None), (4, None)]
    for drawn in (visualization.matplotlib.plot_budget(study), visualization.matplotlib.plot_savings(study)):
        all_text_of(drawn)
    assert all(math.isfinite(value) for band in savings_view(study).bands for value in band.heights)


def test_stopped_trial_time_is_not_drawn_as_measured() -> None:
    """The time of a trial that was stopped on its way is no measurement of the whole."""
    study = study_of(trial_of(attributes("launch", amounts(60, 9), amounts(60, 2)), state=PRUNED))
    assert [point.measured for point in budget_view(study, "time").points] == [None]
    assert [point.measured for point in budget_view(study, "memory").points] == [60]


def test_the_account_by_hand(study: optuna.Study) -> None:
    """Measured 5 + 9 within budget and 3 + 1 over it; predicted 30 for memory and 12.5 for time."""
    view = savings_view(study)
    assert view.axis == "cumulative compute time (s)"
    assert [band.label for band in view.bands] == [
        "launched, within budget (4 trials, 14.0 s)",
        "launched, broke a budget (2 trials, 4.00 s)",
        "pruned: peak memory (1 trial, 30.0 s predicted)",
        "pruned: trial time (1 trial, 12.5 s predicted)",
    ]
    assert view.bands[0].heights == pytest.approx([5, 14, 14, 14, 14, 14, 14, 14], abs=1e-3)
    assert view.bands[1].heights == pytest.approx([0, 0, 3, 4, 4, 4, 4, 4])
    assert view.bands[2].heights == pytest.approx([0, 0, 0, 0, 0, 30, 30, 30])
    assert view.bands[3].heights == pytest.approx([0, 0, 0, 0, 0, 0, 12.5, 12.5])
    assert [(skip.x, skip.hover[1]) for skip in view.skips] == [(5, "would have taken 30.0 s"), (6, "would have taken 12.5 s")]
    assert [skip.y for skip in view.skips] == pytest.approx([48, 60.5], abs=1e-3)
    assert [total.y for total in view.totals] == pytest.approx([18, 60.5], abs=1e-3)
    assert view.totals[1].interval == pytest.approx((18 + 21.25, 18 + 85), abs=1e-3)
    assert [total.label for total in view.totals] == ["18.0 s\nspent", "60.5 s\nwith the pruned"]
    assert view.headline == "2 of 8 trials pruned before launch, about 42.5 s saved (21.2 s to 85.0 s)"
    assert view.caption == [
        "Saved time is predicted: the time of the pruned trials, if each had run to its end.",
        "A trial that runs out of memory might have crashed sooner.",
    ]


def test_both_libraries_show_the_same_layers(study: optuna.Study) -> None:
    labels = [band.label for band in savings_view(study).bands]
    figure, ax = visualization.plot_savings(study), visualization.matplotlib.plot_savings(study)
    assert [trace.name for trace in figure.data if trace.stackgroup] == labels
    assert legend_of(ax) == labels[::-1]
    assert figure.layout.yaxis.title.text == ax.get_ylabel() == "cumulative compute time (s)"
    assert "Saved time is predicted" in figure.layout.xaxis.title.text
    assert any("Saved time is predicted" in text.get_text() for text in ax.texts)


def test_trials_are_counted_without_predicted_times() -> None:
    memory: list[Amounts] = [{"memory": value * MIB} for value in (50, 500)]
    study = study_of(
        trial_of(attributes("launch", memory[0], memory[0])),
        trial_of(attributes("prune", memory[1]), state=PRUNED),
        trial_of(attributes("prune", memory[1]), state=PRUNED),
    )
    view = savings_view(study)
    assert view.axis == "trials"
    assert [(band.label, list(band.heights)) for band in view.bands] == [
        ("launched, within budget (1 trial)", [1, 1, 1]),
        ("pruned: peak memory (2 trials)", [0, 1, 2]),
    ]
    assert [total.label for total in view.totals] == ["1\nlaunched", "3\nwith the pruned"]
    assert "Workload(steps=...)" in view.caption[0]


def test_a_study_that_pruned_nothing_saved_nothing() -> None:
    view = savings_view(study_of(trial_of(attributes("launch", amounts(50, 5), amounts(50, 5)))))
    assert view.headline == "0 of 1 trials pruned before launch"
    assert (len(view.bands), view.skips, view.caption, len(view.totals)) == (1, [], (), 1)


PLOTS: dict[str, Callable[[optuna.Study], Any]] = {
    "plotly budget": visualization.plot_budget,
    "plotly savings": visualization.plot_savings,
    "matplotlib budget": visualization.matplotlib.plot_budget,
    "matplotlib savings": visualization.matplotlib.plot_savings,
}


def all_text_of(drawn: Any) -> str:
    """What a Figure of Plotly or Axes of Matplotlib say, after being rendered."""
    if hasattr(drawn, "to_json"):
        return str(drawn.to_json())
    drawn.figure.savefig(io.BytesIO())
    return "\n".join([text.get_text() for text in drawn.texts])


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([], "no trial has finished yet"),
        ([{}], "no trial was judged by PerfGuard"),
        ([{"perfguard:status": "ok", "perfguard:time:measured": 7.0}], "no trial was judged by PerfGuard"),
    ],
)
def test_a_picture_of_nothing_says_why(plot: Callable[[optuna.Study], Any], trials: list[dict[str, Any]], words: str) -> None:
    assert words in all_text_of(plot(study_of(*map(trial_of, trials))))


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
def test_plots_cope_with_objectives_and_running_trials(plot: Callable[[optuna.Study], Any]) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    study.add_trial(trial_of(attributes("launch", amounts(60, 4), amounts(50, 5)), num_values=2))
    study.add_trial(trial_of(attributes("prune", amounts(600, 4)), state=PRUNED))
    study.ask()
    assert "pruned" in all_text_of(plot(study)) + str(getattr(plot(study), "get_legend_handles_labels", list)())


def test_a_quantity_that_was_not_predicted_is_named(study: optuna.Study) -> None:
    ax = visualization.matplotlib.plot_budget(study, quantity="energy")
    assert all_text_of(ax).endswith("energy was not predicted, only peak memory, trial time")
    without_steps = study_of(trial_of(attributes("launch", {"memory": 1.0})))
    assert "Workload(steps=...)" in all_text_of(visualization.plot_budget(without_steps, quantity="time"))


@pytest.mark.parametrize("plot", [visualization.plot_budget, visualization.matplotlib.plot_budget])
def test_an_unknown_quantity_is_refused(plot: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"quantity must be one of memory, time, .*, but got 'flops'"):
        plot(optuna.create_study(), quantity="flops")


def test_pictures_can_be_drawn_side_by_side(study: optuna.Study) -> None:
    _, (left, right) = pyplot.subplots(1, 2)
    assert visualization.matplotlib.plot_budget(study, ax=left) is left
    assert visualization.matplotlib.plot_savings(study, ax=right) is right
    assert len(pyplot.get_fignums()) == 1


@pytest.mark.parametrize(
    ("missing", "call"),
    [("plotly", "visualization.plot_savings(study)"), ("matplotlib", "visualization.matplotlib.plot_budget(study)")],
)
def test_missing_plot_library_names_the_pip_line(missing: str, call: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import optuna; from perfguard_optuna import visualization\n"
        f"study = optuna.create_study(); {call}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"ImportError: These pictures need {missing.title()}: pip install 'perfguard[plot]'." in done.stderr

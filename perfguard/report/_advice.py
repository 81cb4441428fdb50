"""What to do next: short rules on a report."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfguard.budget import NOUNS, Quantity, quantity_of
from perfguard.quantities import format_quantity
from perfguard.report._border import Axis, Border, number_in_words
from perfguard.report._data import Report, ReportTrial


@dataclass(frozen=True, slots=True)
class AdviceConfig:
    """When a rule applies."""

    many_refused: float = 0.2
    """Share of the proposals that one limit rejected."""
    wide_interval: float = 2.5
    """Median ratio of the ends of the 90% intervals."""
    enough_runs: int = 10
    """Measured trials from which on intervals should be narrow and hold."""
    least_coverage: float = 0.75
    """Share of the measured values that should lie in their 90% interval."""
    most_violations: float = 0.1
    """Share of the measured trials that broke a budget."""
    telling_factor: float = 1.5
    """A parameter that changes a quantity by less is not named."""


def advice_of(
    report: Report, axes: Sequence[Axis], borders: Mapping[Quantity, Border], config: AdviceConfig = AdviceConfig()
) -> list[str]:
    """Return what to do next, the most urgent first. Each is a few short sentences."""
    if not report.trials:
        return ["No trial has finished yet. Write the report again once the study has run."]
    rules = (
        _unguarded(report),
        _violations(report, config),
        _doubts(report),
        _refused(report, axes, borders, config),
        _not_measured(report),
        _intervals(report, config),
        _no_trial_time(report),
    )
    found = [advice for rule in rules for advice in rule]
    return found or ["Nothing stands out. The guard judged all trials, and the budgets held."]


def _unguarded(report: Report) -> Iterator[str]:
    number = report.count("unguarded")
    if number:
        reasons = [t.record.reason.removeprefix("not judged: ") for t in report.trials if t.outcome == "unguarded"]
        why = next(filter(None, reasons), "the reason was not recorded")
        yield (
            f"{_trials(number)} ran without a verdict. Nothing protected them. The first reason: {_ended(why)} "
            "Pass strict=True to the guard to make this an error."
        )


def _violations(report: Report, config: AdviceConfig) -> Iterator[str]:
    number, measured = report.count("over"), sum(trial.is_measured for trial in report.trials)
    if number > config.most_violations * max(measured, 1):
        yield (
            f"{number} of {measured} measured trials broke a budget. Lower risk= to be stricter. "
            "To see them, choose “ran, broke a budget” above the table of verdicts."
        )


def _doubts(report: Report) -> Iterator[str]:
    number = sum(bool(trial.doubt) for trial in report.trials)
    if number:
        yield (
            f"Readings of {_trials(number)} are not believed, and nothing is learnt from them. "
            "Check that build describes what the trial runs. `perfguard log quarantine` lists all of them."
        )


def _refused(report: Report, axes: Sequence[Axis], borders: Mapping[Quantity, Border], config: AdviceConfig) -> Iterator[str]:
    refused = {limit: count for limit, count in report.summary.pruned_for.items() if limit is not None}
    for limit, count in sorted(refused.items(), key=lambda pair: -pair[1]):
        total = report.summary.num_pruned + report.summary.num_launched
        if count < max(2.0, config.many_refused * total):
            continue
        text = f"{count} of {total} proposals were rejected for their {NOUNS[limit]}."
        close = sum(_is_within(trial, limit) for trial in report.trials)
        if close > count / 2:
            yield (
                f"{text} For {close} of them the prediction was within the budget, and only the upper end of its interval was "
                "not. Intervals narrow with measured trials."
            )
            continue
        border = borders.get(limit)
        strongest = next(iter(border.ranked()), None) if border is not None else None
        if border is not None and strongest is not None and strongest[1] >= config.telling_factor:
            name, factor = strongest
            text += f" {name} changes it most: {times_in_words(factor)} over its range."
            axis = next(axis for axis in axes if axis.name == name)
            crossing = border.crossing(axis)
            if crossing is not None:
                side = "above" if border.slopes[name] > 0 else "below"
                text += f" With the others at their median, values {side} about {number_in_words(crossing)} do not fit."
            text += " Narrow its range, or raise the budget."
        else:
            text += " Narrow the search space, or raise the budget."
        if limit == "memory":
            text += ' on_violation="repair" runs such trials with smaller batches or half precision.'
        yield text


def _is_within(trial: ReportTrial, limit: Quantity) -> bool:
    """Whether a trial was pruned for that limit although its predicted median holds it."""
    record = trial.record
    was_pruned_for_it = trial.outcome == "pruned" and quantity_of(record.reason) == limit
    return was_pruned_for_it and record.predicted.get(limit, math.inf) <= record.limits.get(limit, 0.0)


def _not_measured(report: Report) -> Iterator[str]:
    reasons = Counter(trial.record.not_measured for trial in report.trials if trial.record.not_measured)
    for reason, count in reasons.most_common(2):
        yield f"{_trials(count)} ran, but did not measure the device: {_ended(reason)} The guard learns nothing from them."


def _intervals(report: Report, config: AdviceConfig) -> Iterator[str]:
    for quantity in report.compared:
        known = [trial.record.intervals[quantity] for trial in report.trials if quantity in trial.record.intervals]
        ratios = [high / low for low, high in known[-2 * config.enough_runs :] if low > 0]
        inside, compared = report.coverage(quantity)
        noun = NOUNS[quantity]
        if compared >= config.enough_runs and inside < config.least_coverage * compared:
            yield (
                f"Only {inside} of {compared} measured values of {noun} lie in their 90% interval. "
                "Check that build describes what the trial runs, and that no other program uses the device."
            )
        elif ratios and statistics.median(ratios) > config.wide_interval:
            ratio = statistics.median(ratios)
            text = f"The 90% intervals of {noun} are wide: their ends are a factor of {ratio:.2g} apart."
            if compared < config.enough_runs:
                more = config.enough_runs - compared
                text += f" Let {more} more trial{'s' if more != 1 else ''} run on this device, and they will narrow."
            else:
                text += " More trials narrow them if no other program uses the device."
            yield text


def _no_trial_time(report: Report) -> Iterator[str]:
    judged = [trial.record for trial in report.trials if trial.record.predicted]
    if judged and not any("time" in record.predicted for record in judged):
        yield "No trial time was predicted, so no saved time is known. Give Workload(..., steps=...)."


def honest_notes(report: Report) -> list[str]:
    """Return what the numbers of the summary do not say: what was not saved, and what is only predicted."""
    summary, notes = report.summary, []
    if summary.saved_s is not None:
        notes.append("Saved time is predicted: the time of the pruned trials, if each had run to its end.")
    if summary.num_crashes_avoided:
        notes.append(
            f"{_trials(summary.num_crashes_avoided)} needed more memory than the device has. Without a guard they would have "
            "failed in their first steps, so they save their start-up and no training time."
        )
    unknown = sum(
        t.outcome == "pruned" and "time" not in t.record.predicted and not t.record.fails_at_once for t in report.trials
    )
    if unknown:
        notes.append(f"{_trials(unknown)} pruned without a predicted trial time count as nothing saved.")
    over = [trial for trial in report.trials if trial.outcome == "over"]
    if over:
        lost_s = sum(trial.record.measured.get("time", 0.0) for trial in over)
        notes.append(
            f"{_trials(len(over))} broke a budget all the same. They took {format_quantity('time', lost_s)}, "
            "and the guard did not save that."
        )
    if summary.num_pruned:
        notes.append(
            "A guarded search meets more hopeless proposals than an unguarded one with as many trials. "
            "To know what the guard is worth, run the study with and without it."
        )
    return notes


def _trials(number: int) -> str:
    return f"{number:,} trial{'s' if number != 1 else ''}"


def times_in_words(factor: float) -> str:
    """A factor in words, for instance "3.4 times"."""
    return "more than 1,000 times" if factor >= 1000 else f"{factor:.0f} times" if factor >= 10 else f"{factor:.2g} times"


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."

"""Why is this number wrong? The account of a trial's prediction, stage by stage, beside its measurement and its limit.

:func:`lines_of` makes the lines of one estimate, :func:`tables_of` makes tables of them, and
:func:`perfguard.plots.plot_account` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from perfguard.account import PHYSICS, physics_of
from perfguard.exceptions import ConfigurationError
from perfguard.predictor import Estimate
from perfguard.quantities import SPECS, Quantity, format_quantity

if TYPE_CHECKING:
    from rich.table import Table

    from perfguard.record import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One stage of an account as a person reads it. Values are in the quantity's unit: bytes, seconds, joules or dollars."""

    name: str
    factor: float
    """Median after the stage / median before it. 1 for physics."""
    median: float
    """After the stage."""
    low: float
    """Lower end of the 90% interval after the stage."""
    high: float
    """Upper end."""
    why: str


def lines_of(estimate: Estimate) -> list[Line]:
    """Return the stages of ``estimate``, from physics to its median. Empty: it has no account."""
    median = physics_of(estimate.median, estimate.stages)
    lines = []
    for stage in estimate.stages:
        factor = math.exp(stage.shift)
        median *= factor
        low, high = Estimate(median, stage.log_sigma).interval()
        lines.append(Line(name=stage.name, factor=factor, median=median, low=low, high=high, why=stage.why))
    return lines


def explained(predicted: Mapping[Quantity, Estimate]) -> dict[Quantity, Estimate]:
    """Return the estimates that have an account of their own. What is a multiple of another quantity has that one's."""
    known = {quantity: estimate for quantity, estimate in predicted.items() if estimate.stages}
    return {name: estimate for name, estimate in known.items() if SPECS[name].multiple_of not in known}


def furthest(record: TrialRecord, predicted: Mapping[Quantity, Estimate]) -> Quantity:
    """Return the quantity of ``predicted`` that is furthest from its measurement; without one, the first."""
    return max(predicted, key=lambda quantity: log_error(record, quantity))


def log_error(record: TrialRecord, quantity: Quantity) -> float:
    """Return |log(measured / predicted)| of a trial. -1: it was not measured, or not to its end."""
    estimate = record.predicted.get(quantity)
    measured = record.counted(quantity)
    if record.error(quantity) is None or estimate is None or not measured:
        return -1.0
    return abs(math.log(measured / estimate.median))


def as_json(predicted: Mapping[Quantity, Estimate]) -> dict[Quantity, list[dict[str, Any]]]:
    """Return the lines of each quantity, for JSON."""
    return {quantity: [asdict(line) for line in lines_of(estimate)] for quantity, estimate in explained(predicted).items()}


def tables_of(
    predicted: Mapping[Quantity, Estimate],
    *,
    measured: Mapping[Quantity, float] | None = None,
    limits: Mapping[Quantity, float] | None = None,
) -> Iterator[Table]:
    """Yield a table for each quantity with an account: a row for each stage, and rows of what was measured and of the limit."""
    from rich.table import Table

    for quantity, estimate in explained(predicted).items():
        table = Table(title=f"account of the {SPECS[quantity].noun}")
        for heading in ("stage", "factor", "median", "90% interval", "why"):
            table.add_column(heading, justify="left" if heading in ("stage", "why") else "right")
        lines = lines_of(estimate)
        for line in lines:
            median, low, high = (format_quantity(quantity, value) for value in (line.median, line.low, line.high))
            factor = "" if math.isclose(line.factor, 1.0, abs_tol=5e-4) else factor_in_words(line.factor)
            is_guess = line.name == PHYSICS and len(lines) > 1  # how wrong physics alone would be: what follows knows better
            interval = "" if is_guess else f"{low} to {high}"
            table.add_row(line.name, factor, median, interval, line.why)
        beside = {"measured": (measured or {}).get(quantity), "limit": (limits or {}).get(quantity)}
        table.add_section()
        for name, value in beside.items():
            if value is not None:
                words = f"{factor_in_words(value / estimate.median)} the prediction"
                table.add_row(name, "", format_quantity(quantity, value), "", words)
        yield table


def factor_in_words(factor: float) -> str:
    """Return a factor such as "×1.26"."""
    return f"×{factor:.3g}" if factor < 1000 else f"×{factor:,.0f}"


def find_trial(records: Sequence[TrialRecord], trial: str, *, title: str) -> TrialRecord:
    """Return the newest record of a trial.

    Args:
        records: of a study, or of a log with one study or several.
        trial: its number, or the tuner's own name of it, such as Ray Tune's.
        title: name of the study or the log, for messages.

    Raises:
        ConfigurationError: if there is no such trial, or several studies have one.
    """
    found = [record for record in records if trial in (str(record.number), record.trial_id)]
    if not found:
        raise ConfigurationError(f"{title} has no trial {trial!r}. {_known_trials(records)}")
    studies = list(dict.fromkeys(record.study for record in found))
    if len(studies) > 1:
        names = ", ".join(map(repr, studies[:10]))
        raise ConfigurationError(f"{len(studies)} studies have a trial {trial!r}. Add --study, which is one of {names}.")
    return found[-1]


def _known_trials(records: Sequence[TrialRecord]) -> str:
    numbers = sorted({record.number for record in records if record.number is not None})
    if numbers:
        return f"Its {len(numbers):,} trials that have ended are from {numbers[0]} to {numbers[-1]}."
    names = [record.trial_id for record in records if record.trial_id]
    return f"It has {', '.join(map(repr, names[-5:]))}." if names else "It has no trial yet."

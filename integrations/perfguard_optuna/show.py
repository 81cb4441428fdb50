"""How a guarded study is shown: the summary, one line a trial, a progress line, two pictures, the report, and trackers.

All of it is made from what PerfGuard wrote into the trials (:func:`perfguard_optuna.attributes.record_of`).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from tqdm import tqdm
from tqdm.contrib.logging import tqdm_logging_redirect

from perfguard import plots, summary
from perfguard.budget import Quantity
from perfguard.exceptions import ConfigurationError, TrackingWarning, warn_user
from perfguard.quantities import format_seconds
from perfguard.report import Report, tables_in
from perfguard.summary import TRIAL_HEADING, Summary, trial_line
from perfguard.tracking import Tracker, TrackerName
from perfguard_optuna.attributes import PREFIX, record_of, records_of

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.table import Table


def summarize(study: optuna.Study) -> Summary:
    """Return the summary of ``study``: counts, reasons, violations, time saved, errors. ``print`` shows it as a table."""
    return summary.summarize(records_of(study))


def pruned_table(study: optuna.Study, *, max_rows: int = 20) -> Table:
    """The trials of ``study`` that were pruned before launch: what each needed, its limit, and the time that it did not take."""
    return summary.pruned_table(records_of(study), max_rows=max_rows)


def plot_budget(study: optuna.Study, *, quantity: Quantity = "memory") -> go.Figure:
    """Draw predicted against measured, with 90% intervals and the budget; see :func:`perfguard.plots.plot_budget`."""
    return plots.plot_budget(records_of(study), quantity=quantity)


def plot_savings(study: optuna.Study) -> go.Figure:
    """Draw what the study took, and what the pruned trials would have added; see :func:`perfguard.plots.plot_savings`."""
    return plots.plot_savings(records_of(study))


class TrackingCallback:
    """A study callback that writes each finished trial into MLflow, Weights & Biases or TensorBoard.

    Example:
        >>> study.optimize(objective, n_trials=40, callbacks=[TrackingCallback("mlflow")])          # doctest: +SKIP

    Args:
        to: "mlflow", "wandb" or "tensorboard".
        settings: as for :class:`perfguard.tracking.Tracker`.
    """

    def __init__(self, to: TrackerName, **settings: Any) -> None:
        self._tracker = Tracker(to, **settings)

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        values = trial.values if trial.state == TrialState.COMPLETE else ()
        more = {"value" if len(values) == 1 else f"value_{index}": value for index, value in enumerate(values)}
        for proposal in _proposals_for(study, trial):
            self._tracker.write(f"trial {proposal.number}", record_of(proposal))
        self._tracker.write(f"trial {trial.number}", record_of(trial), more)


def _proposals_for(study: optuna.Study, trial: FrozenTrial) -> list[FrozenTrial]:
    """The proposals that a PerfGuardSampler rejected while it searched for ``trial``. Optuna calls no callback for them."""
    pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    return [one for one in pruned if one.user_attrs.get(f"{PREFIX}proposed_for") == trial.number]


class TrialPrinter:
    """A study callback that prints one line a trial: verdict, predicted and measured memory and time.

    Example:
        >>> study.optimize(objective, n_trials=40, callbacks=[TrialPrinter()])   # doctest: +SKIP
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._has_heading = False

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        record = record_of(trial)
        if not self._has_heading:
            self._has_heading = True
            self._print(TRIAL_HEADING, style="bold")
        style = {"pruned": "yellow", "unguarded": "dim"}.get(record.in_words, "red" if record.violates else "green")
        values = trial.values if trial.state == TrialState.COMPLETE else ()
        self._print(trial_line(record, values), style=style)

    def _print(self, line: str, style: str) -> None:
        with tqdm.external_write_mode(file=self._console.file):  # a progress line stays below
            self._console.print(line, style=style, highlight=False, markup=False)


@contextmanager
def progress_line(n_trials: int | None, *, counts_pruned: bool) -> Iterator[Callable[[optuna.Study, FrozenTrial], None]]:
    """Show a progress line while the block runs, and yield the study callback that counts trials in it.

    What Optuna logs meanwhile appears above the line.

    Args:
        n_trials: the number of trials to launch. None: unknown.
        counts_pruned: whether ``n_trials`` counts pruned trials, too.
    """
    num_launched = num_pruned = num_over = 0
    saved_s = 0.0
    has_warned = False
    log = logging.getLogger("optuna")
    # Of a logger that writes to a file alone, nothing is to appear here.
    speaks = any(getattr(handler, "stream", None) in (sys.stdout, sys.stderr) for handler in log.handlers)

    @contextmanager
    def study_goes_on() -> Iterator[None]:
        nonlocal has_warned
        try:
            yield
        except Exception as error:
            if not has_warned:
                has_warned = True
                warn_user(
                    f"The progress line cannot be shown: {type(error).__name__}: {error}. The study goes on.", TrackingWarning
                )

    def count(study: optuna.Study, trial: FrozenTrial) -> None:
        nonlocal num_launched, num_pruned, num_over, saved_s
        with study_goes_on():
            records = [record_of(ended) for ended in (*_proposals_for(study, trial), trial)]
            with tqdm.get_lock():
                for record in records:
                    num_pruned += record.is_pruned
                    num_launched += not record.is_pruned
                    num_over += record.violates and not record.is_pruned
                    saved_s += record.saved_s or 0.0
                saved = f" · {format_seconds(saved_s)} saved" if saved_s else ""
                line.set_description_str(f"{num_launched} launched · {num_pruned} pruned · {num_over} over budget{saved}")
                line.update(counts_pruned or not records[-1].is_pruned)

    shown = ExitStack()
    with study_goes_on():
        redirect = tqdm_logging_redirect(total=n_trials, unit="trial", loggers=[log] if speaks else [])
        line = shown.enter_context(redirect)
    try:
        yield count
    finally:
        with study_goes_on():
            shown.close()


def read_report(source: Any, study: str | None) -> Report | None:
    """Return the report of ``source``: a study, or the URL or the file of a storage. None: it is something else.

    Args:
        source: what to read.
        study: the name of the study, where the storage has several.

    Raises:
        ConfigurationError: for a storage that cannot be read, or if the study is not clear.
    """
    if isinstance(source, str):
        storage = _storage_of(source)
        source = None if storage is None else _load(storage, study)
    if not isinstance(source, optuna.Study):
        return None
    records = [replace(record, study=source.study_name) for record in records_of(source)]
    return Report(title=source.study_name, source="Optuna study", records=records)


def _storage_of(location: str) -> BaseStorage | None:
    """The storage at a URL or in a file. None: it is none. Nothing is created."""
    tables = tables_in(location)
    if {"studies", "trials", "version_info"} <= tables:
        try:
            return optuna.storages.RDBStorage(location if "://" in location else f"sqlite:///{Path(location).absolute()}")
        except Exception as error:  # a storage of another Optuna
            raise ConfigurationError(f"Optuna cannot open the storage: {error}") from error
    if "://" not in location and not tables and _is_journal(Path(location)):
        return JournalStorage(JournalFileBackend(location))
    return None


def _is_journal(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return "op_code" in json.loads(file.readline())
    except (OSError, ValueError, TypeError):
        return False


def _load(storage: BaseStorage, name: str | None) -> optuna.Study:
    names = [study.study_name for study in storage.get_all_studies()]
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        known = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
        wanted = "Say which study with study= (--study)" if name is None else f"There is no study {name!r}"
        raise ConfigurationError(f"{wanted}. The storage has {len(names)}: {known or 'none'}.")
    return optuna.load_study(study_name=name, storage=storage)

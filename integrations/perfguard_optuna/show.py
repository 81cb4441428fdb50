"""How a guarded study is shown: the summary, two pictures, the report, and trackers.

All of it is made from what PerfGuard wrote into the trials (:func:`perfguard_optuna.attributes.record_of`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from perfguard import plots, summary
from perfguard.exceptions import ConfigurationError
from perfguard.quantities import Quantity
from perfguard.report import Report, tables_in
from perfguard.summary import Summary
from perfguard.tracking import Tracker, TrackerName
from perfguard_optuna.attributes import PREFIX, record_of, records_of

if TYPE_CHECKING:
    import plotly.graph_objects as go


def summarize(study: optuna.Study) -> Summary:
    """Return the summary of ``study``: counts, reasons, violations, time saved, errors. ``print`` shows it as a table."""
    return summary.summarize(records_of(study))


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

    def __init__(self, to: TrackerName, **settings: object) -> None:
        self._tracker = Tracker(to, **settings)

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        values = trial.values if trial.state == TrialState.COMPLETE else ()
        more = {"value" if len(values) == 1 else f"value_{index}": value for index, value in enumerate(values)}
        # Optuna calls no callback for the proposals that a PerfGuardSampler rejected while it searched for the trial.
        pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        for proposal in (one for one in pruned if one.user_attrs.get(f"{PREFIX}proposed_for") == trial.number):
            self._tracker.write(f"trial {proposal.number}", record_of(proposal))
        self._tracker.write(f"trial {trial.number}", record_of(trial), more)


def read_report(source: object, study: str | None) -> Report | None:
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

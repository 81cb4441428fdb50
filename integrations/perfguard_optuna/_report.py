"""The report of an Optuna study; see :mod:`perfguard.report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from perfguard.exceptions import ConfigurationError
from perfguard.report import History, Report, ReportTrial, device_names, history_of, tables_in
from perfguard_optuna._attributes import PREFIX
from perfguard_optuna._summary import finished_trials, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perfguard.log import MeasurementStore


def read(source: Any, study: str | None, log: MeasurementStore | None) -> Report | None:
    """Read the report of ``source``: a study, or the URL or the file of a storage. None: it is something else.

    Args:
        source: what to read.
        study: the name of the study, where the storage has several.
        log: the study's measurement log, for drift, learning and doubtful readings.

    Raises:
        ConfigurationError: for a storage that cannot be read, or if the study is not clear.
    """
    if isinstance(source, optuna.Study):
        return report_of(source, log)
    storage = _storage_of(source) if isinstance(source, str) else None
    return None if storage is None else report_of(_load(storage, source, study), log)


def report_of(study: optuna.Study, log: MeasurementStore | None = None) -> Report:
    """Return the report of a study, from what the guard wrote into its trials."""
    history, doubts, device = _history_of(study, log)
    trials = [
        ReportTrial(
            record=record,
            params=trial.params,
            has_run=record.verdict != "prune",
            is_measured=record.verdict != "prune" and record.is_measured,
            is_whole=trial.state == TrialState.COMPLETE,
            study=study.study_name,
            doubt=doubts.get(trial.number, ""),
        )
        for trial, record in finished_trials(study)
    ]
    return Report(
        title=study.study_name,
        source="Optuna study",
        device=device,
        summary=summarize(study),
        trials=trials,
        history=history,
    )


def _history_of(study: optuna.Study, log: MeasurementStore | None) -> tuple[History, Mapping[int, str], str]:
    """What the log says of the study's own trials, doubtful readings by the trial's number, and the device's name."""
    finished = finished_trials(study)
    predictors = list(dict.fromkeys(name for trial, _ in finished if (name := trial.user_attrs.get(f"{PREFIX}:predictor"))))
    reasons = {trial.number: record.reason for trial, record in finished}
    rows = [] if log is None else log.decisions(study.study_name)
    rows = [row for row in rows if row.trial is not None and reasons.get(row.trial) == row.reason]  # of no study before it
    if log is None or not rows:
        return History(predictors=predictors), {}, ""
    history, doubts = history_of(log, rows)
    index_of = {trial.number: index for index, (trial, _) in enumerate(finished)}
    numbers = {row.decision_id: row.trial for row in rows if row.trial is not None}
    order = [index_of[number] for number in numbers.values()]
    moved = [(None if index is None else order[index], reason) for index, reason in history.drifts]
    by_number = {numbers[decision_id]: reason for decision_id, reason in doubts.items() if decision_id in numbers}
    history = History(log=history.log, drifts=moved, weights=history.weights, predictors=predictors)
    return history, by_number, device_names(log, rows)


def _storage_of(location: str) -> BaseStorage | None:
    """The storage at a URL or in a file; None: it is none. Nothing is created."""
    tables = tables_in(location)
    if {"studies", "trials", "version_info"} <= tables:
        url = location if "://" in location else f"sqlite:///{Path(location).absolute()}"
        try:
            return optuna.storages.RDBStorage(url)
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


def _load(storage: BaseStorage, source: str, name: str | None) -> optuna.Study:
    names = [study.study_name for study in storage.get_all_studies()]
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        known = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
        wanted = "Say which study with study= (--study)" if name is None else f"There is no study {name!r}"
        raise ConfigurationError(f"{wanted}. The storage has {len(names)}: {known or 'none'}.")
    return optuna.load_study(study_name=name, storage=storage)

"""New weights from the measurement log: fine-tuned on new runs and a replay of old ones, judged, and promoted if they are better.

`perfguard learn` runs it in a process of its own. Guards find promoted weights in the log by themselves (`sync.py`). Every
generation stays there with what it was judged by, and can be rolled back.
"""

from __future__ import annotations

import functools
import math
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from perfguard.exceptions import ConfigurationError, LogError, PredictorError
from perfguard.learning.assessment import assess_log
from perfguard.predictor import DEFAULT_PREDICTOR, TARGETS, Observation, Predictor, Refinable, Target, load_predictor

if TYPE_CHECKING:
    from perfguard.log import MeasurementStore

LEASE = "learn"
"""Name of the lease in the log. Only its holder may promote weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Conditions for the promotion of a generation of weights. Errors are mean |log(measured / predicted)|."""

    min_gain: float = 0.02
    """Least relative reduction of the error on the newest runs for a promotion."""
    gain_standard_errors: float = 2.0
    """And by how many standard errors of that difference, so that chance promotes nothing."""
    max_loss: float = 0.005
    """Largest increase of the error on kept-back runs: half a percentage point."""
    max_shift_on_reference: float = 0.01
    """Largest distance from the shipped weights on their training data, as a logarithm."""
    recent_share: float = 0.25
    """The share of a device's runs that are the newest and judge a generation."""
    min_recent_runs: int = 8
    max_recent_runs: int = 200
    kept_back_every: int = 5
    """One run in so many is never learnt, by any generation: on these all can be compared."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one update."""

    weights_id: str
    promoted: bool
    num_rows: int
    """The runs that were learnt."""
    metrics: Mapping[str, float]
    """Mean |log(measured / predicted)| by "recent" or "kept back", target, and "before" or "after"; "shipped moved": how far from
    the shipped weights it is on what these were fitted to."""

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())
        return f"{self.weights_id[:12]} {'promoted' if self.promoted else 'rejected'}, {self.num_rows} runs learnt; {errors}"


class OnlineTrainer:
    """Fine-tunes a predictor's weights on a log, and promotes them there if they are better.

    A generation learns from at most ``max_rows`` runs of all devices. Half of each device's share are its newest runs, half are
    drawn from all that came before, so that nothing old is forgotten. Some runs are held out to judge the generation. These are
    the newest quarter of the runs of each device (at most 200), and one in five of the others. The latter are the same for every
    generation.

    It is promoted if three conditions hold. On the newest runs it is better than the weights in use, by more than chance. On the
    other held-out runs of the present regime it is no worse. Its predictions on the shipped weights' reference data stay as they
    were.

    Args:
        log: the log to learn from and to promote in.
        predictor: the name of a predictor, or a function that makes one. It must be :class:`perfguard.predictor.Refinable`.
        min_new: how many new runs a generation needs.
        max_rows: the most runs to learn from.
        seed: seed of the replay and of the training.
        config: the conditions for a promotion.

    Raises:
        ConfigurationError: if the predictor cannot be fine-tuned.
    """

    def __init__(
        self,
        log: MeasurementStore,
        *,
        predictor: str | Callable[[], Predictor] = DEFAULT_PREDICTOR,
        min_new: int = 20,
        max_rows: int = 1000,
        seed: int = 0,
        config: TrainerConfig = TrainerConfig(),
    ) -> None:
        if min_new < 1 or max_rows < 1:
            raise ConfigurationError(f"min_new and max_rows must be at least 1, but got {min_new} and {max_rows}.")
        self._log = log
        make = functools.partial(load_predictor, predictor) if isinstance(predictor, str) else predictor
        self._in_use, self._candidate = make(), make()
        if not isinstance(self._in_use, Refinable):
            raise ConfigurationError(f"The predictor {predictor!r} cannot be fine-tuned; {DEFAULT_PREDICTOR!r} can.")
        self._lineage = self._in_use.lineage
        self._min_new = min_new
        self._max_rows = max_rows
        self._random = Random(seed)
        self._seed = seed
        self._config = config

    def update(self, *, may_promote: Callable[[], bool] = lambda: True) -> Generation | None:
        """Make one generation, and promote it or reject it; None: there is too little that is new, or too little at all.

        Args:
            may_promote: called just before a promotion, for instance to check that a lease is still held after a long update.

        Raises:
            LogError: if the log cannot be used now. Nothing is promoted then.
        """
        generations = self._log.weights(self._lineage)
        # When one was rolled back counts too: the runs that it was made of would bring it back at once.
        since_ns = max((_as_ns(weights.state_changed_at.timestamp()) for weights in generations), default=0)
        if self._log.num_measured(since_ns=since_ns) < self._min_new:
            return None  # checked twice a minute by a watch, so before the runs and their graphs are read
        by_device = {
            device_id: assess_log(self._rows(device_id), predictor=self._lineage).observations
            for device_id in self._log.device_ids()
        }
        num_new = sum(row.recorded_at_ns > since_ns for rows in by_device.values() for row in rows)
        if num_new < self._min_new:
            return None
        splits = {device_id: _split(rows, self._config) for device_id, rows in by_device.items()}
        learnt = [row for split in splits.values() for row in split.learn]
        assert isinstance(self._in_use, Refinable)
        assert isinstance(self._candidate, Refinable)
        data = self._candidate.refine(learnt, seed=self._seed)
        if data is None:
            return None
        parent_id = self._use_promoted()
        self._candidate.use_refinement(data)
        errors = self._judged(splits)
        metrics = {f"{what} {when}": statistics.fmean(found) for (what, when), found in errors.items() if found}
        metrics["shipped moved"] = self._candidate.shift_on_reference
        is_near = self._candidate.shift_on_reference <= self._config.max_shift_on_reference
        promoted = _is_better(errors, self._config) and is_near and may_promote()
        weights_id = self._log.record_weights(
            predictor=self._lineage,
            data=data,
            parent_id=parent_id,
            metrics={name: round(value, 5) for name, value in metrics.items()} | {"rows": len(learnt)},
            keep_data=promoted,
        )
        if promoted:
            promoted = self._log.promote_candidate(weights_id)
        else:
            self._log.set_weights_state(weights_id, "rejected")
        return Generation(weights_id, promoted, len(learnt), metrics)

    def _use_promoted(self) -> str | None:
        """The id of the generation that guards use now, None for the shipped weights; ``_in_use`` is as they are."""
        assert isinstance(self._in_use, Refinable)
        weights_id = self._log.promoted_weights(self._lineage)
        data = None if weights_id is None else self._log.weights_data(weights_id)
        if weights_id is not None and data is None and self._log.promoted_weights(self._lineage) != weights_id:
            raise LogError("The weights in use changed while they were read.")
        try:
            self._in_use.use_refinement(data)
        except PredictorError:  # guards refuse them too, see LogSync, and a better generation takes their place
            self._in_use.use_refinement(None)
        return weights_id

    def _rows(self, device_id: str) -> list[Observation]:
        share = max(1, self._max_rows // max(1, len(self._log.device_ids())))
        newest = self._log.observations(device_id, share)
        if len(newest) < share:
            return newest
        newest = newest[-math.ceil(share / 2) :]
        known = {row.decision_id for row in newest}
        drawn = self._log.sample(share, self._random, device_id=device_id)
        old = [row for row in drawn if row.decision_id not in known][: share // 2]
        return sorted([*old, *newest], key=lambda row: row.recorded_at_ns)

    def _judged(self, splits: Mapping[str, _Split]) -> _Errors:
        errors: _Errors = {}
        for when, predictor in (("before", self._in_use), ("after", self._candidate)):
            for split in splits.values():
                predictor.fine_tune(split.learn)
                for what, rows in (("recent", split.recent), ("kept back", split.kept_back)):
                    for target in TARGETS:
                        errors.setdefault((f"{what} {target}", when), []).extend(_errors(predictor, rows, target))
        return errors


_Errors = dict[tuple[str, str], list[float]]
"""|log(measured / predicted)| of runs that were not learnt, by ("recent memory", "before"), ("kept back time", "after"), ..."""


@dataclass(frozen=True, slots=True)
class _Split:
    """The runs of one device."""

    learn: Sequence[Observation]
    recent: Sequence[Observation]
    kept_back: Sequence[Observation]


def _split(rows: Sequence[Observation], config: TrainerConfig) -> _Split:
    number = min(max(config.min_recent_runs, math.ceil(config.recent_share * len(rows))), config.max_recent_runs)
    older, recent = rows[:-number], rows[-number:]
    is_kept = [zlib.crc32(row.decision_id.encode()) % config.kept_back_every == 0 for row in older]
    learn = [row for row, kept in zip(older, is_kept, strict=True) if not kept]
    present = max((row.regime for row in rows), default=0)  # a world that is gone is no judge
    kept_back = [row for row, kept in zip(older, is_kept, strict=True) if kept and row.regime == present]
    return _Split(learn, recent, kept_back)


def _errors(predictor: Predictor, rows: Sequence[Observation], target: Target) -> list[float]:
    errors = []
    for row in rows:
        value = row.measured(target)
        if value is not None and row.measurement.status == "ok":
            prediction = predictor.predict(row.graph, row.device)
            estimate = prediction.peak_memory if target == "memory" else prediction.step_time
            errors.append(abs(math.log(value / estimate.median)))
    return errors


def _is_better(errors: _Errors, config: TrainerConfig) -> bool:
    """Better on the newest runs, over both quantities; on those that were kept back no worse in either."""
    for target in TARGETS:
        before, after = (errors.get((f"kept back {target}", when), []) for when in ("before", "after"))
        if before and statistics.fmean(after) > statistics.fmean(before) + config.max_loss:
            return False
    before, after = (
        [error for target in TARGETS for error in errors.get((f"recent {target}", when), [])] for when in ("before", "after")
    )
    if len(before) < config.min_recent_runs:
        return False
    gains = [old - new for old, new in zip(before, after, strict=True)]
    chance = config.gain_standard_errors * statistics.stdev(gains) / math.sqrt(len(gains))
    return statistics.fmean(gains) > max(config.min_gain * statistics.fmean(before), chance)


def _as_ns(seconds: float) -> int:
    return int(seconds * 1e9)

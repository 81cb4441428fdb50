"""Learning from the measurement log: lessons after every run, and new weights that are judged before anybody uses them.

    every run       Lessons: the evidence is weighed (`evidence.py`), the predictor conditioned on it anew; half a second of one
                    core for the newest 500 runs, a few hundredths for 100
    now and then    OnlineTrainer: weights are fine-tuned on new runs and a replay of old ones, judged on runs that they have not
                    seen, and promoted in the log if they are better; a process of its own, see `perfguard learn`

Guards find promoted weights in the log by themselves. Every generation stays there with what it was judged by, and can be
rolled back.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from perfguard._warn import warn_user
from perfguard.evidence import Evidence, weigh
from perfguard.exceptions import ConfigurationError, LogError, LogWarning, PredictorError
from perfguard.predictor import DEFAULT_PREDICTOR, TARGETS, Observation, Predictor, Refinable, Target, load_predictor

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.store import MeasurementStore

LEASE = "learn"
"""In the log; who holds it may promote weights."""
_GAIN = 0.02
"""By which share of its error on the newest runs a generation must be better, at least."""
_STANDARD_ERRORS = 2.0
"""And by how many standard errors of that difference, so that chance promotes nothing."""
_LOSS = 0.005
"""How much worse it may be on what was kept back, as a logarithm: half a percentage point."""
_MOST_STRAYING = 0.01
"""How far it may be from the shipped weights on what these were fitted to, as a logarithm."""
_RECENT = 0.25
_FEWEST_RECENT, _MOST_RECENT = 8, 200
_KEPT_BACK = 5
"""One run in so many is never learnt, by any generation: on these all can be compared."""


class Lessons:
    """Keeps a predictor up to date with a log.

    Args:
        predictor: whom to teach. A :class:`perfguard.predictor.Refinable` also takes the weights that were promoted in the log.
        log: what to teach from.
    """

    def __init__(self, predictor: Predictor, log: MeasurementStore) -> None:
        self._predictor = predictor
        self._log = log
        self._weights_id: str | None = None
        self._taught: dict[str, str | Device] = {}

    def teach(self, device: str | Device) -> Evidence:
        """Teach what the log holds of a device, or of all with its id; if there are new weights, of every device that was taught
        before, too."""
        device_id = device if isinstance(device, str) else device.id
        if self._take_promoted():
            for other_id, other in self._taught.items():
                if other_id != device_id:
                    self._predictor.fine_tune(self._weighed(other).observations)
        evidence = self._weighed(device)
        self._predictor.fine_tune(evidence.observations)
        self._taught[device_id] = device
        return evidence

    def _weighed(self, device: str | Device) -> Evidence:
        return weigh(self._log.observations(device), predictor=self._predictor.name)

    def _take_promoted(self) -> bool:
        """Whether the weights are others now."""
        if not isinstance(self._predictor, Refinable):
            return False
        try:
            weights_id = self._log.promoted_weights(self._predictor.lineage)
        except LogError:
            return False  # the log is away; what is in use goes on
        if weights_id == self._weights_id:
            return False
        data = None if weights_id is None else self._log.weights_data(weights_id)
        if weights_id is not None and data is None:
            return False  # it went away just now, or holds only their hash
        self._weights_id = weights_id
        try:
            self._predictor.use_refinement(data)
        except PredictorError as error:
            message = f"The weights {weights_id} that were promoted in the log are not used: {error}"
            warn_user(message, LogWarning)
            return False
        return True


@dataclass(frozen=True, slots=True)
class Generation:
    """What one update came to."""

    weights_id: str
    promoted: bool
    num_rows: int
    """That were learnt."""
    metrics: Mapping[str, float]
    """Mean |log(measured / predicted)| by "recent" or "kept back", target, and "before" or "after"; "shipped moved": how far from
    the shipped weights it is on what these were fitted to."""

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())
        return f"{self.weights_id[:12]} {'promoted' if self.promoted else 'rejected'}, {self.num_rows} runs learnt; {errors}"


class OnlineTrainer:
    """Fine-tunes a predictor's weights on a log, and promotes them there if they are better.

    A generation learns from at most ``max_rows`` runs of all devices: half of each device's share are its newest, half are drawn
    from all that came before, so that nothing old is forgotten. The newest quarter of the runs of each device (at most 200), and
    one run in five of the others (the same for every generation), are kept back to judge it: it must be better on the newest, by
    more than chance, and no worse on the others of the present regime, than what is in use, and leave what the shipped weights
    were fitted to as it was. Its memory is bounded by
    ``max_rows``, its processor time by where it runs.

    Args:
        log: from which to learn, and in which to promote.
        predictor: the name of a predictor that is :class:`perfguard.predictor.Refinable`, or a function that makes one.
        min_new: how many runs must have come since the last generation.
        max_rows: the most runs to learn from.
        seed: of the replay and of the training.

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

    def update(self, *, may_promote: Callable[[], bool] = lambda: True) -> Generation | None:
        """Make one generation, and promote it or reject it; None: there is too little that is new, or too little at all.

        Args:
            may_promote: asked just before a promotion, for instance whether a lease is still held after a long update.

        Raises:
            LogError: if the log cannot be used now. Nothing is promoted then.
        """
        generations = self._log.weights(self._lineage)
        # When one was rolled back counts too: the runs that it was made of would bring it back at once.
        since_ns = max((_as_ns(weights.state_changed_at.timestamp()) for weights in generations), default=0)
        if self._log.num_measured(since_ns=since_ns) < self._min_new:
            return None  # a watch asks every half a minute; the runs and their graphs are read if there is something to learn
        by_device = {
            device_id: weigh(self._rows(device_id), predictor=self._lineage).observations for device_id in self._log.device_ids()
        }
        num_new = sum(row.recorded_at_ns > since_ns for rows in by_device.values() for row in rows)
        if num_new < self._min_new:
            return None
        splits = {device_id: _split(rows) for device_id, rows in by_device.items()}
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
        metrics["shipped moved"] = self._candidate.strays
        promoted = _is_better(errors) and self._candidate.strays <= _MOST_STRAYING and may_promote()
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
        except PredictorError:  # guards refuse them too, see Lessons, and a better generation takes their place
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


def _split(rows: Sequence[Observation]) -> _Split:
    number = min(max(_FEWEST_RECENT, math.ceil(_RECENT * len(rows))), _MOST_RECENT)
    older, recent = rows[:-number], rows[-number:]
    is_kept = [zlib.crc32(row.decision_id.encode()) % _KEPT_BACK == 0 for row in older]
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


def _is_better(errors: _Errors) -> bool:
    """Better on the newest runs, over both quantities; on those that were kept back no worse in either."""
    for target in TARGETS:
        before, after = (errors.get((f"kept back {target}", when), []) for when in ("before", "after"))
        if before and statistics.fmean(after) > statistics.fmean(before) + _LOSS:
            return False
    before, after = (
        [error for target in TARGETS for error in errors.get((f"recent {target}", when), [])] for when in ("before", "after")
    )
    if len(before) < _FEWEST_RECENT:
        return False
    gains = [old - new for old, new in zip(before, after, strict=True)]
    chance = _STANDARD_ERRORS * statistics.stdev(gains) / math.sqrt(len(gains))
    return statistics.fmean(gains) > max(_GAIN * statistics.fmean(before), chance)


class LearnerProcess:
    """`perfguard learn --once` in a process beside this one, now and then: of low priority, on one core, without the GPU.

    Args:
        url: of the log.
        predictor: its name.
        every: runs between two updates.
    """

    def __init__(self, url: str, predictor: str, *, every: int = 25) -> None:
        self._url = url
        self._predictor = predictor
        self._every = every
        self._num_new = 0
        self._child: subprocess.Popen[bytes] | None = None

    def wake(self) -> None:
        """Another run was logged; starts an update if there are enough and none is at work. Never waits."""
        self._num_new += 1
        if self._num_new < self._every or (self._child is not None and self._child.poll() is None):
            return
        self._num_new = 0
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-m", "perfguard.cli", "learn", "--once", "--predictor", self._predictor]
        environment = os.environ | {"PERFGUARD_LOG": self._url, "CUDA_VISIBLE_DEVICES": ""}
        self._child = subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_child": None}


def _as_ns(seconds: float) -> int:
    return int(seconds * 1e9)

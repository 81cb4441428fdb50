"""Candidates that are vectors of widths: from a vector to the verdict without a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from perfguard.exceptions import BuildError, ConfigurationError, OnnxError, WorkloadError
from perfguard.nas._protocols import ConstrainedTrial, Constraint, constrain
from perfguard.pytorch import random_numbers_kept
from perfguard.workload import Workload

if TYPE_CHECKING:
    from perfguard._predict import Network
    from perfguard.graph import OpGraph
    from perfguard.predictor import Prediction
    from perfguard.verdict import Verdict

_OPERATORS_AT_ONCE = 300_000
"""Most operators of all candidates with arrays in memory at the same time."""
_MOST_WIDTHS = 64
_LARGEST_WIDTH = 2**20
_W = TypeVar("_W", bound=Mapping[str, int])


class ElasticSpace:
    """The networks of ``build(**widths)`` under one :class:`LatencyConstraint`. Made by :meth:`LatencyConstraint.elastic`.

    The space calls and traces ``build`` for a few dozen vectors. After that it computes a candidate's graph, exactly. The
    verdict is that of ``constraint(build(**widths))``. A candidate that cannot be computed exactly is built and traced;
    `perfguard/graph/_parametric.py` has the rule. ``num_traces`` counts all traces. If no candidate can be computed,
    ``why_traced`` has the reason.

    .. note::
        ``build`` must depend on nothing but its arguments. A network may take another branch at a few widths. The space notices
        branches that depend on how two sizes compare, or on a remainder by 16. It does not notice others (``a == 2 * b``).
    """

    def __init__(self, constraint: Constraint, build: Callable[..., Network], widths: Mapping[str, Iterable[int]]) -> None:
        from perfguard.graph import ParametricGraph

        self.constraint = constraint
        self.widths = _checked(widths)
        self._build = build
        self._allowed = [frozenset(values) for values in self.widths.values()]
        self._graphs = ParametricGraph(list(self.widths.values()), self._traced)

    @property
    def num_traces(self) -> int:
        """Number of candidates that were built and traced so far."""
        return self._graphs.num_traces

    @property
    def why_traced(self) -> str | None:
        """Reason why every candidate has to be traced. None: not every candidate has to be."""
        return self._graphs.why_traced

    def __call__(self, candidate: Mapping[str, int]) -> Verdict:
        """The verdict on one candidate, the widths by name."""
        return self.verdicts([candidate])[0]

    def verdicts(self, candidates: Sequence[Mapping[str, int]] | npt.NDArray[Any]) -> list[Verdict]:
        """The verdict of ``constraint(build(**candidate))`` on each candidate.

        Args:
            candidates: widths by name, or an array (n, number of widths) in the order of :attr:`widths`.

        Raises:
            ConfigurationError: if a width is unknown, missing, or not among those declared.
            WorkloadError: if a candidate has to be built and that fails.
        """
        return [self.constraint.verdict_on(prediction) for prediction in self.predictions(candidates)]

    def filter(self, candidates: Iterable[_W]) -> list[_W]:
        """The candidates that pass, in their order."""
        rows = list(candidates)
        return [row for row, verdict in zip(rows, self.verdicts(rows), strict=True) if verdict.action == "launch"]

    def predictions(self, candidates: Sequence[Mapping[str, int]] | npt.NDArray[Any]) -> list[Prediction]:
        """Predicted cost of one inference of each candidate."""
        points = self._points(candidates)
        found: list[Prediction] = []
        at_once = max(_OPERATORS_AT_ONCE // self._graphs.num_ops, 1)
        for start in range(0, len(points), at_once):
            found += self._predicted(points[start : start + at_once])
        return found

    def seconds(self, candidates: Sequence[Mapping[str, int]] | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The predicted latency of each candidate. Shape: (n,)."""
        return np.array([prediction.step_time.median for prediction in self.predictions(candidates)])

    def memory_bytes(self, candidates: Sequence[Mapping[str, int]] | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The predicted peak of memory of each candidate. Shape: (n,)."""
        return np.array([prediction.peak_memory.median for prediction in self.predictions(candidates)])

    def constrain(self, trial: ConstrainedTrial, candidate: Mapping[str, int]) -> Verdict:
        """Same as :meth:`LatencyConstraint.constrain`."""
        return constrain(trial, self(candidate))

    def learn(self, candidate: Mapping[str, int], measured_s: float, *, peak_memory_bytes: int | None = None) -> None:
        """Same as :meth:`LatencyConstraint.learn`: later predictions of the constraint and its spaces use the measurement."""
        self.constraint.learn(self.graph_of(candidate), measured_s, peak_memory_bytes=peak_memory_bytes)

    def graph_of(self, candidate: Mapping[str, int]) -> OpGraph:
        """The operators of one inference of ``candidate``."""
        computed, _, traced = self._graphs.at(self._points([candidate]), lambda graph: graph)
        return traced[0] if computed is None else computed[0]

    def _predicted(self, points: npt.NDArray[np.int64]) -> list[Prediction]:
        computed, rows, found = self._graphs.at(points, self.constraint.predict)
        if computed is not None:
            found |= dict(zip(rows.tolist(), self.constraint.predict_all(computed), strict=True))
        return [found[row] for row in range(len(points))]

    def _traced(self, point: tuple[int, ...]) -> OpGraph:
        named = dict(zip(self.widths, point, strict=True))
        words = ", ".join(f"{name}={value}" for name, value in named.items())
        model = _built(self._build, named, words)
        try:
            return self.constraint.graph_of(model)
        except WorkloadError as error:
            kind = WorkloadError if isinstance(error, OnnxError) else type(error)  # that one is made of other things than a text
            raise kind(f"build({words}) cannot be traced: {error}") from error

    def _points(self, candidates: Sequence[Mapping[str, int]] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Shape: (n, K)."""
        if isinstance(candidates, Mapping):
            raise ConfigurationError("Give a list of candidates, such as verdicts([{...}, {...}]); one alone is space({...}).")
        rows = [self._row(candidate) for candidate in candidates]
        for row in rows:
            self._check(row)
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(self.widths))

    def _row(self, candidate: Mapping[str, int] | npt.NDArray[Any]) -> list[int]:
        if isinstance(candidate, np.ndarray) and candidate.shape == (len(self.widths),):
            return list(candidate.tolist())
        if not isinstance(candidate, Mapping):
            raise ConfigurationError(f"A candidate must be widths by name, or a row of an array, but got {candidate!r}.")
        if candidate.keys() != self.widths.keys():
            unknown, missing = sorted(map(str, candidate.keys() - self.widths)), sorted(self.widths.keys() - candidate.keys())
            words = [f"there is no width {name!r}" for name in unknown] + [f"{name!r} is missing" for name in missing]
            wanted = ", ".join(self.widths)
            raise ConfigurationError(f"A candidate must give {wanted}; in {dict(candidate)!r} {', '.join(words)}.")
        return [candidate[name] for name in self.widths]

    def _check(self, row: list[Any]) -> None:
        for name, value, allowed in zip(self.widths, row, self._allowed, strict=True):
            if not _is_whole(value) or value not in allowed:
                raise ConfigurationError(f"{name}={value!r} is not among the values that were declared for {name!r}.")


def _built(build: Callable[..., Network], named: Mapping[str, int], words: str) -> Network:
    """Build the network on the meta device if that works, else on the default device."""
    import torch

    from perfguard.graph import OpGraph

    with random_numbers_kept():
        try:
            with torch.device("meta"):
                model = build(**named)
        except Exception:  # some things cannot be built without memory
            try:
                model = build(**named)
            except Exception as error:
                raise BuildError(f"build({words}) raised {type(error).__name__}: {error}") from error
    if not isinstance(model, (torch.nn.Module, Workload, OpGraph, str, os.PathLike)):
        raise BuildError(f"build({words}) must return a module, a Workload or a graph, but returned {type(model).__name__}.")
    return model


def _checked(widths: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    if not isinstance(widths, Mapping) or not widths or len(widths) > _MOST_WIDTHS:
        raise ConfigurationError(f"Give 1 to {_MOST_WIDTHS} widths by name, for instance widths={{'stem': range(8, 65)}}.")
    found: dict[str, tuple[int, ...]] = {}
    for name, values in widths.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigurationError(f"A width is named as an argument of build, but got {name!r}.")
        if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
            raise ConfigurationError(f"The values of {name!r} must be whole numbers such as range(8, 65), but got {values!r}.")
        given = list(values)
        wrong = [value for value in given if not _is_whole(value) or not 0 <= value <= _LARGEST_WIDTH]
        if wrong or not given:
            what = f"{wrong[0]!r} is among them" if wrong else "there are none"
            raise ConfigurationError(f"The values of {name!r} must be whole numbers from 0 to {_LARGEST_WIDTH}; {what}.")
        found[name] = tuple(sorted({int(value) for value in given}))
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


__all__ = ["ElasticSpace"]

"""A judge for `perfguard check`: the guard's judging, without a log and without a risk budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from perfguard.judge import Judge

if TYPE_CHECKING:
    from perfguard.budget import Limit
    from perfguard.cli._subject import Subject
    from perfguard.graph import OpGraph, TraceCache
    from perfguard.predictor import Prediction
    from perfguard.verdict import Verdict


class SubjectJudge(Judge):
    """Judges subjects on one device. The arguments are those of :class:`perfguard.judge.Judge`."""

    def judge(self, make_subject: Callable[[], Subject], traces: TraceCache | None) -> Verdict:
        """Return "launch" if each limit holds with the chance 1 - risk, else "prune". Nothing is logged.

        Args:
            make_subject: makes what is judged. It may raise, for instance a TooLargeError, which is a verdict.
            traces: earlier traces. None: it is traced, so that the names that it reads are known.
        """
        steps: int | None = None

        def trace() -> OpGraph:
            nonlocal steps
            subject = make_subject()
            steps = subject.steps
            return subject.graph_on(self.device, traces=traces)

        def predict(graph: OpGraph) -> Prediction:
            return self._predict(graph, steps=steps)

        def limits(prediction: Prediction) -> Iterator[Limit]:
            return self.budget.limits(prediction, self.device)

        return self._judge_graph(trace, predict, limits, accepted=self.risk)

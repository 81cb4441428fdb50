"""The papers' predictors as the papers judge them: one card, runs drawn at random, and families that were never seen.

    python benchmarks/papers.py TABLE... --cache .perfguard-cache --epochs 30 --most-rows 900

A paper judges its predictor on runs of one card that were drawn at random, of networks whose other batches it has learnt. Here
each predictor learns from the same runs, and so does GuardNet's learner of that quantity. The last column has the paper's own
figure, from its own runs. Errors are |predicted / measured - 1|.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _record import parser_of, show

from perfguard_research.dataset import Run, dataset_of, folds
from perfguard_research.leaderboard import error_of
from perfguard_research.learners import labels_of, learner_class
from perfguard_research.papers.graph_learner import GraphLearner
from perfguard_research.tables import MeasuredRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A quantity of the runs of one source on one card.

    Attributes:
        words: what is asked, for the table.
        source, gpu, mode: of the runs, none of which is compiled.
        target: "memory" or "time".
        papers: by predictor, the mean error that its paper gives. GuardNet's learners have none.
    """

    words: str
    source: str
    gpu: str
    mode: str
    target: str
    papers: dict[str, str]

    def unwanted(self, row: MeasuredRow) -> str:
        """Why ``row`` is not asked for; empty: it is."""
        labels = {"memory": row.memory_bytes, "time": row.step_time_s}
        asked = (self.source, self.gpu, self.mode)
        is_asked = (row.source, row.gpu, row.mode) == asked and not row.compiled and row.status == "ok"
        return "" if is_asked and labels[self.target] is not None else "not asked for"


QUESTIONS = (
    Question(
        words="memory of training, GPUMemNet's networks, A100",
        source="gpumemnet",
        gpu="a100-pcie-40gb",
        mode="train",
        target="memory",
        # DNNPerf, table IV; DNNAbacus, abstract; PerfSeer, table 3
        papers={"dnnperf": "13.7%", "dnnabacus": "2.8%", "perfseer": "2.5%; of 1,000 runs 5.5%", "memory-forest": "-"},
    ),
    Question(
        words="time of training, timm's networks, RTX 3090",
        source="timm-benchmark",
        gpu="rtx3090",
        mode="train",
        target="time",
        papers={"dnnperf": "7.4%", "dnnabacus": "0.9%", "perfseer": "6.7%; of 1,000 runs 15.7%", "step-time": "-"},
    ),
    Question(
        words="time of inference, timm's networks, RTX 4090",
        source="timm-benchmark",
        gpu="rtx4090",
        mode="infer",
        target="time",
        # DIPPM, section 4.2; LILOU, abstract; PerfSeer, table 3
        papers={"dippm": "1.9%", "lilou": "8.7%", "perfseer": "8.9%; of 1,000 runs 28.2%", "step-time": "-"},
    ),
)


def runs_of(question: Question, name: str, tables: Sequence[Path], *, cache: Path, most_rows: int) -> list[Run]:
    """The runs that are asked for, as the predictor ``name`` reads them."""
    views = learner_class(name).views
    return dataset_of(tables, views, cache=cache, most_runs=most_rows, unwanted=question.unwanted).runs


def error_on(split: str, question: Question, name: str, runs: Sequence[Run], settings: dict[str, Any]) -> tuple[float, float]:
    """Mean and median error of a predictor on one fold, after it has learnt from the others."""
    fold = folds(runs, split)[0]
    learner = learner_class(name)(**settings)
    learner.fit([runs[at] for at in fold.learn])
    judged = [runs[at] for at in fold.judge]
    predicted = learner.predict(judged)[question.target]
    errors = list(map(functools.partial(error_of, question.target), predicted, labels_of(judged, question.target)))
    return statistics.fmean(errors), statistics.median(errors)


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--epochs", type=int, default=30, help="of the graph networks")
    parser.add_argument("--most-rows", type=int, default=900, help="of each question, whole networks")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    lines = []
    for question in QUESTIONS:
        for name, figure in question.papers.items():
            runs = runs_of(question, name, arguments.tables, cache=arguments.cache, most_rows=arguments.most_rows)
            is_graph_network = issubclass(learner_class(name), GraphLearner)
            cells = []
            for split in ("random", "family"):
                found = []
                for seed in range(arguments.seeds):
                    settings = {"seed": seed} | ({"epochs": arguments.epochs} if is_graph_network else {})
                    found.append(error_on(split, question, name, runs, settings))
                means, medians = zip(*found, strict=True)
                spread = f" ± {np.std(means):.1%}" if len(means) > 1 else ""
                cells.append(f"{statistics.fmean(means):.1%}{spread} / {statistics.fmean(medians):.1%}")
            print(question.words, name, len(runs), *cells, flush=True)
            lines.append([question.words, name, f"{len(runs):,}", *cells, figure])
    columns = ["quantity", "predictor", "runs", "at random, mean / median", "families never seen", "its paper"]
    show("papers", columns, lines, record=arguments.record)


if __name__ == "__main__":
    main()

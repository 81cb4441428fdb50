"""Why a guard that saves time may find no more on a table: how many trials repeat a configuration that has run to its end.

    python benchmarks/search_repeats.py TABLE... --cache .perfguard-cache --seeds 10

The studies are those of `benchmarks/search_quality.py` with a budget of time. A space there has a few hundred configurations and
no continuous parameter, so a sampler proposes its best ones again, and a trial that repeats one shows nothing new. "If repeats
took no time" is the same study where a configuration that has run to its end is answered at once, by all policies alike.

"Above the best" compares with the best configuration of the space, in percent of the range of losses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from _record import parser_of, show
from _table_spaces import Space, spaces_of
from search_quality import Outcome, Study, run_study

from perfguard_research.leaderboard import predictions

_POLICIES = {"none": "no guard", "guarded": "guarded", "oracle": "oracle"}


def above_best(space: Space, outcome: Outcome) -> float:
    """Best loss of a study less that of the space, as a share of the range of losses."""
    return (min(outcome.best_by(math.inf), max(space.losses)) - min(space.losses)) / space.loss_range


def cells(space: Space, paid: Sequence[Outcome], free: Sequence[Outcome], unguarded: Sequence[float]) -> list[str]:
    """What studies that differ by the seed came to, beside those without a guard whose repeats took no time."""
    num_finished = sum(one.launched - one.failed for one in paid)
    above = [above_best(space, one) for one in free]
    is_no_worse = [own <= other + 1e-9 for own, other in zip(above, unguarded, strict=True)]
    return [
        f"{num_finished / len(paid):.0f}",
        f"{1 - sum(len(one.finished) for one in paid) / num_finished:.0%}",
        f"{statistics.fmean(above_best(space, one) for one in paid):.1%}",
        f"{statistics.fmean(len(one.finished) for one in free):.0f}",
        f"{statistics.fmean(above):.1%}",
        f"{sum(is_no_worse)} of {len(above)}",
    ]


def main() -> None:
    """Run the studies, and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=50, help="time of each study, in mean trials that fit")
    parser.add_argument("--costs", type=float, nargs="+", default=[0.5], help="what a failure costs, in trials")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most-operators", type=int, default=60_000)
    arguments = parser.parse_args()
    runs, found = predictions(
        arguments.tables, {"memory-forest": {}, "trees": {}}, ["family"], cache=arguments.cache, jobs=arguments.jobs,
        most_operators=arguments.most_operators,
    )  # fmt: skip
    _, of_time, _ = spaces_of(runs, found["family", "memory-forest"], found["family", "trees"])
    rows = []
    for space in of_time:
        for cost in arguments.costs:
            unguarded: list[float] = []
            for policy, called in _POLICIES.items():
                works = [Study(space, policy, seed, cost) for seed in range(arguments.seeds)]
                paid = [run_study(work, arguments.trials)[1] for work in works]
                free = [run_study(replace(work, has_free_repeats=True), arguments.trials)[1] for work in works]
                unguarded = unguarded or [above_best(space, one) for one in free]
                rows.append([space.name, f"{cost:g} of a trial", called, *cells(space, paid, free, unguarded)])
    columns = [
        "space", "a failure costs", "policy", "trials that ended well", "of them repeats", "above the best",
        "if repeats took no time: configurations", "above the best then", "no worse than no guard then",
    ]  # fmt: skip
    show("search-repeats", columns, rows, record=arguments.record)


if __name__ == "__main__":
    main()

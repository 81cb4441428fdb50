"""Fill the tables of results in docs: python tools/results.py, or with --check to list what is wrong and to change nothing.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. It comes from docs/results/data/NAME.json, which a benchmark
writes with `--record docs/results/data`, or from the JSON beside shipped weights.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "results"
MODELS = ROOT / "models"
PAPERS = ("dippm", "dnnabacus", "dnnperf", "lilou", "perfseer")
"""The papers' predictors with weights and cards."""
ELSEWHERE = (
    ROOT / "docs" / "predictors.md",
    ROOT / "docs" / "howto" / "out-of-memory.md",
    MODELS / "perfguard_models" / "cards" / "step-time.md",
    MODELS / "perfguard_models" / "cards" / "cpu-memory-forest.md",
    *(MODELS / "perfguard_research" / "cards" / f"{name}.md" for name in PAPERS),
)
"""Pages with tables of results among others."""
WRITTEN_WHOLE = ("leaderboard.md",)
"""Pages that a command writes: `perfguard leaderboard --out`."""
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table = Mapping[str, Any]
"""Columns, rows, and where they come from: date, machine, command, and "transferred" if a page had them before there was JSON."""

_NEWEST = "facebookresearch/ huggingface/transformers lamikr/"
_USES = {
    "small batches of vision networks, 16 cards (pytorch-gpu-benchmark)": "aisensiy/ MatrixSP/ ryujaehun/",
    "training at large batches (Lambda, kai271828, XHMY, FlagPerf, Gavel)": "lambdal/ kai271828/ XHMY/ FlagOpen/ stanford-",
    "BERT and ResNet, training and inference (NVIDIA)": "NVIDIA/",
    "MIG slices of an A100 (MIGProfiler)": "MLSysOps/",
    "a plain language model in many sizes, 8 cards (students of CS336)": (
        "yyin-dev/ damek/ aimetrics/ LINYUNLinYun/ luke396/ TobinZuo/ CTKnight/ EnzoDing-rgb/"
    ),
    "fine-tuning through a trainer (optimum)": "huggingface/optimum",
    "small batches on a TITAN RTX and a V100, transformers on GeForce cards (lamikr, pycls, Transformers)": _NEWEST,
    "transformers in float32 (NeuSight)": "transformers",
    "float16 inference, RTX 3090 (timm)": "rtx3090_infer",
    "float16 inference, RTX 4090, half of it compiled (timm)": "rtx4090_infer",
    "float16 training, RTX 3090 (timm)": "rtx3090_train",
    "compiled float16 inference, RTX 5090 (timm)": "rtx5090_infer",
}
"""What people do, with the beginnings of the names of its groups of runs. Spaces are written as underscores."""
_SPLITS = {"family": "family never seen", "source": "source never seen", "gpu": "card never seen"}
_COMPILERS = {"all": "all", "inductor-cpu": "Inductor, CPU", "inductor-cuda": "Inductor, GPU", "onnxruntime": "ONNX Runtime, CPU"}


def step_times() -> Table:
    """Return the errors of step times by what people do, over all runs, and with all sources alike."""
    card = _weights("perfguard_models", "step-time")
    of_steps = (error for error in card["errors"] if not _operators_in(error["group"]) and not _is_cpu(error["group"]))
    errors = [error for error in of_steps if error["quantity"] == "time"]
    groups = {use: [error for error in errors if _use_of(error["group"]) == use] for use in [*_USES, "others"]}
    rows = [[use, *_cells(own)] for use, own in groups.items() if own]
    rows.append(["**all runs**", *_cells(errors)])
    rows.append(["**all sources alike**", "", *_alike(errors)])
    known = [error for error in errors if not error["group"].startswith(tuple(_NEWEST.split()))]
    rows.append(["all sources but the three that came last", "", *_alike(known)])
    return _of(card, ["what people do", "runs", *_SPLITS.values()], rows)


def _alike(errors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The mean error of each split with all sources alike."""
    for split in _SPLITS:
        means = _by_source(errors, split)
        yield _share(statistics.fmean(means) if means else None)


def cpus() -> Table:
    """Return the errors on a CPU, of families that were held out."""
    cards = [_weights("perfguard_models", name) for name in ("step-time", "cpu-memory-forest")]
    rows = []
    for group in sorted({error["group"] for error in cards[0]["errors"] if _is_cpu(error["group"])}):
        found = [error for card in cards for error in card["errors"] if error["group"] == group]
        cells = (f"{_share(e['mean'])} / {_share(e['median'])}; {_share(e['coverage'], digits=0)}" for e in found)
        rows.append([group.removeprefix("cpu "), str(found[0]["rows"]), *cells])
    return _of(cards[0], ["setting", "runs", "step time", "memory"], rows)


def operators() -> Table:
    """Return the errors of single operators, by who measured them and on which card."""
    card = _weights("perfguard_models", "step-time")
    columns = ["single operators of", "card", "rows", "model never seen", "source never seen", "card never seen"]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for error in card["errors"]:
        if error["quantity"] == "time" and (name := _operators_in(error["group"])):
            found.setdefault(name, []).append(error)
    rows = [[*name.rsplit(" ", 1), *_cells(own)] for name, own in sorted(found.items())]
    return _of(card, columns, rows)


def _operators_in(group: str) -> str:
    """The source and the card of a group of single operators. Empty: it is a group of steps."""
    return group.removeprefix("operators of ") if group.startswith("operators of ") else ""


def _is_cpu(group: str) -> bool:
    return group.startswith("cpu ")


def _use_of(group: str) -> str:
    return next((use for use, starts in _USES.items() if group.replace(" ", "_").startswith(tuple(starts.split()))), "others")


def _cells(errors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_split = {split: [error for error in errors if error["split"] == split] for split in _SPLITS}
    yield f"{max(sum(error['rows'] for error in own) for own in by_split.values()):,}"
    for own in by_split.values():
        yield f"{_share(_weighted(own, 'mean'))}; {_share(_weighted(own, 'coverage'), digits=0)}" if own else "-"


def _weighted(errors: Sequence[Mapping[str, Any]], what: str) -> float | None:
    known = [error for error in errors if error[what] is not None]
    rows = sum(error["rows"] for error in known)
    return sum(error[what] * error["rows"] for error in known) / rows if rows else None


def _by_source(errors: Sequence[Mapping[str, Any]], split: str) -> list[float]:
    """Return the mean error of each source. The groups of timm's runs and of NeuSight's are one source each."""
    sources: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        if error["split"] == split:
            source = error["group"] if "/" in error["group"] else error["group"][:3]
            sources.setdefault(source, []).append(error)
    return [mean for own in sources.values() if (mean := _weighted(own, "mean")) is not None]


def errors_of(name: str, package: str = "perfguard_models") -> Table:
    """Return the errors of the weights ``name`` by what was left out and by group of runs."""
    card = _weights(package, name)
    columns = [
        "left out",
        "runs",
        "quantity",
        "rows",
        "error, mean ± spread over folds / median",
        "inside the 90% interval",
        "median width",
    ]
    rows = [
        [
            _SPLITS[error["split"]], error["group"], error["quantity"], f"{error['rows']:,}",
            f"{_share(error['mean'])} ± {_share(error['spread'])} / {_share(error['median'])}",
            _share(error["coverage"]), _share(error["width"], digits=0),
        ]
        for error in card["errors"]
    ]  # fmt: skip
    return _of(card, columns, rows)


def rows_of(name: str, package: str = "perfguard_models") -> Table:
    """Return what the weights ``name`` have learnt from."""
    card = _weights(package, name)
    found: dict[str, dict[str, int]] = {}
    for group, number in card["rows"].items():
        table, source, device, mode = group.split()
        found.setdefault(f"{table} {source} {mode}", {})[device] = number
    rows = [
        [group, f"{sum(by_device.values()):,}", ", ".join(f"{device} {number:,}" for device, number in by_device.items())]
        for group, by_device in found.items()
    ]
    return _of(card, ["kind of table, source, mode", "rows", "by device"], rows)


def memory_fits() -> Table:
    """Return how well it is known what fits, on families that were left out."""
    card = _weights("perfguard_models", "memory-forest")
    columns = ["runs, family never seen", "failed", "caught", "fitting", "pruned", "pairs of batches", "balanced accuracy"]
    rows = []
    for fit in card["fits"]:
        if fit["split"] == "family":
            failed, fitting, pairs = (f"{fit[name]:,}" for name in ("failed", "fitting", "pairs"))
            caught, pruned = (f"{_share(fit[name])}; {_share(fit[f'{name}_at_risk'])}" for name in ("caught", "pruned"))
            rows.append([fit["group"], failed, caught, fitting, pruned, pairs, _share(fit["balanced"])])
    return _of(card, columns, rows)


def fusion_labels() -> Table:
    """Return how many edges each compiler labelled."""
    card = _weights("perfguard_research", "fusion")
    counts = ["graphs", "families", "edges", "fused", "not known"]
    return _of(
        card,
        ["compiler", *counts],
        [[_COMPILERS[name], *(f"{row[count]:,}" for count in counts)] for name, row in card["rows"].items()],
        command="python -m perfguard_research.fusion.labels --out FILE.jsonl --compiler NAME",
    )


def fusion_edges() -> Table:
    """Return the scores of the methods that say which edges are fused."""
    card = _weights("perfguard_research", "fusion")
    shares = ["precision", "recall", "accuracy"]
    return _of(
        card,
        ["method", "compiler", *shares],
        [
            [method, _COMPILERS[name], *(_share(score[share]) for share in shares)]
            for method, by in card["scores"].items()
            for name, score in by.items()
        ],
        command="python -m perfguard_research.fusion.train LABELS... --out DIR",
    )


def fusion_kernels() -> Table:
    """Return the scores of the choice of a kernel and of its latency."""
    card = _weights("perfguard_research", "kernels")
    rows = [
        [split, name, f"{score['rows']:,}", _share(score["top1"]), _share(score["top5"]), _share(score["mean_error"]),
         _share(score["median_error"])]
        for split, by in card["scores"].items()
        for name, score in by.items()
    ]  # fmt: skip
    columns = ["never seen", "operators", "rows", "top-1", "top-5", "latency, mean error", "median error"]
    return _of(card, columns, rows, command="python -m perfguard_research.fusion.kernels OPERATORS.csv.gz --out DIR")


DERIVED: dict[str, Callable[[], Table]] = {
    "step-times": step_times,
    "operators": operators,
    "cpus": cpus,
    "cpu-memory-errors": functools.partial(errors_of, "cpu-memory-forest"),
    "memory-errors": functools.partial(errors_of, "memory-forest"),
    "step-time-errors": functools.partial(errors_of, "step-time"),
    "step-time-rows": functools.partial(rows_of, "step-time"),
    "memory-fits": memory_fits,
    "fusion-labels": fusion_labels,
    "fusion-edges": fusion_edges,
    "fusion-kernels": fusion_kernels,
    **{f"{name}-errors": functools.partial(errors_of, name, "perfguard_research") for name in PAPERS},
    **{f"{name}-rows": functools.partial(rows_of, name, "perfguard_research") for name in PAPERS},
}
"""Tables made from the JSON beside shipped weights."""


def _weights(package: str, name: str) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((MODELS / package / "weights" / f"{name}.json").read_text(encoding="utf-8"))
    return card


def _of(card: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]], *, command: str = "") -> Table:
    date, _, machine = card["made"].partition(", ")
    return {"date": date, "machine": machine, "command": command or card["command"], "columns": columns, "rows": rows}


def _share(value: float | None, *, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def table_of(name: str) -> Table:
    """Return the table ``name``.

    Raises:
        SystemExit: if there is no such table.
    """
    if name in DERIVED:
        return DERIVED[name]()
    path = PAGES / "data" / f"{name}.json"
    if not path.is_file():
        sys.exit(f"There is no {path.relative_to(ROOT)}. Run the benchmark that makes the table with --record docs/results/data.")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def markdown(table: Table) -> str:
    """Return the table as Markdown, below a line that says when, where and how it was made."""
    columns, rows = table["columns"], table["rows"]
    if any(len(row) != len(columns) for row in rows):
        sys.exit(f"A row of {table.get('name', columns[0])} has another number of cells than the {len(columns)} columns.")
    dashes = [":---" if any(re.match(r"[*`]*[A-Za-z]", row[at]) for row in rows) else "---:" for at in range(len(columns))]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, dashes, *rows)]
    old = f" Figures transferred {table['transferred']}." if "transferred" in table else ""
    return f"{table['date']}, {table['machine']}: `{table['command']}`.{old}\n\n" + "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """Return a page with its tables as the JSON has them."""
    return _MARKED.sub(lambda match: match[1] + markdown(table_of(match[2])) + match[3], text)


def problems(folder: Path = PAGES) -> Iterator[str]:
    """Yield what is wrong: pages that differ from the JSON, tables that somebody typed, JSON that no page shows."""
    shown: set[str] = set()
    for page in [*sorted(set(folder.glob("*.md")) - {folder / name for name in WRITTEN_WHOLE}), *ELSEWHERE]:
        text = page.read_text(encoding="utf-8")
        shown |= {match[2] for match in _MARKED.finditer(text)}
        if filled(text) != text:
            yield f"{page.name} is not what the JSON gives. Run: python tools/results.py"
        for line in re.findall(r"^\|.*", _MARKED.sub("", text), re.MULTILINE) if page not in ELSEWHERE else ():
            yield f"{page.name} has a table outside of the markers: {line}"
    for name in sorted(({path.stem for path in (folder / "data").glob("*.json")} | {*DERIVED}) - shown):
        yield f"No page shows the table {name}."


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(problems()) or 0)
    for path in [*sorted(PAGES.glob("*.md")), *ELSEWHERE]:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")

"""The commands `perfguard evaluate`, `collect`, `train` and `leaderboard`: words in, files and tables out."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from perfguard.exceptions import ConfigurationError
from perfguard.quantities import parse_bytes
from perfguard_research.learners import NAMES, learner_class

_SPLITS = ("family", "source", "gpu", "random")


def evaluate(words: Sequence[str]) -> None:
    """Compare a predictor with a table of measured runs, row by row."""
    from perfguard.predictor import DEFAULT_PREDICTOR, load_predictor
    from perfguard_research.csv_rows import read_table
    from perfguard_research.evaluate import as_table, evaluate, report, with_predictions

    parser = argparse.ArgumentParser(prog="perfguard evaluate", description="Compare a predictor with a table of measured runs.")
    parser.add_argument("table", metavar="TABLE", type=Path, help="a table of measured runs: CSV, compressed or not")
    parser.add_argument("--predictor", default=DEFAULT_PREDICTOR, help=f"name of the predictor (default: {DEFAULT_PREDICTOR})")
    parser.add_argument("--out", metavar="FILE.csv", type=Path, help="write the table with the predictions")
    parser.add_argument("--json", metavar="FILE.json", type=Path, help="write the report as JSON")
    arguments = parser.parse_args(words)
    columns, rows = read_table(arguments.table)
    for path in filter(None, (arguments.out, arguments.json)):
        _write(path, "")  # a wrong path is better known before an hour of work
    predictor = load_predictor(arguments.predictor)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)  # 160: no column needs a line break
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' words on each of a thousand models
        results = evaluate(columns, rows, arguments.table, predictor)
    groups = report(results)
    if arguments.out:
        _write(arguments.out, with_predictions(columns, rows, results))
    if arguments.json:
        document = {"predictor": predictor.name, "table": arguments.table.name, "groups": groups}
        _write(arguments.json, json.dumps(document, indent=2) + "\n")
    console.print(as_table(predictor.name, groups))
    errors = [result.error for result in results if result.error]
    if errors:
        console.print(f"{len(errors)} of {len(results)} rows could not be predicted; the first: {errors[0]}", markup=False)


def collect(words: Sequence[str]) -> None:
    """Run small networks on this machine and write a table of the measurements."""
    from perfguard_research.collect.loop import collect, collecting_device
    from perfguard_research.collect.spaces import SPACES

    parser = argparse.ArgumentParser(prog="perfguard collect", description="Run small networks here and write down their cost.")
    parser.add_argument("--out", required=True, type=Path, metavar="ROWS.csv", help="the table to write")
    parser.add_argument("--gpu", default="auto", help='"auto", the name of the GPU of this machine, or "cpu" (default: auto)')
    parser.add_argument("--space", default=",".join(SPACES), help=f"of {', '.join(SPACES)}, comma-separated (default: all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no new configuration after so many minutes")
    parser.add_argument("--rows", type=float, default=math.inf, help="stop after so many rows of this session")
    parser.add_argument("--resume", action="store_true", help="continue an existing table")
    parser.add_argument("--memory-limit", metavar="16GiB", help="limit of a run (default: all of a card, 256MiB on a CPU)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the order of the configurations (default: 0)")
    arguments = parser.parse_args(words)
    names = _some_of(SPACES, "--space", arguments.space)
    for name in ("minutes", "rows"):
        if not getattr(arguments, name) > 0:
            raise ConfigurationError(f"--{name} must be positive, but is {getattr(arguments, name):g}.")
    limit = None if arguments.memory_limit is None else parse_bytes(arguments.memory_limit, what="--memory-limit")
    console = Console(stderr=True)
    with console.status("") as shown:
        report = collect(
            arguments.out,
            device=collecting_device(arguments.gpu),
            spaces=[space for space in SPACES if space in names],
            minutes=arguments.minutes,
            max_rows=arguments.rows,
            resume=arguments.resume,
            memory_limit=limit,
            seed=arguments.seed,
            on_row=lambda row: shown.update(f"{row['index']}: {row['space']} {row['model']}: {row['status']}"),
        )
    print_line = functools.partial(console.print, markup=False, highlight=False)
    for (space, status), count in sorted(report.rows.items()):
        print_line(f"{space}: {count} x {status}")
    for reason, count in report.left_out.most_common(5):
        print_line(f"left out: {count} x {reason}")
    print_line(f"Ended because {report.ended_by}. The rows are in {arguments.out}.")


def train(words: Sequence[str]) -> None:
    """Train one predictor on tables, and write its weights and its card."""
    from perfguard_models.step_time import StepTime
    from perfguard_research.dataset import dataset_of, without_time
    from perfguard_research.train import train_and_write

    parser = argparse.ArgumentParser(prog="perfguard train", description="Train a predictor on tables of measured runs.")
    parser.add_argument("tables", metavar="TABLE", nargs="+", type=Path)
    parser.add_argument("--predictor", required=True, help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="DIR/PREDICTOR.safetensors and DIR/PREDICTOR.json")
    _add_common(parser, splits="family,source,gpu")
    arguments = parser.parse_args(words)
    splits = _some_of(_SPLITS, "--splits", arguments.splits)
    settings = _settings(arguments.set)
    try:
        learner = learner_class(arguments.predictor)(**settings)
    except TypeError as error:
        raise ConfigurationError(f"{arguments.predictor} does not take these settings: {error}") from error
    console = Console(stderr=True)
    with console.status(f"{arguments.predictor}: folds") as shown:
        # Tracing takes most of the time, and `step-time` learns times alone.
        unwanted = without_time if learner.name == StepTime.name else None
        dataset = dataset_of(arguments.tables, learner.views, unwanted=unwanted, **_reading(arguments))
        written = train_and_write(
            learner,
            settings,
            dataset,
            arguments.out,
            splits=splits,
            command=_command("train", words, arguments),
            cache=arguments.cache,
            jobs=arguments.jobs,
            on_epoch=lambda done, of, loss: shown.update(f"all rows: {done} of {of}, loss {loss:.4f}"),
        )
    console.print(written, markup=False, highlight=False)


def leaderboard(words: Sequence[str]) -> None:
    """Judge predictors on the same held-out runs, and print tables."""
    from perfguard_research.leaderboard import as_lists, as_markdown, entries, fit_scores, predictions

    parser = argparse.ArgumentParser(prog="perfguard leaderboard", description="Compare predictors on the same rows.")
    parser.add_argument("tables", metavar="TABLE", nargs="+", type=Path)
    parser.add_argument("--predictors", default=",".join(NAMES), help="names, comma-separated (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the tables, and FILE.json with the same data")
    _add_common(parser, splits="family")
    arguments = parser.parse_args(words)
    names = arguments.predictors.split(",")
    for name in names:
        learner_class(name)
    splits = _some_of(_SPLITS, "--splits", arguments.splits)
    settings = _settings(arguments.set)
    runs, found = predictions(arguments.tables, dict.fromkeys(names, settings), splits, **_reading(arguments))
    lines = entries(runs, found)
    scores = fit_scores(runs, found)
    modes = [(name, getattr(learner_class(name), "mode", "")) for name in names]
    scopes = " ".join(f"`{name}` predicts runs of mode {mode} alone." for name, mode in modes if mode)
    sources = ", ".join(f"{number:,} of {source}" for source, number in Counter(run.source for run in runs).most_common())
    head = (
        f"# Leaderboard\n\n    {_command('leaderboard', words, arguments)}\n\n"
        f"{len(runs):,} runs: {sources}. {time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}.\n\n"
        "Errors: mean ± spread over folds / median. Intervals: coverage / median width. What fits: failed runs caught / fitting "
        "runs pruned, by the median; the same at the guard's default risk; balanced accuracy on pairs of neighbouring batches. "
        f"{scopes}\n\n"
    )
    text = head + as_markdown(lines, scores, names)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
        arguments.out.with_suffix(".json").write_text(json.dumps(as_lists(lines, scores), indent=1) + "\n", encoding="utf-8")
    print(text)


def _command(name: str, words: Sequence[str], arguments: argparse.Namespace) -> str:
    """Command line that repeats the run, without the paths of tables, cache and results."""
    said = " ".join(["perfguard", name, *["TABLE"] * len(arguments.tables)])
    for option, value in itertools.pairwise(words):
        if option in ("--predictor", "--predictors", "--splits", "--most-runs", "--most-operators", "--set"):
            said += f" {option} {value}"
    return said


def _add_common(parser: argparse.ArgumentParser, *, splits: str) -> None:
    parser.add_argument("--splits", default=splits, help=f"any of {', '.join(_SPLITS)}, comma-separated (default: {splits})")
    parser.add_argument("--cache", type=Path, default=Path(".perfguard-cache"), help="folder for graphs and finished folds")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--most-runs", type=int, help="most rows of each other table, drawn by network (default: all)")
    parser.add_argument("--most-operators", type=int, default=60_000, help="most rows of an operator table (default: 60000)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the predictor; repeatable")


def _some_of(known: Sequence[str], option: str, words: str) -> list[str]:
    names = [name.strip() for name in words.split(",")]
    if unknown := sorted(set(names) - set(known)):
        raise ConfigurationError(f"{option} takes {', '.join(known)}, with commas between them, not {', '.join(unknown)}.")
    return names


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    """How the tables are read."""
    return {name: getattr(arguments, name) for name in ("cache", "jobs", "most_operators", "most_runs")}


def _settings(words: Sequence[str]) -> dict[str, Any]:
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigurationError(f"--set takes NAME=VALUE, not {word!r}.")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"The result cannot be written to {str(path)!r}: {error}") from error

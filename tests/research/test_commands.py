"""`perfguard train`, `leaderboard` and `evaluate` from end to end, on a table of runs and one of single operators."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from perfguard.cli import main
from perfguard.devices import resolve_device
from perfguard.graph import TraceCache, work_s
from perfguard_models import guardnet
from perfguard_research.csv_rows import read_table
from perfguard_research.dataset import Fold, drawn
from perfguard_research.leaderboard import as_markdown, entries, fit_scores
from perfguard_research.tables import parser_of
from tests.rows import run_on, step_on, write

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
GPUS = ("t4", "p4", "v100-pcie-32gb")
RUN = {
    "model": "cs336:BasicsTransformerLM", "mode": "train", "num_gpus": "1", "parallel": "none", "input": '{"seq_len": 16}',
    "memory_kind": "unknown", "precision": "fp32", "optimizer": "sgd", "peak_memory_mib": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices that are added at three quarters of the card's bandwidth."""
    random = np.random.default_rng(0)
    rows = []
    for gpu in GPUS:
        for op in ("add", "relu"):
            for _ in range(40):
                b, h = (int(2**size) for size in random.uniform(9, 13, size=2))
                traffic = (3 if op == "add" else 2) * 4 * b * h
                ms = traffic / (0.75 * resolve_device(gpu).bandwidth_bytes_per_s) * 1e3
                rows.append({"op": op, "gpu": gpu, "latency_ms": f"{ms:.6f}", "kernel": "", "b": str(b), "h": str(h)})
    rows.append({"op": "add", "gpu": "t4", "latency_ms": "-1", "kernel": "", "b": "8", "h": "8"})
    return write(tmp_path_factory.mktemp("table") / "operators.csv", rows)


@pytest.fixture(scope="module")
def table_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Language models that the host launches in 30 microseconds an operator, and the device computes at half its peak rates."""
    rows = []
    for layers in (1, 2, 3):
        config = json.dumps(
            {"vocab_size": 100, "d_model": 512, "d_ff": 2048, "num_heads": 4, "num_layers": layers, "context_length": 16}
        )
        for gpu in GPUS:
            cache = TraceCache()
            for at, batch in enumerate((4, 8, 16, 32, 64, 96, 128, 256, 384, 512, 768, 1024)):
                raw = RUN | {"config": config, "family": f"layers-{layers}", "gpu": gpu, "batch_size": str(batch)}
                row, device = parser_of(list(raw), "runs.csv")(raw), resolve_device(gpu)
                graph = row.graph(row.make_model(), cache, device)
                seconds = max(30e-6 * len(graph.ops), 2 * float(np.maximum(*work_s(graph, device)).sum()))
                rows.append(raw | {"source": f"lab/{at % 2}", "step_time_ms": f"{1e3 * seconds:.6f}"})
    rows.append(rows[0] | {"step_time_ms": "-1"})
    rows.append(rows[0] | {"step_time_ms": "", "peak_memory_mib": "900", "memory_kind": "driver", "gpu": "a100"})
    return write(tmp_path_factory.mktemp("table") / "runs.csv", rows)


@pytest.fixture(scope="module")
def weights(table_of_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    words = ["train", str(table_of_runs), "--predictor", "step-time", "--out", str(folder), "--cache", str(folder / "cache")]
    settings = ["--set", "epochs=12", "--set", "hidden=16", "--jobs", "1"]
    assert main([*words, *settings]) == 0
    return folder / "step-time"


@pytest.mark.slow
def test_train_writes_a_card_and_evaluates(weights: Path, table_of_runs: Path) -> None:
    card = json.loads(weights.with_suffix(".json").read_text())
    # Of the A100 there is a row, but without a time.
    assert card["trained_devices"] == sorted(resolve_device(gpu).id for gpu in GPUS)
    assert sum(card["rows"].values()) == 108
    assert card["timed"] == sorted(f"{resolve_device(gpu).id} train fp32" for gpu in GPUS)
    assert card["left_out"].startswith("2 rows were left out: 1 x column 'step_time_ms'")
    assert {line["split"] for line in card["errors"]} == {"family", "source", "gpu"}
    assert {(line["group"], line["rows"]) for line in card["errors"]} == {("lab/0", 54), ("lab/1", 54)}
    assert all(line["mean"] < 0.3 for line in card["errors"])
    assert any("new gpu" in name for name in card["calibration"]["scale"])

    net = guardnet.load(weights)
    from perfguard_research.evaluate import evaluate, report

    columns, rows = read_table(table_of_runs)
    results = evaluate(columns, rows, table_of_runs, net)
    (errors,) = [result.error for result in results if result.error]
    assert "step_time_ms" in errors
    groups = report(results)
    assert all(group["time"]["mean"] < 0.2 for group in groups if group["time"])
    assert sum(bool(group["time"]) for group in groups) == 6  # three cards, two sources


def test_a_sample_has_whole_networks_and_is_drawn_alike(table_of_runs: Path) -> None:
    columns, raw = read_table(table_of_runs)
    rows = [parser_of(columns, table_of_runs)(row) for row in raw if row["step_time_ms"] != "-1"]
    chosen = drawn(rows, 80)
    assert chosen == drawn(rows, 80)
    networks, every = (Counter(row.structure for row in some) for some in (chosen, rows))
    assert 0 < sum(networks.values()) <= 80
    assert all(every[network] == number for network, number in networks.items())
    assert drawn(rows, len(rows)) == drawn(rows, None) == rows


def test_training_without_folds_by_gpu_assumes_wide_intervals_there(table_of_runs: Path, tmp_path: Path) -> None:
    words = ["train", str(table_of_runs), "--predictor", "roofline", "--out", str(tmp_path), "--cache", str(tmp_path)]
    assert main([*words, "--splits", "family", "--most-runs", "80", "--jobs", "1"]) == 0
    card = json.loads((tmp_path / "roofline.json").read_text())
    assert {line["split"] for line in card["errors"]} == {"family"}
    assert card["calibration"]["scale"]["time/new gpu"] == 4 * card["calibration"]["scale"]["time"]
    assert card["command"] == "perfguard train TABLE --predictor roofline --splits family --most-runs 80"


def test_a_leaderboard_is_written_and_found_again(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "board.md"
    words = ["leaderboard", str(table), "--predictors", "roofline", "--splits", "family,gpu", "--jobs", "1"]
    words += ["--cache", str(tmp_path / "cache"), "--out", str(out)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.strip() == out.read_text().strip()
    assert "### time, split by gpu" in text
    assert "| operators of operators t4 | 80 |" in text
    lines = json.loads(out.with_suffix(".json").read_text())["errors"]
    by_name = {(line["split"], line["group"], line["predictor"]): line["mean"] for line in lines}
    of_t4 = "gpu", "operators of operators t4"
    assert by_name[(*of_t4, "roofline")] < 0.1

    from perfguard_research import leaderboard

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("fitted again")

    monkeypatch.setattr(leaderboard, "_fit_and_predict", fail)
    assert main(words) == 0


def test_what_fits_is_scored_by_the_predicted_median() -> None:
    runs = [run_on(step_on(), table="workload", batch_size=n, capacity_bytes=1000, fits=n < 4) for n in (1, 2, 4, 8)]
    predicted = {"memory": np.log([500.0, 1500.0, 900.0, 3000.0]), "time": np.full(4, np.nan)}
    predicted |= {"gpu_util": np.full(4, np.nan), "sm_active": np.full(4, np.nan)}
    predicted |= {"spread memory": np.zeros(4), "spread time": np.zeros(4)}
    found = {("family", "p"): [(Fold("all", [], [0, 1, 2, 3]), predicted)]}
    (score,) = (line for _, line in fit_scores(runs, found).iterrows())
    assert (score.failed, score.caught, score.fitting, score.pruned) == (2, 0.5, 2, 0.5)
    assert (score.pairs, score.balanced) == (1, 0.0)  # of the neighbours 2 and 4 both are said wrongly
    assert entries(runs, found).empty
    assert "50.0% / 50.0%; -; 0.0%" in as_markdown(entries(runs, found), fit_scores(runs, found), ["p"])


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["train", "T", "--predictor", "oracle", "--out", "O"], 1, "No predictor that can be trained is called 'oracle'"),
        (["train", "T", "--predictor", "trees", "--out", "O", "--set", "depth=3"], 2, "trees does not take these settings"),
        (["train", "T", "--predictor", "trees", "--out", "O", "--set", "depth"], 2, "--set takes NAME=VALUE"),
        (
            ["leaderboard", "T", "--splits", "colour"],
            2,
            "--splits takes family, source, gpu, random, with commas between them, not colour",
        ),
        (["leaderboard", "MISSING", "--predictors", "roofline"], 1, "MISSING"),
    ],
)
def test_wrong_words_are_explained(
    words: list[str], status: int, message: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = [{"T": str(table), "O": str(tmp_path)}.get(word, word) for word in words]
    assert main([*replaced, "--cache", str(tmp_path / "cache"), "--jobs", "1"]) == status
    assert message in capsys.readouterr().err


def test_train_refuses_too_few_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.csv"
    path.write_text("op,gpu,latency_ms,b,h\nadd,t4,1,2,3\nadd,t4,x,2,3\n")
    assert main(["train", str(path), "--predictor", "trees", "--out", str(tmp_path), "--cache", str(tmp_path)]) == 1
    kinds = "trees learns from tables of these kinds: workload, transformer, collected, run."
    assert f"0 rows are too few to learn from. {kinds} 1 rows were left out" in capsys.readouterr().err


def test_a_fit_that_is_near_a_constant_is_no_weights(
    table_of_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(table_of_runs), "--predictor", "dnnperf", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    settings = ["--set", "learning_rate=0", "--set", "epochs=1", "--set", "hidden=8"]
    assert main([*words, *settings, "--splits", "family", "--most-runs", "80", "--jobs", "1"]) == 1
    assert "dnnperf is near a constant: for its own 72 training rows" in capsys.readouterr().err
    assert not (tmp_path / "dnnperf.json").exists()

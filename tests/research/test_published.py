"""Published rows as a table of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from perfguard import load_predictor
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import evaluate
from perfguard_research.published import runs_of

_SIZES = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab": 100}


def row(**changes: object) -> dict[str, object]:
    return {
        "source": "someone", "gpu": "a100-80gb", "mode": "train", "precision": "amp-bf16", "batch": "4", "seq_or_image": "32",
        "config": json.dumps(_SIZES), "compiled": False, "step_ms": 12.5, "memory_bytes": None, "memory_kind": None,
        "status": "oom (error)", "note": None, "optimizer": "AdamW",
    } | changes  # fmt: skip


def test_rows_of_unknown_cards_and_modes_are_left_out() -> None:
    rows = [row(), row(gpu="?"), row(batch="see write_up.md"), row(mode="forward_backward or train: see script"),
            row(note="column small/bwd; may be the phase alone")]  # fmt: skip
    runs = runs_of(pd.DataFrame(rows))
    assert len(runs) == 1
    assert runs.iloc[0]["gpu"] == "a100-sxm-80gb"
    assert runs.iloc[0]["status"] == "oom"


def test_rows_that_contradict_others_of_their_author_are_left_out() -> None:
    of_damek = "damek/cs336-assignment2-systems"
    rows = [
        row(), row(step_ms=18.0), row(batch="8"), row(batch="8", step_ms=19.0), row(source="another", batch="8", step_ms=19.0),
        row(source=of_damek), row(source=of_damek, precision="fp32"), row(source=of_damek, precision="fp32", compiled=True),
    ]  # fmt: skip
    runs = runs_of(pd.DataFrame(rows))
    assert [*zip(runs["source"], runs["batch_size"], runs["precision"], strict=True)] == [
        ("someone", 4, "amp-bf16"), ("someone", 4, "amp-bf16"), ("another", 8, "amp-bf16"), (of_damek, 4, "fp32"),
    ]  # fmt: skip


def test_runs_can_be_evaluated(tmp_path: Path) -> None:
    runs_of(pd.DataFrame([row(status="ok", memory_bytes=2.0**30, memory_kind="allocated")])).to_csv(
        tmp_path / "runs.csv", index=False
    )
    columns, rows = read_table(tmp_path / "runs.csv")
    (found,) = evaluate(columns, rows, tmp_path / "runs.csv", load_predictor())
    assert found.prediction is not None
    assert found.row is not None
    assert (found.row.step_time_s, found.row.memory_bytes, found.row.optimizer) == (0.0125, 2.0**30, "adamw")

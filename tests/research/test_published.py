"""Published rows as a table of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from perfguard import load_predictor
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import evaluate
from perfguard_research.published import READERS, runs_of

_SIZES = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab": 100}


def row(**changes: object) -> dict[str, object]:
    return {
        "source": "someone", "gpu": "a100-80gb", "gpus": 1, "mode": "train", "precision": "amp-bf16", "batch": "4",
        "seq_or_image": "32",
        "config": json.dumps(_SIZES), "compiled": False, "step_ms": 12.5, "memory_bytes": None, "memory_kind": None,
        "status": "oom (error)", "note": None, "optimizer": "AdamW",
    } | changes  # fmt: skip


def read(name: str, rows: list[dict[str, object]]) -> pd.DataFrame:
    return runs_of(pd.DataFrame(rows), READERS[name])


def test_rows_of_unknown_cards_and_modes_are_left_out() -> None:
    rows = [row(), row(gpu="?"), row(gpus=8), row(batch="see write_up.md"), row(mode="forward_backward or train: see script"),
            row(note="column small/bwd; may be the phase alone")]  # fmt: skip
    runs = read("cs336_more", rows)
    assert len(runs) == 1
    assert runs.iloc[0]["gpu"] == "a100-sxm-80gb"
    assert runs.iloc[0]["status"] == "oom"


def test_rows_that_contradict_others_of_their_author_are_left_out() -> None:
    of_damek = "damek/cs336-assignment2-systems"
    rows = [
        row(), row(step_ms=18.0), row(batch="8"), row(batch="8", step_ms=19.0), row(source="another", batch="8", step_ms=19.0),
        row(source=of_damek), row(source=of_damek, precision="fp32"), row(source=of_damek, precision="fp32", compiled=True),
    ]  # fmt: skip
    runs = read("cs336_more", rows)
    assert [*zip(runs["source"], runs["batch_size"], runs["precision"], strict=True)] == [
        ("someone", 4, "amp-bf16"), ("someone", 4, "amp-bf16"), ("another", 8, "amp-bf16"), (of_damek, 4, "fp32"),
    ]  # fmt: skip


def test_runs_can_be_evaluated(tmp_path: Path) -> None:
    of_each = {
        "cs336_more": row(),
        "hfdocs": row(gpu="rtx2060", model="distilbert-base-uncased", mode="forward_backward", precision="fp16",
                      attention="sdpa", torch_version="2.3.1"),
        "lamikr": row(gpu="titan_rtx", model="torchvision:resnet18", mode="infer", precision="fp32 or tf32", batch="12 a GPU"),
        "pycls": row(gpu="v100-sxm-16gb", model="RegNetX-200MF", mode="infer", precision="fp32", seq_or_image=224),
    }  # fmt: skip
    measured = {"status": "ok", "memory_bytes": 2.0**30, "memory_kind": "allocated"}
    tables = [read(name, [one | measured]) for name, one in of_each.items()]
    pd.concat(tables).to_csv(tmp_path / "runs.csv", index=False)
    columns, rows = read_table(tmp_path / "runs.csv")
    results = evaluate(columns, rows, tmp_path / "runs.csv", load_predictor())
    found = [result.row for result in results if result.row is not None and result.prediction is not None]
    assert [(row.model, row.gpu, row.optimizer, row.copies_batch) for row in found] == [
        ("cs336:BasicsTransformerLM", "a100-sxm-80gb", "adamw", False),
        ("hf:DistilBertForMaskedLM", "rtx2060", "none", False),
        ("torchvision:resnet18", "titan-rtx", "none", True),
        ("timm:regnetx_002", "v100-sxm-16gb", "none", False),
    ]
    assert {(row.step_time_s, row.memory_bytes) for row in found} == {(0.0125, 2.0**30)}


def test_both_halves_of_an_autoencoder_are_read() -> None:
    common = {
        "gpu": "rtx3090",
        "model": "diffusers:AutoencoderKL SD1.5",
        "precision": "fp16 (check)",
        "batch": 1,
        "method": "plain",
    }
    rows = [row(**common, mode="infer encode", seq_or_image="64x64"), row(**common, mode="infer decode", seq_or_image="64x64"),
            row(**common | {"method": "tiled"}), row(**common | {"model": "diffusers:AutoencoderKL SDXL"})]  # fmt: skip
    runs = read("vae", rows)
    assert [*runs["model"]] == ["diffusers:AutoencoderKL.encode", "diffusers:AutoencoderKL.decode"]
    assert [*runs["input"]] == ['{"image": 64}', '{"latent": 8}']

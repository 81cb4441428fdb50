"""Published rows as a table of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from perfguard import load_predictor
from perfguard.graph import TraceCache
from perfguard_research.csv_rows import read_table
from perfguard_research.dataset import usable_rows
from perfguard_research.evaluate import evaluate
from perfguard_research.published import OPERATOR_READERS, READERS, main, runs_of

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


def of_lambda(**changes: object) -> dict[str, object]:
    return row(
        gpu="rtxa4000", model="torchvision:resnet50", seq_or_image='{"image": 224}', config="{}", workload="resnet50",
        data="syntetic", machine="A4000", torch_version="1.12.0a0", table_value=None,
    ) | changes  # fmt: skip


def test_of_lambdas_logs_those_with_real_images_and_those_of_the_tables_are_left_out() -> None:
    bert = of_lambda(workload="bert_base_squad", model="hf:BertForQuestionAnswering", seq_or_image='{"seq_len": 384}', data=None)
    rows = [of_lambda(), bert, of_lambda(data="dali-cpu"), of_lambda(table_value=100.0), of_lambda(workload="ncf")]
    runs = read("lambda_logs", rows)
    assert [*runs["model"]] == ["torchvision:resnet50", "hf:BertForQuestionAnswering"]
    assert [*runs["note"]] == ["results/A4000"] * 2  # tells machines apart


def operator(**changes: object) -> dict[str, object]:
    empty = dict.fromkeys(("m", "n", "k", "b", "seq", "heads", "kv_heads", "head_dim", "causal"))
    common = {"gpu": "h100-sxm-80gb", "dtype": "bfloat16", "source": "aic", "direction": "forward", "sample": "latency"}
    return common | empty | {"latency_ms": 0.5} | changes


def test_a_replayed_operator_that_the_cache_feeds_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product, attention = {"op": "linear", "n": 4096, "k": 4096}, {"op": "attention", "heads": 16, "kv_heads": 4, "head_dim": 128}
    rows = [
        operator(**product, m=8),  # 34 MB of weights are in the cache of 52 MB
        operator(**product, m=4096),  # bound by its arithmetic
        operator(**product | {"n": 16384}, m=8),
        operator(**attention, b=2, seq=2048, causal=False),
        operator(**attention, b=2, seq=2048, causal=True),
        operator(**product, m=4096, sample="power"),
    ]
    kept = OPERATOR_READERS["aic_operators"](pd.DataFrame(rows))
    assert [*kept.index] == [1, 2, 3]
    pd.DataFrame(rows).to_csv(tmp_path / "aic_operators.csv", index=False)
    written = tmp_path / "out.csv"
    monkeypatch.setattr("sys.argv", ["published", str(tmp_path / "aic_operators.csv"), "--out", str(written)])
    main()
    usable, rejected = usable_rows(written)
    assert ([one.model for one in usable], rejected) == (["linear", "linear", "attention"], [])
    attended = usable[2].graph(None, TraceCache(), usable[2].device)
    assert attended.ops[0].flops == 4 * 2 * 16 * 2048**2 * 128


def test_runs_and_operators_are_no_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pd.DataFrame([operator(op="linear", m=4096, n=4096, k=4096)]).to_csv(tmp_path / "aic_operators.csv", index=False)
    pd.DataFrame([row(note="as printed")]).to_csv(tmp_path / "cs336_more.csv", index=False)
    tables = [str(tmp_path / f"{name}.csv") for name in ("aic_operators", "cs336_more")]
    monkeypatch.setattr("sys.argv", ["published", *tables, "--out", str(tmp_path / "out.csv")])
    with pytest.raises(SystemExit):
        main()
    assert not (tmp_path / "out.csv").exists()

"""Tables of measured runs, and a predictor held against them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.cli import main
from perfguard.exceptions import TableError
from perfguard.predictor import Estimate
from perfguard_research import networks
from perfguard_research.csv_rows import read_table
from perfguard_research.evaluate import PREDICTED, evaluate, report
from tests.doubles import ReplayPredictor
from tests.rows import write

ROW = {
    "source": "ours", "model": "tiny", "family": "tiny", "mode": "train", "gpu": "a100-pcie-40gb", "precision": "fp32",
    "layout": "nchw", "compiled": "False", "optimizer": "sgd-momentum", "batch_size": "8", "img_size": "32",
    "step_time_ms": "", "peak_memory_mib": "1000", "status": "ok",
}  # fmt: skip


COLUMNS = list(ROW)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.stem(x).mean((2, 3)))


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """timm's place is taken by a network of ours; the list says which were made."""
    made: list[str] = []

    def make(name: str, size: int | None = None, *, fused_attention: bool = True) -> nn.Module:
        made.append(name)
        if name == "unknown":
            raise TableError("timm cannot make the model 'unknown'")
        return Tiny()

    monkeypatch.setattr(networks, "timm_model", make)
    return made


FIXED = ReplayPredictor(memory=Estimate(2.0**30, 0.1), step_time=Estimate(0.01, 0.1))
"""Predicts a gibibyte and ten milliseconds for everything."""


def rows_of(*changes: Mapping[str, str]) -> list[dict[str, str]]:
    return [ROW | dict(change) for change in changes]


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_a_table_is_read_compressed_or_not(tmp_path: Path, name: str) -> None:
    columns, rows = read_table(write(tmp_path / name, rows_of({}, {"batch_size": "16"})))
    assert columns == COLUMNS
    assert [row["batch_size"] for row in rows] == ["8", "16"]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bdamaged", b"\xff\xfe\x00"])
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(TableError, match=r"table\.csv"):
        read_table(path)
    with pytest.raises(TableError, match=r"nowhere\.csv"):
        read_table(tmp_path / "nowhere.csv")


@pytest.mark.usefixtures("_tiny")
def test_row_that_cannot_be_done_has_an_error() -> None:
    rows = rows_of({}, {"gpu": "a1000"}, {"model": "unknown"}, {"batch_size": "x"}, {"img_size": "1"}, {"batch_size": "4"})
    results = evaluate(COLUMNS, rows, "table.csv", FIXED)
    assert [bool(result.error) for result in results] == [False, True, True, True, True, False]
    for result in results:
        assert set(result.columns()) >= ({"error"} if result.error else set(PREDICTED))
    assert float(results[0].columns()["pred_peak_memory_mib"]) == 1024
    assert "a1000" in results[1].error


def test_rows_of_one_network_make_it_once(_tiny: list[str]) -> None:  # noqa: PT019
    evaluate(COLUMNS, rows_of(*({"batch_size": str(n)} for n in (2, 64, 8, 16, 4, 32))), "table.csv", FIXED)
    assert _tiny == ["tiny"]


@pytest.mark.usefixtures("_tiny")
def test_the_report_by_hand() -> None:
    rows = rows_of(
        {"peak_memory_mib": "1024"},
        {"peak_memory_mib": "512", "step_time_ms": "20"},
        {"peak_memory_mib": "50000", "status": "oom"},
        {"mode": "infer", "gpu": "rtx3090", "peak_memory_mib": "", "step_time_ms": "8"},
    )
    infer, train = report(evaluate(COLUMNS, rows, "table.csv", FIXED))
    assert (infer["mode"], infer["memory"], infer["oom_caught"]) == ("infer", None, None)
    assert infer["time"]["mean"] == pytest.approx(0.25)
    assert train["memory"] == {"rows": 2, "mean": 0.5, "median": 0.5, "p90": 1.0, "coverage": 0.5}
    assert train["time"]["rows"] == 1
    assert (train["rows"], train["oom_rows"], train["oom_caught"], train["fitting_pruned"]) == (3, 1, 0.0, 0.0)


@pytest.mark.slow
def test_the_command_writes_predictions_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch_geometric")
    from tests import zoo

    if not zoo.IS_COMPLETE:
        pytest.skip("needs timm")
    rows = rows_of({"model": "resnet10t", "img_size": "64"}, {"model": "no_such_model"})
    table, out, data = write(tmp_path / "t.csv.gz", rows), tmp_path / "p.csv", tmp_path / "r.json"
    assert main(["evaluate", str(table), "--out", str(out), "--json", str(data)]) == 0
    first, second = csv.DictReader(out.read_text().splitlines())
    assert list(first) == [*COLUMNS, *PREDICTED]
    low, middle, high = (float(first[f"pred_{name}_mib"]) for name in ("memory_low", "peak_memory", "memory_high"))
    assert low < middle < high
    assert 0 <= float(first["p_oom"]) <= 1
    assert math.isfinite(float(first["pred_step_time_ms"]))
    assert "no_such_model" in second["error"]
    (group,) = json.loads(data.read_text())["groups"]
    assert (group["rows"], group["errors"]) == (2, 1)
    assert "1 of 2 rows could not be predicted" in capsys.readouterr().err

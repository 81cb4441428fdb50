"""From a workload table to weights: traced rows, splits by family, training that goes on where it was killed."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from perfguard.devices import resolve_device
from perfguard_models import guardnet, train_guardnet_gpu
from perfguard_models.dataset import TableRow, rows_of_table, split_by_family
from tests import zoo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # fork in a process with threads
]
COLUMNS = ["source", "model", "family", "mode", "gpu", "precision", "layout", "batch_size", "img_size", "step_time_ms",
           "peak_memory_mib", "status"]  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "table.csv"
    rows: list[list[object]] = [
        ["ours", model, model[:6], "train", "a100-pcie-40gb", "fp32", "nchw", batch, 64, "", 900 + 10 * batch, "ok"]
        for model in ("resnet10t", "mobilenetv3_small_050")
        for batch in (2, 4, 8, 16, 32)
    ]
    rows += [
        ["ours", "resnet10t", "resnet", "infer", "rtx3090", "amp-fp16", "nhwc", 64, 64, 5.0, "", "ok"],
        ["ours", "resnet10t", "resnet", "train", "rtx3090", "amp-fp16", "nhwc", 8192, 64, "", "", "oom"],
        ["ours", "resnet10t", "resnet", "train", "a100-pcie-40gb", "fp32", "nchw", 2, 64, "", 10, "noisy"],
        ["ours", "no_such_model", "no", "train", "a100-pcie-40gb", "fp32", "nchw", 2, 64, "", 10, "ok"],
    ]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return path


def test_rows_have_labels_or_bounds_and_are_found_again(table: Path, tmp_path: Path) -> None:
    rows = rows_of_table(table, jobs=1, cache=tmp_path)
    assert len(rows) == 12
    again = rows_of_table(table, jobs=1, cache=tmp_path)
    assert all(torch.equal(a.data.x, b.data.x) for a, b in zip(rows, again, strict=True))
    (oom,) = [row for row in rows if row.data.bound_sign > 0]
    assert float(oom.data.bound) == pytest.approx(math.log(resolve_device("rtx3090").memory_bytes))
    assert oom.data.label_memory.isnan()
    (timed,) = [row for row in rows if not row.data.label_time.isnan()]
    assert (timed.gpu, timed.mode, float(timed.data.bound_sign)) == ("rtx3090", "infer", -1.0)
    assert float(timed.data.label_time.exp()) == pytest.approx(0.005)


def test_families_are_held_out_whole(table: Path) -> None:
    rows = rows_of_table(table, jobs=1)
    training, held_out = split_by_family(rows, held_out=0.5, seed=0)
    assert training
    assert held_out
    assert not {row.family for row in training} & {row.family for row in held_out}


class Killed(Exception):
    pass


def test_a_killed_training_goes_on_and_its_weights_predict(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights"
    monkeypatch.setattr(sys, "argv", ["train", str(table), "--out", str(out), "--epochs", "3", "--jobs", "1"])
    monkeypatch.setattr(train_guardnet_gpu, "_HELD_OUT", 0.5)
    save, saved = torch.save, []

    def save_once(state: dict[str, object], path: Path) -> None:
        save(state, path)
        saved.append(state["epoch"])
        if len(saved) == 1:
            raise Killed

    monkeypatch.setattr(torch, "save", save_once)
    with pytest.raises(Killed):
        train_guardnet_gpu.main()
    train_guardnet_gpu.main()
    assert saved == [1, 2, 3]
    card = json.loads(out.with_suffix(".json").read_text())
    assert card["device_kind"] == "cuda"
    assert not out.with_suffix(".checkpoint.pt").exists()
    assert "epoch 3" in capsys.readouterr().err

    net = guardnet.load(out)
    rows: list[TableRow] = rows_of_table(table, jobs=1)
    assert len(rows) == 12
    assert net.name.startswith("guardnet-")

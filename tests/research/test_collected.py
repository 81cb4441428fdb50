"""Tables of collected rows: read, evaluated, and made into what predictors learn from."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from perfguard import resolve_device
from perfguard.cli import main
from perfguard.devices import Device
from perfguard.exceptions import TableError
from perfguard_models.features.launches import LAUNCHES
from perfguard_models.features.step import SUMS
from perfguard_research.collect.loop import COLUMNS
from perfguard_research.dataset import dataset_of, usable_rows
from perfguard_research.tables import kind_of_table, parser_of
from tests.doubles import TOY_CPU
from tests.rows import SIZES, write

ROW = dict.fromkeys(COLUMNS, "") | {
    "source": "collected", "model": "perfguard:mlp", "config": json.dumps(SIZES), "family": "mlp", "mode": "train",
    "gpu": "t4", "num_gpus": "1", "parallel": "none", "precision": "amp-bf16", "optimizer": "sgd-momentum", "batch_size": "32",
    "input": "{}", "step_time_ms": "2.5", "peak_memory_mib": "600", "memory_kind": "driver", "status": "ok",
    "framework": "torch2.11.0", "space": "mlp", "memory_share": "0.3", "memory_limit_mib": "2048",
}  # fmt: skip
FAST_CPU = dataclasses.replace(TOY_CPU, name="Fast", peak_flops={"fp32": 2e11}, bandwidth_bytes_per_s=4e10)


def figures_of(device: Device) -> str:
    return json.dumps(dataclasses.asdict(device), separators=(",", ":"))


OTHER = figures_of(dataclasses.replace(TOY_CPU, id="x"))


def test_collected_row_is_rebuilt_from_its_columns() -> None:
    assert kind_of_table(COLUMNS) == "collected"
    row = parser_of(COLUMNS, "rows.csv")(ROW | {"gpu_util": "40"})
    assert (row.peak_memory_bytes, row.step_time_s, row.gpu_util) == (600 * 2**20, 0.0025, 0.4)
    assert row.capacity_bytes == 2**31
    model = row.make_model()
    assert model is not None
    workload = row.workload(model)
    assert (workload.inputs, workload.precision, workload.mode) == ((32, 64), "amp-bf16", "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_util": "140"}, "'gpu_util' must lie between 0 and 100"),
        ({"device": "{"}, "column 'device' must be a device as `perfguard collect` writes it"),
        ({"device": '{"id": "cpu"}'}, "column 'device' must be a device as `perfguard collect` writes it: .*missing"),
        ({"gpu": "x", "device": OTHER.replace('"num_sms":2', '"num_sms":0')}, "num_sms of 'x' must be"),
        ({"gpu": "t4", "device": OTHER}, r"has the figures of 'x' \(cpu\), but column 'gpu' has 't4'"),
    ],
)
def test_a_row_that_cannot_be_right_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(TableError, match=message):
        parser_of(COLUMNS, "rows.csv")(ROW | changes)


@pytest.mark.parametrize("device", [TOY_CPU, dataclasses.replace(resolve_device("t4"), id="made-up")])
def test_row_has_the_figures_of_a_device_that_no_catalog_has(device: Device) -> None:
    row = parser_of(COLUMNS, "rows.csv")(ROW | {"gpu": device.id, "device": figures_of(device)})
    assert row.device == device


def test_row_of_a_processor_needs_its_figures_to_be_learnt_from(tmp_path: Path) -> None:
    """Another machine has other figures."""
    on_cpu = ROW | {
        "precision": "fp32",
        "gpu": "cpu",
        "memory_kind": "resident",
        "memory_limit_mib": "",
        "peak_memory_mib": "0.5",
    }
    rows = [on_cpu, on_cpu | {"device": figures_of(TOY_CPU)}, on_cpu | {"device": figures_of(FAST_CPU)}]
    dataset = dataset_of([write(tmp_path / "rows.csv", rows)], [LAUNCHES], cache=tmp_path / "cache", jobs=1)
    assert dataset.rejected == ["a CPU without its figures, which `perfguard collect` writes"]
    assert [(run.table, run.gpu, set(run.labels)) for run in dataset.runs] == [("collected", "cpu", {"memory", "time"})] * 2
    assert dataset.cpus == {"Toy", "Fast"}
    fast_s, slow_s = sorted(float(run.view["roofline"].sum()) for run in dataset.runs)
    assert slow_s == pytest.approx(2 * fast_s, rel=0.05)


def test_train_refuses_rows_of_a_processor_beside_rows_of_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = {"gpu": "cpu", "device": figures_of(TOY_CPU), "memory_kind": "resident", "memory_limit_mib": ""}
    sizes = [{"precision": "fp32", "batch_size": str(batch)} for batch in range(2, 14)]
    rows = [ROW | size | device for size in sizes for device in ({}, on_cpu)]
    table, out = write(tmp_path / "rows.csv", rows), tmp_path / "weights"
    words = ["train", str(table), "--predictor", "memory-forest", "--out", str(out), "--cache", str(tmp_path / "cache")]
    assert main([*words, "--jobs", "1"]) == 1
    assert "runs on a CPU and on GPUs. The weights of memory-forest are for one of them" in capsys.readouterr().err
    assert not out.exists()


def test_predictors_learn_from_collected_rows(tmp_path: Path) -> None:
    large = ROW | {"batch_size": str(2**18)}
    rows = [ROW, large | {"status": "oom", "step_time_ms": ""}, large | {"status": "failed"}]
    table = write(tmp_path / "rows.csv", rows)
    dataset = dataset_of([table], [SUMS], cache=tmp_path / "cache", jobs=1)
    assert dataset.rejected == ["status 'failed'"]
    fitting, failing = sorted(dataset.runs, key=lambda run: run.batch_size)
    assert (fitting.table, fitting.setting.variant, fitting.fits) == ("collected", "amp-bf16 nchw", True)
    assert set(fitting.labels) == {"memory", "time"}
    assert (failing.fits, failing.labels) == (False, {})
    assert fitting.capacity_bytes == failing.capacity_bytes == 2**31 < resolve_device("t4").memory_bytes


@pytest.mark.parametrize("name", ["step-time", "cpu-memory-forest"])
def test_weights_for_cpus_can_be_trained_again(name: str) -> None:
    """The table that they were trained on is in the repository, and their cards have its rows."""
    root = Path(__file__).resolve().parents[2]
    card = json.loads((root / "models" / "perfguard_models" / "weights" / f"{name}.json").read_text(encoding="utf-8"))
    rows = usable_rows(root / "benchmarks" / "data" / "cpu.csv.gz")[0]
    of_cpus = {name: number for name, number in card["rows"].items() if " cpu " in name}
    assert of_cpus == Counter(f"collected {row.source} cpu {row.mode}" for row in rows if row.status == "ok")

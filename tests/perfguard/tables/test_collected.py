"""Tables of collected rows: read, evaluated, and made into what predictors learn from."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from perfguard import resolve_device
from perfguard.collect import COLUMNS, Recipe
from perfguard.exceptions import TableError
from perfguard.tables import CollectedRow, kind_of_table, parser_of
from perfguard.workload import Tf32
from perfguard_training.dataset import dataset_of

SIZES = {"inputs": 64, "width": 128, "depth": 2, "norm": True, "dropout": False, "activation": "relu", "classes": 10}
RECIPE = Recipe(space="mlp", kind="mlp", model="mlp-2", family="mlp-norm", sizes=SIZES, batch_size=32, precision="amp-bf16")
MEASURED = {
    "gpu": "t4", "status": "ok", "peak_memory_mib": "600", "step_time_ms": "2.5", "gpu_util": "40", "step_energy_j": "0.2",
    "memory_limit_mib": "2048", "framework": "torch2.11.0", "space": "mlp", "memory_share": "0.3",
}  # fmt: skip


def row_of(recipe: Recipe = RECIPE, **changes: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | MEASURED | {"recipe": recipe.to_json()} | changes


def test_collected_row_is_rebuilt_from_its_recipe() -> None:
    assert kind_of_table(COLUMNS) == "collected"
    row = parser_of(COLUMNS, "rows.csv")(row_of())
    assert isinstance(row, CollectedRow)
    assert row.recipe == RECIPE
    assert (row.source, row.family, row.mode, row.batch_size, row.precision) == (
        "collected-mlp", "mlp-norm", "train", 32, "amp-bf16",
    )  # fmt: skip
    assert (row.peak_memory_bytes, row.step_time_s, row.gpu_util, row.step_energy_j) == (600 * 2**20, 0.0025, 0.4, 0.2)
    assert row.capacity_bytes == 2**31
    workload = row.workload(row.make_model())
    assert (workload.inputs, workload.precision, workload.mode) == ((32, 64), "amp-bf16", "train")


@pytest.mark.parametrize("tf32", ["default", "on", "off"])
def test_a_recipe_says_where_tf32_is_used(tf32: Tf32) -> None:
    recipe = dataclasses.replace(RECIPE, precision="fp32", tf32=tf32)
    assert recipe.workload(recipe.make_model()).tf32 == tf32


def test_rows_of_other_batch_share_a_structure() -> None:
    parse = parser_of(COLUMNS, "rows.csv")
    first, second = parse(row_of()), parse(row_of(dataclasses.replace(RECIPE, batch_size=64)))
    assert first.structure == second.structure
    assert first.structure != parse(row_of(dataclasses.replace(RECIPE, optimizer="adamw"))).structure


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": ""}, "column 'recipe' is empty"),
        ({"recipe": "[1]"}, "column 'recipe' must be a configuration as `perfguard collect` writes it"),
        ({"gpu": ""}, "column 'gpu' is empty"),
        ({"gpu_util": "140"}, "'gpu_util' must lie between 0 and 100"),
    ],
)
def test_a_row_that_cannot_be_right_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(TableError, match=message):
        parser_of(COLUMNS, "rows.csv")(row_of() | changes)


def test_predictors_learn_from_collected_rows(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        large = dataclasses.replace(RECIPE, batch_size=2**18)
        writer.writerows([row_of(), row_of(large, status="oom", step_time_ms=""), row_of(large, status="failed")])
    dataset = dataset_of([table], "sums", cache=tmp_path / "cache", jobs=1)
    assert dataset.rejected == ["status 'failed'"]
    fitting, failing = sorted(dataset.runs, key=lambda run: run.batch_size)
    assert (fitting.table, fitting.variant, fitting.fits) == ("collected", "amp-bf16 nchw", True)
    assert set(fitting.labels) == {"memory", "time", "gpu_util"}
    assert (failing.fits, failing.labels) == (False, {})
    assert fitting.capacity_bytes == failing.capacity_bytes == 2**31 < resolve_device("t4").memory_bytes

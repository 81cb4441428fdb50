"""From tables to runs: traced once, seen in several ways, split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from perfguard.devices import resolve_device
from perfguard_models.features import FeatureSet
from perfguard_models.features.launches import LAUNCHES
from perfguard_models.features.step import STEP_FEATURES, SUMS
from perfguard_research import dataset as module
from perfguard_research.dataset import Dataset, Run, dataset_of, folds, without_time
from perfguard_research.papers.layers import LAYERS
from perfguard_research.tables import MeasuredRow
from tests import zoo
from tests.rows import run_on, step_on, write

needs_timm = pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    start = {
        "source": "ours", "model": "resnet10t", "family": "resnet", "mode": "train", "gpu": "a100-pcie-40gb", "precision": "fp32",
        "layout": "nchw", "batch_size": 2, "img_size": 64, "step_time_ms": "", "peak_memory_mib": "", "status": "ok",
    }  # fmt: skip
    half = {"gpu": "rtx3090", "precision": "amp-fp16", "layout": "nhwc"}
    rows = [
        start | {"model": model, "family": model[:6], "batch_size": batch, "peak_memory_mib": 900 + 10 * batch}
        for model in ("resnet10t", "mobilenetv3_small_050")
        for batch in (2, 4, 8, 16, 32)
    ]
    rows += [
        start | half | {"mode": "infer", "batch_size": 64, "step_time_ms": 5.0},
        start | half | {"batch_size": 4096, "step_time_ms": 7.0},
        start | half | {"batch_size": 8192, "status": "oom"},
        start | {"peak_memory_mib": 10, "status": "noisy"},
        start | {"peak_memory_mib": 920},
        start | {"peak_memory_mib": 900 * 2**20},
        start | {"peak_memory_mib": 900, "step_time_ms": "nan"},
        start | {"peak_memory_mib": 900, "model": "no_such_model", "family": "no"},
    ]
    return write(tmp_path_factory.mktemp("table") / "table.csv", rows)


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [added(gpu, h) for gpu in ("t4", "p4") for h in range(1, 21)]
    return write(tmp_path_factory.mktemp("table") / "operators.csv", rows)


def added(gpu: str, h: int) -> dict[str, object]:
    """A row of a table of operators."""
    return {"op": "add", "gpu": gpu, "latency_ms": 0.01 * h, "b": 4, "h": h}


@pytest.fixture(scope="module")
def dataset(table: Path, operators: Path, cache: Path) -> Dataset:
    return dataset_of([table, operators], (SUMS, LAUNCHES, LAYERS), cache=cache, jobs=1)


@needs_timm
def test_every_row_is_a_run_or_a_reason(dataset: Dataset) -> None:
    workloads = [run for run in dataset.runs if run.table == "workload"]
    assert len(workloads) == 13
    assert len(dataset.runs) == 13 + 40
    assert len(dataset.rejected) == 5
    sentence = dataset.rejections()
    assert sentence.startswith("5 rows were left out: ")
    for reason in ("status 'noisy'", "the same row twice", "a peak below a mebibyte", "'step_time_ms'", "no_such_model"):
        assert any(reason in text for text in dataset.rejected), reason
    (failed,) = [run for run in workloads if not run.fits]
    assert failed.labels == {}
    assert failed.capacity_bytes == resolve_device("rtx3090").memory_bytes
    (timed,) = [run for run in workloads if run.mode == "infer"]
    assert timed.labels == {"time": pytest.approx(math.log(0.005))}


@needs_timm
def test_what_was_traced_is_found_again(
    table: Path, operators: Path, cache: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(module, "_trace", fail)
    again = dataset_of([table, operators], (SUMS, LAUNCHES, LAYERS), cache=cache, jobs=1)
    assert again.rejected == dataset.rejected
    for first, second in zip(dataset.runs, again.runs, strict=True):
        assert first._replace(view={}) == second._replace(view={})
        assert all(np.array_equal(first.view[name], second.view[name]) for name in first.view)


@needs_timm
def test_what_other_code_traced_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "source": "ours", "model": "resnet10t", "family": "resnet", "mode": "infer", "gpu": "rtx3090", "precision": "fp32",
        "layout": "nchw", "batch_size": 2, "img_size": 64, "step_time_ms": 5.0, "peak_memory_mib": "", "status": "ok",
    }  # fmt: skip
    table = write(tmp_path / "t.csv", [row])
    for code in (b"yesterday's", b"yesterday's", b"today's"):
        monkeypatch.setattr(module, "code_of", lambda package, code=code, without=(): code)
        assert len(dataset_of([table], [SUMS], cache=tmp_path, jobs=1).runs) == 1
    assert len(list((tmp_path / "graphs").glob("*.zip"))) == 2


@needs_timm
def test_rows_of_a_network_that_are_asked_for_later_join_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "source": "ours", "model": "resnet10t", "family": "resnet", "mode": "infer", "gpu": "rtx3090", "precision": "fp32",
        "layout": "nchw", "img_size": 64, "step_time_ms": 5.0, "peak_memory_mib": "", "status": "ok",
    }  # fmt: skip
    dataset_of([write(tmp_path / "t.csv", [row | {"batch_size": 2}])], [SUMS], cache=tmp_path, jobs=1)
    own = module._trace

    def only_new(rows: Sequence[MeasuredRow], path: Path) -> None:
        assert [each.batch_size for each in rows] == [4]
        own(rows, path)

    monkeypatch.setattr(module, "_trace", only_new)
    both = write(tmp_path / "t.csv", [row | {"batch_size": batch} for batch in (2, 4)])
    assert [run.batch_size for run in dataset_of([both], [SUMS], cache=tmp_path, jobs=1).runs] == [2, 4]
    assert [run.batch_size for run in dataset_of([both], [SUMS], cache=tmp_path, jobs=1).runs] == [2, 4]


@needs_timm
def test_a_row_that_is_not_wanted_is_not_traced(tmp_path: Path) -> None:
    rows = [
        {
            "source": "ours", "model": "resnet10t", "family": "resnet", "mode": "infer", "gpu": "rtx3090", "precision": "fp32",
            "layout": "nchw", "img_size": 64, "step_time_ms": step_ms, "peak_memory_mib": 900, "status": "ok",
            "batch_size": batch,
        }
        for step_ms, batch in ((5.0, 2), ("", 4))
    ]  # fmt: skip
    found = dataset_of([write(tmp_path / "t.csv", rows)], [SUMS], cache=tmp_path, jobs=1, unwanted=without_time)
    assert [run.batch_size for run in found.runs] == [2]
    assert found.rejected == ["no time of one device"]


@needs_timm
def test_a_view_has_no_nan_and_adds_up(dataset: Dataset) -> None:
    for run in dataset.runs:
        for name, values in run.view.items():
            assert np.isfinite(values.astype(np.float64)).all(), name
        assert run.view["edge_index"].max(initial=-1) < len(run.view["nodes"])
        launch_s = resolve_device(run.gpu).launch_overhead_s
        total = float(np.maximum(run.view["roofline"][run.view["order"]], launch_s).sum())
        bound = math.exp(run.view["sums"][STEP_FEATURES.index("log_roofline")])
        assert 0.999 < total / bound < 1.1  # the operators' have a third roof


@needs_timm
def test_a_fold_judges_what_the_others_have_not_seen(dataset: Dataset) -> None:
    runs = dataset.runs

    def names(indices: list[int], attribute: str) -> set[str]:
        return {getattr(runs[index], attribute) for index in indices}

    for split in ("family", "gpu", "random"):
        made = folds(runs, split, number=2)
        judged = sorted(index for fold in made for index in fold.judge)
        assert (len(judged) == -(-len(runs) // 2)) if split == "random" else (judged == list(range(len(runs)))), split
        assert all(not set(fold.learn) & set(fold.judge) for fold in made)
        assert made == folds(runs, split, number=2)
        if split != "random":
            assert all(not names(fold.learn, split) & names(fold.judge, split) for fold in made)
    with pytest.raises(ValueError, match="'family', 'source', 'gpu' or 'random'"):
        folds(runs, "model")


@pytest.mark.parametrize("view", [SUMS, LAYERS], ids=["of GuardNet", "of the papers"])
def test_run_has_the_setting_of_its_graph_whatever_is_read_of_it(view: FeatureSet, tmp_path: Path) -> None:
    # Else the interval of a graph would never be that of the runs like it, and its time would never be known.
    row = {
        "model": "torchvision:resnet18", "config": "{}", "mode": "train", "gpu": "a100", "num_gpus": "1", "parallel": "none",
        "precision": "tf32", "batch_size": "2", "input": '{"image": 64}', "memory_kind": "driver", "step_time_ms": "5",
    }  # fmt: skip
    (run,) = dataset_of([write(tmp_path / "t.csv", [row])], [view], cache=tmp_path, jobs=1).runs
    assert run.setting.group == "a100-pcie-40gb train fp32 nchw with convolutions"
    assert run.setting.timed_as == "a100-pcie-40gb train tf32"


def test_run_has_the_id_of_its_gpu(tmp_path: Path) -> None:
    rows = [added(gpu, h) for gpu in ("a100", "a100-sxm-40gb/1g.5gb") for h in (8, 9)]
    runs = dataset_of([write(tmp_path / "t.csv", rows)], [SUMS], cache=tmp_path, jobs=1).runs
    assert [run.gpu for run in runs] == ["a100-pcie-40gb"] * 2 + ["a100-sxm-40gb:1g.5gb"] * 2


def run_from(source: str, gpu: str = "t4") -> Run:
    return run_on(step_on(gpu), source=source, labels={"time": 0.0})


@pytest.mark.parametrize("split", ["source", "gpu"])
def test_each_source_and_gpu_is_held_out_once(split: str) -> None:
    assert folds([run_from("a")] * 30, split) == []
    names = [f"{split}-{at}" for at in range(7) for _ in range(at + 1)]
    runs = [run_from(name) if split == "source" else run_from("", name) for name in names]
    made = folds(runs, split)
    assert len(made) == 5  # seven names in five parts
    assert sorted(index for fold in made for index in fold.judge) == list(range(len(runs)))
    for fold in made:
        learnt, judged = ({names[index] for index in indices} for indices in (fold.learn, fold.judge))
        assert learnt | judged == set(names)
        assert not learnt & judged
        assert fold.name == f"without {', '.join(sorted(judged))}"


@pytest.mark.parametrize("split", ["source", "gpu"])
def test_cpus_stay_in_training_beside_gpus(split: str) -> None:
    """A table may have no column of sources."""
    runs = [run_from(source, gpu) for source in ("", "a") for gpu in ("t4", "cpu")]
    made = folds(runs, split)
    assert made
    assert all(runs[index].gpu != "cpu" for fold in made for index in fold.judge)


def test_cards_with_kernels_are_in_different_folds_and_do_not_fill_them() -> None:
    steps = [run_from("", f"gpu-{at}") for at in range(10) for _ in range(10)]
    kernels = [run_on(step_on(f"gpu-{at}", is_single=True)) for at in range(5) for _ in range(200)]
    made = folds(steps + kernels, "gpu")
    assert [sum(index < len(steps) for index in fold.judge) for fold in made] == [20] * 5
    assert [sum(index >= len(steps) for index in fold.judge) for fold in made] == [200] * 5
    assert (
        len(folds(kernels + [run_on(step_on(one.gpu, is_single=True)) for one in steps], "gpu")) == 5
    )  # a table of nothing else

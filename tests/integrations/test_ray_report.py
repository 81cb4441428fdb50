"""The report of a Ray Tune run, from its search and from its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.perfguard.report.pages import Page
from torch import nn

import perfguard_ray
from perfguard import Measurement, MeasurementStore, Workload
from perfguard.report import page_of, report_of_log
from perfguard_ray._report import read
from tests.doubles import BARE_A100, ReplayPredictor

pytest.importorskip("plotly")


def build(config: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, config["model"]["width"]), inputs=(32, 64), loss=torch.mean, steps=3)


def report_of_worker(*, peak_memory_bytes: int) -> dict[str, Any]:
    """What a worker with the guarded GPU would report."""
    return asdict(
        Measurement(
            status="ok",
            device_id=BARE_A100.id,
            device_name=BARE_A100.name,
            peak_memory_bytes=peak_memory_bytes,
            step_time_s=0.01,
            total_time_s=0.03,
            num_steps=3,
            method="nvml-process+allocator",
            framework="torch",
        )
    )


def test_search_and_log_give_one_report(tmp_path: Path) -> None:
    search = perfguard_ray.PerfGuardVariantGenerator(
        build=build,
        gpu=BARE_A100,
        memory_budget="1MiB",
        predictor=ReplayPredictor(),
        log=str(tmp_path / "log.db"),
        study="tune",
    )
    ledger = search.ledger
    for number, width in enumerate((8, 5000, 24, 2**30)):
        config = {"model": {"width": width}, "name": "<b>"}
        entry = ledger.judge(config, trial=number, trial_id=f"t{number}")
        if not entry.rejected:
            ledger.entries[f"t{number}"] = entry  # as the search does
            ledger.start(f"t{number}", config, trial=number)
            ledger.entries[f"t{number}"].report = report_of_worker(peak_memory_bytes=width * 2**16)
            ledger.finish(f"t{number}", "ok")
    report = read(search, None, None)
    assert report is not None
    assert report.summary == perfguard_ray.summarize(search)
    with MeasurementStore(tmp_path / "log.db") as log:
        of_log = report_of_log(log)
    assert [trial.outcome for trial in report.trials] == ["launched", "pruned", "over", "pruned"]
    assert [trial.outcome for trial in of_log.trials] == [trial.outcome for trial in report.trials]
    assert (of_log.summary.num_pruned, of_log.summary.num_crashes_avoided, of_log.summary.num_violations) == (2, 1, 1)
    assert of_log.summary.memory_error == report.summary.memory_error is not None  # type: ignore[attr-defined]
    assert of_log.summary.saved_s == pytest.approx(report.summary.saved_s)
    assert report.trials[1].params == {"model/width": 5000, "name": "<b>"}
    page, page_of_log = Page(page_of(report)), Page(page_of(of_log))
    assert page.tables["trials"] == page_of_log.tables["trials"]
    assert "model/width=5000, name=<b>" in page.tables["trials"][2][-1][0]


def test_other_sources_are_left_to_other_readers() -> None:
    assert read("tune", None, None) is None
    assert read(None, None, None) is None

"""What a report shows of a Ray Tune run: its trials, as the log has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

import perfguard_ray
from perfguard import Measurement, Workload
from perfguard.report import page_of, read_report
from perfguard_ray.callback import read_report as read
from tests.doubles import BARE_A100, ReplayPredictor

pytest.importorskip("plotly")


def build(config: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, config["model"]["width"]), inputs=(32, 64), loss=torch.mean, steps=3)


def report_of_worker(*, peak_memory_bytes: int) -> dict[str, Any]:
    """What a worker with the guarded GPU would report."""
    measurement = Measurement(
        "ok", BARE_A100.id, BARE_A100.name, peak_memory_bytes, 0.01, 0.03, 3, "nvml-process+allocator", "torch"
    )
    return asdict(measurement)


def test_report_has_the_trials_of_the_run() -> None:
    search = perfguard_ray.PerfGuardVariantGenerator(
        build=build, gpu=BARE_A100, memory_budget="1MiB", predictor=ReplayPredictor(), log=False, study="tune"
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
    report = read_report(search)
    records = report.records
    assert (report.title, report.summary.device) == ("tune", BARE_A100.name)
    assert [(record.in_words, record.violates) for record in records] == [
        ("launched", False),
        ("pruned", False),
        ("launched", True),
        ("pruned", False),
    ]
    assert records[1].params == {"model": {"width": 5000}, "name": "<b>"}
    summary = perfguard_ray.summarize(search)
    assert summary == report.summary
    assert (summary.num_pruned, summary.num_crashes_avoided, summary.num_violations) == (2, 1, 1)
    assert "5000" in page_of(report)


def test_other_sources_are_left_to_other_readers() -> None:
    assert read("tune", None) is read(None, None) is None

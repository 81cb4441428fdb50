"""Repair: the largest batch that fits, and the least change that lets a workload fit."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Guard, TensorSpec, Workload
from perfguard.exceptions import ConfigurationError, WorkloadError
from perfguard.repair import AS_PROPOSED, Repair, batch_size_of, find_repair, largest_batch, with_batch_size
from tests import zoo
from tests.doubles import BARE_A100, ReplayPredictor


class Deep(nn.Module):
    """Layers with a switch for checkpointing, as timm's models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.checkpointed = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpointed = enable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(lambda x, layer=layer: layer(x).sigmoid().tanh(), x, use_reentrant=False)
            else:
                x = layer(x).sigmoid().tanh()
        return x


def workload(batch: int = 96, **options: Any) -> Workload:
    return Workload(Deep(), inputs=(batch, 64), loss=torch.mean, **options)


def guard(budget: str, **options: Any) -> Guard:
    return Guard(BARE_A100, memory_budget=budget, predictor=ReplayPredictor(), log=False, **options)


def peak(workload: Workload) -> int:
    return Guard("a100", predictor=ReplayPredictor(), log=False).trace(workload).peak_live_bytes


@pytest.mark.parametrize(
    ("inputs", "targets", "batch"),
    [
        ((8, 3, 32, 32), TensorSpec((8,), "int64"), 8),
        ({"ids": TensorSpec((4, 128), "int64"), "mask": torch.ones(4, 128)}, None, 4),
        ([(5, 2), TensorSpec((), "float32")], (5, 1), 5),
    ],
)
def test_batch_size_is_first_dimension_that_all_share(inputs: Any, targets: Any, batch: int) -> None:
    example = Workload(nn.Identity(), inputs=inputs, targets=targets)
    assert batch_size_of(example) == batch
    assert batch_size_of(with_batch_size(example, 3)) == 3


def test_a_batch_that_nobody_can_tell_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="theirs are 4, 6"):
        batch_size_of(Workload(nn.Identity(), inputs=[(4, 2), (6, 2)]))


@pytest.mark.parametrize("largest", [1, 2, 3, 15, 16, 17, 100, 128, 5000])
def test_the_largest_batch_is_found_exactly(largest: int) -> None:
    tried: list[int] = []

    def fits(candidate: Workload) -> bool:
        tried.append(batch_size_of(candidate))
        return tried[-1] <= largest

    assert largest_batch(fits, workload()) == largest
    assert len(tried) <= 28  # each is traced


def test_max_batch_size_fits_and_one_more_does_not() -> None:
    judge = guard("1MiB")
    largest = judge.max_batch_size(workload())
    assert judge._fits(workload(largest))
    assert not judge._fits(workload(largest + 1))
    assert judge.max_batch_size(Deep(), (96, 64), loss=torch.mean) == largest


def test_max_batch_size_starts_where_batch_norm_trains() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    judge = guard("1MiB")
    assert judge.max_batch_size(model, (96, 64), loss=torch.mean) > 2


def test_accumulation_keeps_the_effective_batch() -> None:
    judge = guard(f"{int(peak(workload(960)) * 0.7)}", on_violation="repair")
    verdict = judge.check(workload(960))
    assert verdict.action == "repair"
    micro, accumulation = verdict.repair.micro_batch_size, verdict.repair.accumulation
    assert micro is not None
    assert micro * accumulation == 960
    assert peak(workload(micro, accumulation=accumulation)) < peak(workload(960)) * 0.7
    larger = min(size for size in range(micro + 1, 961) if 960 % size == 0)
    assert not judge._fits(workload(larger, accumulation=960 // larger))
    assert f"with micro-batch {micro} accumulated {accumulation} times it needs" in verdict.reason


def test_smaller_divisors_are_tried_where_the_largest_one_fails_with_all_its_passes() -> None:
    """The search has two passes, and a predictor may say more of eight. 12,500 of 100,000 fitted, and no remedy was found."""
    tried = []

    def fits(proposed: Workload) -> bool:
        size, passes = batch_size_of(proposed), proposed.accumulation
        tried.append((size, passes))
        return size <= 32 and (passes == 2 or size <= 16)

    found = find_repair(fits, workload(96), ("accumulation",), BARE_A100)
    assert found is not None
    repair, repaired = found
    assert (repair.micro_batch_size, repair.accumulation) == (16, 6)
    assert (batch_size_of(repaired), repaired.accumulation) == (16, 6)
    assert tried[-3:] == [(32, 3), (24, 4), (16, 6)], "from the largest"


def test_remedies_are_tried_in_the_order_given() -> None:
    budget = f"{int(peak(workload(4096)) * 0.75)}"
    by_precision = guard(budget, on_violation="repair", remedies=("precision", "checkpointing")).check(workload(4096))
    assert by_precision.repair == Repair(precision="amp-bf16")
    by_checkpointing = guard(budget, on_violation="repair", remedies=("checkpointing", "precision")).check(workload(4096))
    assert by_checkpointing.repair == Repair(checkpointing=True)


def test_remedies_are_combined_where_one_is_not_enough() -> None:
    example = workload(4096)
    judge = guard(f"{int(peak(example) * 0.45)}", on_violation="repair", remedies=("precision", "checkpointing"))
    assert judge.check(example).repair == Repair(precision="amp-bf16", checkpointing=True)
    assert not example.model.checkpointed, "the model is left as it was"


def test_what_no_remedy_helps_is_pruned() -> None:
    verdict = guard("1KiB", on_violation="repair").check(workload())
    assert (verdict.action, verdict.repair) == ("prune", AS_PROPOSED)
    assert "no remedy of accumulation helps" in verdict.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_violation": "explode"}, "on_violation must be one of prune, repair, warn"),
        ({"remedies": ("prayer",)}, "remedies must name some of accumulation, precision, checkpointing"),
        ({"remedies": "accumulation"}, "remedies must name some of"),
        ({"remedies": ()}, "remedies must name some of"),
    ],
)
def test_what_cannot_be_right_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        guard("1MiB", **options)


def test_transformers_model_survives_checkpointing() -> None:
    """It is checkpointed, and left as it was."""
    if not zoo.IS_COMPLETE:
        pytest.skip("transformers is not installed")
    transformers: Any = importlib.import_module("transformers")

    from perfguard.repair import can_checkpoint, checkpointing

    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(
            transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
        )
    assert can_checkpoint(model)
    with checkpointing(model, on=True):
        assert model.is_activation_checkpointing
        assert not can_checkpoint(model)
    assert not model.is_activation_checkpointing
    assert not can_checkpoint(nn.Linear(2, 2))

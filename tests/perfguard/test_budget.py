"""What a trial may use, and how far it is from that."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from perfguard.budget import Budget
from perfguard.devices import Device, resolve_device
from perfguard.exceptions import ConfigurationError
from perfguard.predictor import Estimate, Prediction

GIB = 2**30
PREDICTION = Prediction(Estimate(8 * GIB, 0.1), Estimate(0.5, 0.2), Estimate(500.0, 0.25), "double-1", "toy", True)


@pytest.fixture
def device() -> Device:
    return resolve_device("a100").with_memory(10 * GIB)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"memory_budget": 0.0}, r"memory_budget as a fraction must lie in \(0, 1\], but got 0.0"),
        ({"memory_budget": -0.5}, r"memory_budget as a fraction must lie in \(0, 1\], but got -0.5"),
        ({"memory_budget": 0}, "memory_budget must be positive and finite"),
        ({"memory_budget": math.nan}, "memory_budget must be positive and finite"),
        ({"memory_budget": True}, "memory_budget must be bytes or a text"),
        ({"memory_budget": "half"}, "memory_budget must look like"),
        ({"time_budget": -1}, "time_budget must be positive and finite"),
        ({"step_time_budget": "fast"}, "step_time_budget must look like"),
        ({"cost_budget": "free"}, "cost_budget must look like"),
        ({"cost_budget": 1, "price_per_hour": 0}, "price_per_hour must be positive and finite"),
        ({"cost_budget": 1}, "cost_budget needs price_per_hour, the price of an hour"),
        ({"price_per_hour": 1}, "price_per_hour has no effect without cost_budget"),
    ],
)
def test_a_budget_that_cannot_be_right_is_named(budget: dict[str, int | float | str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Budget.parse(**budget)


@pytest.mark.parametrize(("memory", "capacity"), [(None, 10 * GIB), ("4GiB", 4 * GIB), ("40GiB", 10 * GIB), (0.5, 5 * GIB)])
def test_capacity_is_never_more_than_device_has(device: Device, memory: float | str | None, capacity: int) -> None:
    assert Budget.parse(memory_budget=memory).capacity_bytes(device) == capacity


def quantities(budget: Budget, device: Device, **options: float | int | bool) -> list[str]:
    prediction = replace(PREDICTION, energy=Estimate(3.0, 0.1))
    return [limit.quantity for limit in budget.limits(prediction, device, **options)]  # type: ignore[arg-type]


def test_each_budget_limits_what_it_is_about(device: Device) -> None:
    budget = Budget.parse(step_time_budget="1s", epoch_time_budget="1h", latency_budget="5ms", energy_budget="2J")
    assert quantities(budget, device, steps_per_epoch=100) == ["memory", "step_time", "epoch_time"]
    assert quantities(budget, device) == ["memory", "step_time"]  # an epoch of unknown length
    assert quantities(budget, device, infers=True, steps_per_epoch=100) == ["memory", "step_time", "latency", "energy"]
    assert budget.quantities == ("memory", "epoch_time", "step_time", "latency", "energy")
    assert "energy" not in [limit.quantity for limit in budget.limits(PREDICTION, device, infers=True)], "it is not predicted"


def test_cost_is_time_at_a_price(device: Device) -> None:
    """500 s at $7.20 an hour are a dollar, as unsure as the time is; without a number of steps there is no cost."""
    budget = Budget.parse(cost_budget="$0.90", price_per_hour=7.2)
    (limit,) = (limit for limit in budget.limits(PREDICTION, device) if limit.quantity == "cost")
    assert limit.estimate.median == pytest.approx(1.0)
    assert limit.estimate.log_sigma == PREDICTION.total_time.log_sigma  # type: ignore[union-attr]
    assert limit.sentence == "costs $1.00 ($0.663 to $1.51), the budget is $0.900"
    assert quantities(budget, device) == ["memory", "cost"]
    assert [limit.quantity for limit in budget.limits(replace(PREDICTION, total_time=None), device)] == ["memory"]


def test_cost_budget_pays_for_a_time() -> None:
    paid = Budget.parse(cost_budget=1, price_per_hour=2)
    assert paid.longest_trial_s == 1800.0
    assert Budget.parse(time_budget="1min", cost_budget=1, price_per_hour=2).longest_trial_s == 60.0
    assert Budget().longest_trial_s is None


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"step_time_budget": "2s", "time_budget": "1s"}, r"step_time_budget \(2\.00 s\) is more than time_budget \(1\.00 s\)"),
        (
            {"step_time_budget": "2min", "epoch_time_budget": "1min", "time_budget": "1h"},
            "step_time_budget .* is more than epoch_time_budget",
        ),
        ({"epoch_time_budget": "2h", "time_budget": "1h"}, r"epoch_time_budget .* Leave epoch_time_budget out, or lower it\."),
    ],
)
def test_budget_refuses_contradicting_times(times: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Budget.parse(**times)


@pytest.mark.parametrize(("gpu", "nominal"), [("a100-pcie-40gb", "40GiB"), ("rtx4090", "24GiB"), ("t4", "16GiB")])
def test_budget_of_nominal_size_means_all_of_card(gpu: str, nominal: str) -> None:
    """A card of 40 GiB has 39.4 for programs; who writes "40GiB" means the card."""
    device = resolve_device(gpu)
    budget = Budget.parse(memory_budget=nominal)
    budget.check_device(device)
    assert budget.capacity_bytes(device) == device.memory_bytes

"""Budget: what a trial may use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypedDict

from perfguard.exceptions import ConfigurationError
from perfguard.predictor import SECONDS_PER_HOUR, Estimate, Prediction
from perfguard.quantities import SPECS, Quantity, format_bytes, format_seconds, parse_dollars

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.workload import AnyWorkload, HostMemory

_LEAST_BARE_BYTES = 2**20
"""A smaller number without a unit is taken for a slip."""
_NOMINAL = 1.1
"""A card of 40 GiB has 39.4 for programs, one of 16 may have 14.6: a budget of the nominal size means all of it."""
_HOST_LOG_SIGMA = 0.15
"""Of what the host holds: `benchmarks/host_memory.py`."""
_NESTED_TIMES: tuple[Quantity, ...] = ("step_time", "epoch_time", "time")


class BudgetSettings(TypedDict, total=False):
    """What a guard takes as its budgets: see :class:`perfguard.Guard`."""

    memory_budget: int | float | str | None
    host_memory_budget: int | float | str | None
    time_budget: int | float | str | None
    epoch_time_budget: int | float | str | None
    step_time_budget: int | float | str | None
    latency_budget: int | float | str | None
    energy_budget: int | float | str | None
    cost_budget: int | float | str | None
    price_per_hour: int | float | str | None


@dataclass(frozen=True, slots=True)
class Limit:
    """One predicted quantity beside the limit that it must stay under."""

    quantity: Quantity
    """"memory", "host_memory", "time" and "cost" are of the trial, "epoch_time" and "step_time" of its training, "latency" and
    "energy" of a batch of inference."""
    limit: float
    """Bytes, seconds, joules or dollars."""
    estimate: Estimate

    @property
    def p_violation(self) -> float:
        """The chance that the trial breaks this limit."""
        return self.estimate.p_exceeds(self.limit)

    def margin(self, risk: float) -> float:
        """Distance from feasibility as a logarithm: negative where the limit holds with probability 1 - risk."""
        return math.log(self.estimate.quantile(1 - risk) / self.limit)

    def format(self, value: float) -> str:
        """``value`` of this quantity in words."""
        return SPECS[self.quantity].unit.format(value)

    @property
    def sentence(self) -> str:
        """The estimate beside the limit, for instance "needs 46.1 GiB (44.9 GiB to 47.4 GiB), the budget is 38.0 GiB"."""
        low, high = map(self.format, self.estimate.interval())
        spec = SPECS[self.quantity]
        median = self.format(self.estimate.median)
        limit = self.format(self.limit)
        return f"{spec.verb} {median}{spec.after} ({low} to {high}), the budget is {limit}"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a trial. The memory of the device is always one.

    Example:
        >>> Budget.parse(memory_budget="38GiB", time_budget="2h").most["time"]
        7200.0
    """

    most: Mapping[Quantity, float] = field(default_factory=dict)
    """The limit of each quantity that has one: bytes, seconds, joules, or the currency of the price."""
    memory_fraction: float | None = None
    """The limit of the memory as a share of the device's, in (0, 1]. None: it is none."""
    price_per_hour: float | None = None
    """Price of an hour on the device. None: unknown."""

    @staticmethod
    def parse(price_per_hour: int | float | str | None = None, **budgets: int | float | str | None) -> Budget:
        """Return a budget from what people write: bytes, "38GiB" or a fraction of the device; seconds or "2h"; joules or "5J";
        dollars or "$2". The names are those of :class:`BudgetSettings`.

        Raises:
            ConfigurationError: If a limit is not positive or cannot be read. If a number below 1 MiB has no unit. If limits
                contradict each other. If one of ``cost_budget`` and ``price_per_hour`` is missing.
        """
        most: dict[Quantity, float] = {}
        fraction = None
        for quantity, spec in SPECS.items():
            name = f"{quantity}_budget"
            value = budgets.pop(name, None)
            share = _fraction(value, name) if spec.may_be_share else None
            if share is not None and quantity == "memory":
                fraction = share
            elif share is not None:
                from perfguard.devices.detect import host_memory_bytes

                most[quantity] = max(1, int(share * host_memory_bytes()))
            elif value is not None:
                most[quantity] = spec.unit.parse(value, what=name)
        if budgets:
            raise ConfigurationError(f"There is no budget {next(iter(budgets))!r}.")
        price = None if price_per_hour is None else parse_dollars(price_per_hour, what="price_per_hour")
        if "cost" in most and price is None:
            raise ConfigurationError(
                "cost_budget needs price_per_hour, the price of an hour on the device. Give both, for instance 2.5 for $2.50."
            )
        if "cost" not in most and price is not None:
            raise ConfigurationError("price_per_hour has no effect without cost_budget. Give both, or leave it out.")
        # A step is part of an epoch, and an epoch of a trial.
        for part, whole in pairwise(name for name in _NESTED_TIMES if name in most):
            if most[part] > most[whole]:
                raise ConfigurationError(
                    f"{part}_budget ({format_seconds(most[part])}) is more than {whole}_budget ({format_seconds(most[whole])}), "
                    f"but is a part of it. Leave {part}_budget out, or lower it."
                )
        return Budget(most, fraction, price)

    def check_device(self, device: Device) -> None:
        """Check that trials on ``device`` can have the memory of the budget.

        Raises:
            ConfigurationError: if the budget is more than the memory of the device, or not more than the driver's context.
        """
        if "energy" in self.most and device.kind == "cpu":
            raise ConfigurationError(
                f"energy_budget cannot be checked: a CPU ({device.name}) has no energy counter. Leave it out, or name a GPU."
            )
        given = self.most.get("memory")
        capacity_bytes = self.capacity_bytes(device)
        if given is None and self.memory_fraction is None:
            return
        if given is not None and given > _NOMINAL * device.memory_bytes:
            raise ConfigurationError(
                f"A memory budget of {format_bytes(given)} is more than {device.name} has "
                f"({format_bytes(device.memory_bytes)}). Give less, or a fraction such as 0.95."
            )
        if capacity_bytes <= device.context_bytes:
            raise ConfigurationError(
                f"A memory budget of {format_bytes(capacity_bytes)} is too small for any trial: the driver's context alone takes "
                f"{format_bytes(device.context_bytes)} on {device.name}. Give more, or a fraction such as 0.9."
            )

    @property
    def paid_time_s(self) -> float | None:
        """Seconds that the cost budget pays for. None: the cost has no limit, or there is no price."""
        cost = self.most.get("cost")
        return None if cost is None or self.price_per_hour is None else SECONDS_PER_HOUR * cost / self.price_per_hour

    @property
    def longest_trial_s(self) -> float | None:
        """Seconds that a trial may take by its time budget and its cost budget. None: neither limits it."""
        return min((seconds for seconds in (self.most.get("time"), self.paid_time_s) if seconds is not None), default=None)

    def capacity_bytes(self, device: Device) -> int:
        """The memory that a trial may use on ``device``."""
        if self.memory_fraction is not None:
            return int(self.memory_fraction * device.memory_bytes)
        return int(min(self.most.get("memory", math.inf), device.memory_bytes))

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The limited quantities."""
        return tuple(quantity for quantity in SPECS if quantity == "memory" or quantity in self.most)

    def cannot_bind(self, workload: AnyWorkload, *, knows_time: bool, knows_energy: bool = True) -> dict[str, str]:
        """Return the budgets that cannot be checked for ``workload``: for each name a sentence on what is missing.

        Args:
            workload: what the trial runs.
            knows_time: whether the time of the trial is predicted.
            knows_energy: whether the energy of inference is predicted.
        """
        infers = workload.mode == "infer"
        unseen = getattr(workload, "unseen", None)  # of a captured trial
        why = unseen or "the loaders do not say how many there are"
        steps = "Give Workload(..., steps=...)." if unseen is None else f"The dry run did not see them: {why}."
        steps += f" They follow from {'epochs=..., or from ' if workload.steps_per_epoch else ''}the first trial that finishes."
        missing: dict[Quantity, str] = {}
        if getattr(workload, "host_memory", None) is None:
            missing["host_memory"] = (
                "needs a dry run of the objective: a Workload does not say what the host holds. Leave out build=..., or "
                "host_memory_budget."
            )
        if not knows_time:
            missing |= dict.fromkeys(("time", "cost"), f"needs the number of steps of a trial. {steps}")
        if infers:
            missing["epoch_time"] = "limits training, but the workload has mode='infer'. Leave it out."
        elif workload.steps_per_epoch is None:
            missing["epoch_time"] = "needs the number of steps of an epoch. Give Workload(..., steps_per_epoch=...)."
        if not infers:
            limits = "limits inference, but the workload trains. Give Workload(..., mode='infer'), or"
            missing |= {"latency": f"{limits} step_time_budget for training.", "energy": f"{limits} leave it out."}
        elif not knows_energy:
            missing["energy"] = (
                "needs a predictor that knows energy. This one must first learn it from runs with measured energy on this "
                "device. Leave energy_budget out, or give another predictor."
            )
        return {f"{name}_budget": f"{name}_budget {missing[name]}" for name in SPECS if name in missing and name in self.most}

    def limits(
        self,
        prediction: Prediction,
        device: Device,
        *,
        infers: bool = False,
        steps_per_epoch: int | None = None,
        host_memory: HostMemory | None = None,
    ) -> Iterator[Limit]:
        """Each limit with the prediction for it. A quantity without a prediction has no limit.

        Args:
            prediction: the cost of one step or one batch of inference.
            device: what it runs on.
            infers: whether it is inference. Latency and energy limit inference, and an epoch's time limits training.
            steps_per_epoch: steps of one epoch. None: unknown, so an epoch has no limit.
            host_memory: what the host holds beside the device. None: unknown, so it has no limit.
        """
        step_time = prediction.step_time
        estimates: dict[Quantity, Estimate | None] = {
            "memory": prediction.peak_memory,
            "host_memory": None if host_memory is None else needed_on_host(host_memory, prediction, device),
            "time": prediction.total_time,
            "step_time": step_time,
            "epoch_time": None if infers or steps_per_epoch is None else step_time.scaled(steps_per_epoch),
            "latency": step_time if infers else None,
            "energy": prediction.energy if infers else None,
            "cost": None if self.price_per_hour is None else prediction.cost(self.price_per_hour),
        }
        most = {**self.most, "memory": self.capacity_bytes(device)}
        for quantity, estimate in estimates.items():
            if quantity in most and estimate is not None:
                yield Limit(quantity, most[quantity], estimate)


def needed_on_host(host_memory: HostMemory, prediction: Prediction, device: Device) -> Estimate:
    """Return the bytes that a trial holds in the memory of the host. A CPU is the host, so there the step is on it, too."""
    of_step = prediction.peak_memory.median if device.kind == "cpu" else 0.0
    held = Estimate.of_physics(max(host_memory.needed_bytes, 1), _HOST_LOG_SIGMA, "what the trial's process holds")
    return held.then("step", "a CPU is the host", median=held.median + of_step)


def _fraction(memory: int | float | str | None, name: str) -> float | None:
    """The share of all memory that ``memory`` is. None: it is none. Refuses a number like 40: hardly anybody means 40 bytes."""
    try:
        num_bytes = float(memory) if memory is not None and not isinstance(memory, bool) else 0.0
    except (TypeError, ValueError):
        return None  # it has a unit, or cannot be read
    if isinstance(memory, float) and memory <= 1:
        if memory > 0:
            return memory
        raise ConfigurationError(f"{name} as a fraction must lie in (0, 1], but got {memory!r}.")
    if 1 <= num_bytes < _LEAST_BARE_BYTES:
        unit = "GiB" if num_bytes < 1024 else "MiB"
        whole = "the device" if name == "memory_budget" else "this machine's memory"
        raise ConfigurationError(
            f"{name}={memory!r} is {num_bytes:.10g} bytes. Write '{num_bytes:.10g}{unit}', or a fraction of {whole} such as 0.9."
        )
    return None

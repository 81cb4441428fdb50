"""Budget: what a trial may use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from perfguard.exceptions import ConfigurationError
from perfguard.predictor import SECONDS_PER_HOUR, Estimate, Prediction
from perfguard.quantities import (
    format_bytes,
    format_quantity,
    format_seconds,
    parse_bytes,
    parse_dollars,
    parse_joules,
    parse_seconds,
)

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.workload import AnyWorkload, HostMemory

Quantity = Literal["memory", "host_memory", "time", "epoch_time", "step_time", "latency", "energy", "cost"]
NOUNS: Mapping[Quantity, str] = {
    "memory": "peak memory",
    "host_memory": "host memory",
    "time": "trial time",
    "epoch_time": "epoch time",
    "step_time": "step time",
    "latency": "latency",
    "energy": "energy",
    "cost": "trial cost",
}
"""Names of the quantities in messages."""
_SENTENCES: Mapping[Quantity, tuple[str, str]] = {
    "memory": ("needs", ""),
    "host_memory": ("needs", " of host memory"),
    "time": ("takes", ""),
    "epoch_time": ("takes", " an epoch"),
    "step_time": ("takes", " a step"),
    "latency": ("takes", " a batch"),
    "energy": ("uses", " a batch"),
    "cost": ("costs", ""),
}
"""The verb before the number, and what follows it."""
_LEAST_BARE_BYTES = 2**20
"""A smaller number without a unit is taken for a slip."""
_NOMINAL = 1.1
"""A card of 40 GiB has 39.4 for programs, one of 16 may have 14.6: a budget of the nominal size means all of it."""
_HOST_LOG_SIGMA = 0.15
"""Of what the host holds: `benchmarks/host_memory.py`."""
_NESTED_TIMES = (("step_time_budget", "step_time_s"), ("epoch_time_budget", "epoch_time_s"), ("time_budget", "trial_time_s"))


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
        return format_quantity(self.quantity, value)

    @property
    def sentence(self) -> str:
        """The estimate beside the limit, for instance "needs 46.1 GiB (44.9 GiB to 47.4 GiB), the budget is 38.0 GiB"."""
        low, high = map(self.format, self.estimate.interval())
        verb, noun = _SENTENCES[self.quantity]
        return f"{verb} {self.format(self.estimate.median)}{noun} ({low} to {high}), the budget is {self.format(self.limit)}"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a trial. None means no limit. The memory of the device is always a limit.

    Example:
        >>> Budget.parse(memory="38GiB", time="2h").trial_time_s
        7200.0
    """

    memory_bytes: int | None = None
    """Peak device memory."""
    memory_fraction: float | None = None
    """The same as a fraction of the device's memory, in (0, 1]."""
    host_memory_bytes: int | None = None
    """Memory of the host: of the trial's process, and of the workers of its loaders."""
    trial_time_s: float | None = None
    """Time of the whole trial."""
    epoch_time_s: float | None = None
    """Time of an epoch of training."""
    step_time_s: float | None = None
    """Time of one optimizer step, or of one batch of inference."""
    latency_s: float | None = None
    """Time of one batch of inference."""
    energy_j: float | None = None
    """Energy of one batch of inference."""
    cost: float | None = None
    """Cost of the whole trial, in the currency of the price."""
    price_per_hour: float | None = None
    """Price of an hour on the device."""

    @staticmethod
    def parse(
        memory: int | float | str | None = None,
        time: int | float | str | None = None,
        step_time: int | float | str | None = None,
        epoch_time: int | float | str | None = None,
        latency: int | float | str | None = None,
        energy: int | float | str | None = None,
        cost: int | float | str | None = None,
        price_per_hour: int | float | str | None = None,
        host_memory: int | float | str | None = None,
    ) -> Budget:
        """Return a budget from what people write: bytes, "38GiB" or a fraction of the device; seconds or "2h"; joules or "5J";
        dollars or "$2".

        Raises:
            ConfigurationError: If a limit is not positive or cannot be read. If a number below 1 MiB has no unit. If limits
                contradict each other. If one of ``cost`` and ``price_per_hour`` is missing.
        """
        fraction = _fraction(memory, "memory_budget")
        host_fraction = _fraction(host_memory, "host_memory_budget")
        if host_fraction is not None:
            from perfguard.devices.detect import host_memory_bytes

            host_memory = max(1, int(host_fraction * host_memory_bytes()))
        budget = Budget(
            memory_bytes=None if memory is None or fraction is not None else parse_bytes(memory, what="memory_budget"),
            memory_fraction=fraction,
            trial_time_s=None if time is None else parse_seconds(time, what="time_budget"),
            epoch_time_s=None if epoch_time is None else parse_seconds(epoch_time, what="epoch_time_budget"),
            step_time_s=None if step_time is None else parse_seconds(step_time, what="step_time_budget"),
            latency_s=None if latency is None else parse_seconds(latency, what="latency_budget"),
            energy_j=None if energy is None else parse_joules(energy, what="energy_budget"),
            cost=None if cost is None else parse_dollars(cost, what="cost_budget"),
            host_memory_bytes=None if host_memory is None else parse_bytes(host_memory, what="host_memory_budget"),
            price_per_hour=None if price_per_hour is None else parse_dollars(price_per_hour, what="price_per_hour"),
        )
        if cost is not None and price_per_hour is None:
            raise ConfigurationError(
                "cost_budget needs price_per_hour, the price of an hour on the device. Give both, for instance 2.5 for $2.50."
            )
        if cost is None and price_per_hour is not None:
            raise ConfigurationError("price_per_hour has no effect without cost_budget. Give both, or leave it out.")
        budget._check_times()
        return budget

    def _check_times(self) -> None:
        """A step is part of an epoch, and an epoch of a trial."""
        given = [(name, limit) for name, field in _NESTED_TIMES if (limit := getattr(self, field)) is not None]
        for (part, part_s), (whole, whole_s) in pairwise(given):
            if part_s > whole_s:
                raise ConfigurationError(
                    f"{part} ({format_seconds(part_s)}) is more than {whole} ({format_seconds(whole_s)}), but is a part of it. "
                    f"Leave {part} out, or lower it."
                )

    def check_device(self, device: Device) -> None:
        """Check that trials on ``device`` can have the memory of the budget.

        Raises:
            ConfigurationError: if the budget is more than the memory of the device, or not more than the driver's context.
        """
        if self.energy_j is not None and device.kind == "cpu":
            raise ConfigurationError(
                f"energy_budget cannot be checked: a CPU ({device.name}) has no energy counter. Leave it out, or name a GPU."
            )
        if self.memory_bytes is None and self.memory_fraction is None:
            return
        capacity_bytes = self.capacity_bytes(device)
        if self.memory_bytes is not None and self.memory_bytes > _NOMINAL * device.memory_bytes:
            raise ConfigurationError(
                f"A memory budget of {format_bytes(self.memory_bytes)} is more than {device.name} has "
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
        if self.cost is None or self.price_per_hour is None:
            return None
        return SECONDS_PER_HOUR * self.cost / self.price_per_hour

    @property
    def longest_trial_s(self) -> float | None:
        """Seconds that a trial may take by its time budget and its cost budget. None: neither limits it."""
        return min((seconds for seconds in (self.trial_time_s, self.paid_time_s) if seconds is not None), default=None)

    def capacity_bytes(self, device: Device) -> int:
        """The memory that a trial may use on ``device``."""
        if self.memory_fraction is not None:
            return int(self.memory_fraction * device.memory_bytes)
        return device.memory_bytes if self.memory_bytes is None else min(self.memory_bytes, device.memory_bytes)

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The limited quantities."""
        limited: dict[Quantity, float | None] = {
            "memory": 1,
            "host_memory": self.host_memory_bytes,
            "time": self.trial_time_s,
            "epoch_time": self.epoch_time_s,
            "step_time": self.step_time_s,
            "latency": self.latency_s,
            "energy": self.energy_j,
            "cost": self.cost,
        }
        return tuple(quantity for quantity, limit in limited.items() if limit is not None)

    def cannot_bind(
        self, workload: AnyWorkload, *, knows_time: bool, knows_energy: bool = True, ends: bool = False
    ) -> Iterator[tuple[str, str]]:
        """The name of each budget that cannot be checked for ``workload``, and a sentence on what is missing.

        Args:
            workload: what the trial runs.
            knows_time: whether the time of the trial is predicted.
            knows_energy: whether the energy of inference is predicted.
            ends: whether the study itself has an end that the trial must not outlast.
        """
        infers = workload.mode == "infer"
        unseen = getattr(workload, "unseen", None)  # of a captured trial
        why = unseen or "the loaders do not say how many there are"
        steps = "Give Workload(..., steps=...)." if unseen is None else f"The dry run did not see them: {why}."
        steps += f" They follow from {'epochs=..., or from ' if workload.steps_per_epoch else ''}the first trial that finishes."
        if self.host_memory_bytes is not None and getattr(workload, "host_memory", None) is None:
            yield (
                "host_memory_budget",
                (
                    "host_memory_budget needs a dry run of the objective: a Workload does not say what the host holds. Leave out "
                    "build=..., or host_memory_budget."
                ),
            )
        if (self.trial_time_s is not None or ends) and not knows_time:
            name = "time_budget" if self.trial_time_s is not None else "within_timeout"
            yield name, f"{name} needs the number of steps of a trial. {steps}"
        if self.cost is not None and not knows_time:
            yield "cost_budget", f"cost_budget needs the number of steps of a trial. {steps}"
        if self.epoch_time_s is not None and infers:
            yield "epoch_time_budget", "epoch_time_budget limits training, but the workload has mode='infer'. Leave it out."
        elif self.epoch_time_s is not None and workload.steps_per_epoch is None:
            yield (
                "epoch_time_budget",
                "epoch_time_budget needs the number of steps of an epoch. Give Workload(..., steps_per_epoch=...).",
            )
        if self.latency_s is not None and not infers:
            yield (
                "latency_budget",
                "latency_budget limits inference, but the workload trains. "
                "Give Workload(..., mode='infer'), or step_time_budget for training.",
            )
        if self.energy_j is not None and not infers:
            yield (
                "energy_budget",
                "energy_budget limits inference, but the workload trains. Give Workload(..., mode='infer'), or leave it out.",
            )
        elif self.energy_j is not None and not knows_energy:
            yield (
                "energy_budget",
                "energy_budget needs a predictor that knows energy. This one must first learn it from runs with measured "
                "energy on this device. Leave energy_budget out, or give another predictor.",
            )

    def limits(
        self,
        prediction: Prediction,
        device: Device,
        *,
        infers: bool = False,
        steps_per_epoch: int | None = None,
        time_left_s: float | None = None,
        host_memory: HostMemory | None = None,
    ) -> Iterator[Limit]:
        """Each limit with the prediction for it. A quantity without a prediction has no limit.

        Args:
            prediction: the cost of one step or one batch of inference.
            device: what it runs on.
            infers: whether it is inference. Latency and energy limit inference, and an epoch's time limits training.
            steps_per_epoch: steps of one epoch. None: unknown, so an epoch has no limit.
            time_left_s: seconds left of the study's time. This is a second limit on the trial's time.
            host_memory: what the host holds beside the device. None: unknown, so it has no limit.
        """
        yield Limit("memory", self.capacity_bytes(device), prediction.peak_memory)
        if self.host_memory_bytes is not None and host_memory is not None:
            yield Limit("host_memory", self.host_memory_bytes, needed_on_host(host_memory, prediction, device))
        trial_times = [seconds for seconds in (self.trial_time_s, time_left_s) if seconds is not None]
        if trial_times and prediction.total_time is not None:
            yield Limit("time", max(min(trial_times), 1e-9), prediction.total_time)
        if self.step_time_s is not None:
            yield Limit("step_time", self.step_time_s, prediction.step_time)
        if self.epoch_time_s is not None and steps_per_epoch is not None and not infers:
            yield Limit("epoch_time", self.epoch_time_s, prediction.step_time.scaled(steps_per_epoch))
        if self.latency_s is not None and infers:
            yield Limit("latency", self.latency_s, prediction.step_time)
        if self.energy_j is not None and infers and prediction.energy is not None:
            yield Limit("energy", self.energy_j, prediction.energy)
        if self.cost is not None and self.price_per_hour is not None:
            cost = prediction.cost(self.price_per_hour)
            if cost is not None:
                yield Limit("cost", self.cost, cost)


def needed_on_host(host_memory: HostMemory, prediction: Prediction, device: Device) -> Estimate:
    """Return the bytes that a trial holds in the memory of the host. A CPU is the host, so there the step is on it, too."""
    of_step = prediction.peak_memory.median if device.kind == "cpu" else 0.0
    return Estimate(host_memory.needed_bytes + of_step, _HOST_LOG_SIGMA)


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
        unit, whole = "GiB" if num_bytes < 1024 else "MiB", "the device" if name == "memory_budget" else "this machine's memory"
        raise ConfigurationError(
            f"{name}={memory!r} is {num_bytes:.10g} bytes. Write '{num_bytes:.10g}{unit}', or a fraction of {whole} such as 0.9."
        )
    return None

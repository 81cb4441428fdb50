"""A measurement log of a made-up study, as a guard would write it: real verdicts and sentences, numbers from a formula."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from perfguard import Estimate, Limit, MeasurementStore, Prediction, Verdict
from tests.perfguard.log_rows import DEVICE, MEASUREMENT

GIB = 2**30
CARD = replace(DEVICE, id="card", name="Made-up Card", memory_bytes=40 * GIB)
BUDGETS = {"memory": 32 * GIB, "time": 7200.0}
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"&amp;"


def cost_of(params: dict[str, Any]) -> tuple[float, float]:
    """Bytes and seconds of a trial: nearly products of powers, as real networks are."""
    memory = 0.6 * GIB + 4e5 * params["batch_size"] * params["width"] ** 0.9 * params["depth"] ** 0.5
    seconds = 0.15 * params["width"] ** 1.4 * params["depth"] * (1.0 if params["optimizer"] == "sgd" else 1.2)
    return memory, seconds


def verdict_on(prediction: Prediction) -> Verdict:
    total_time = prediction.total_time
    assert total_time is not None
    limits = [Limit("memory", BUDGETS["memory"], prediction.peak_memory), Limit("time", BUDGETS["time"], total_time)]
    return Verdict.of(prediction, limits, accepted=0.1)


def write_study(store: MeasurementStore, num_trials: int, *, study: str = "made up", hostile: bool = False) -> None:
    """Write ``num_trials`` decisions and the measurements of those that are launched; the same each time."""
    rng = random.Random(0)
    for number in range(num_trials):
        params: dict[str, Any] = {
            "batch_size": 2 ** rng.randint(4, 9),
            "width": rng.randint(16, 512),
            "depth": rng.randint(2, 24),
            "optimizer": rng.choice(["sgd", "adamw"]),
            "data": {"augment": HOSTILE if hostile else "flip"},
        }
        if hostile:
            params[HOSTILE] = number
        memory, seconds = cost_of(params)
        sigma = 0.05 + 0.4 / (1 + number / 20)
        prediction = Prediction(
            peak_memory=Estimate(memory * math.exp(rng.gauss(0, 0.04)), sigma / 3),
            step_time=Estimate(seconds / 1000 * math.exp(rng.gauss(0, sigma)), sigma),
            total_time=Estimate(seconds * math.exp(rng.gauss(0, sigma)), sigma),
            predictor="made-up-1",
            device_id=CARD.id,
            trained_on_device=True,
        )
        verdict = verdict_on(prediction)
        decision_id = store.record_decision(
            study=study,
            trial=number,
            graph=None,
            device=CARD,
            action=verdict.action,
            reason=f"{HOSTILE} {verdict.reason}" if hostile else verdict.reason,
            prediction=prediction,
            params=params,
        )
        if verdict.action == "launch":
            seconds *= 4.0 if number % 4 == 0 else 1.0  # now and then another program runs beside it
            measured = replace(MEASUREMENT, device_id=CARD.id, device_name=CARD.name, num_steps=1000, step_time_s=seconds / 1000)
            store.record_measurement(decision_id, replace(measured, peak_memory_bytes=int(memory), total_time_s=seconds))

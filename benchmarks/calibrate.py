"""What `perfguard calibrate` brings: errors on networks that it does not run, before it and after some of its steps.

    OMP_NUM_THREADS=1 python benchmarks/calibrate.py [--seconds 60] [--gpu cpu] [--record docs/results/data]

All of it is measured on this machine in one go. The weights have not seen this machine. Needs torchvision.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _record import parser_of, show
from torch import nn
from torchvision import models  # type: ignore[import-untyped]

from perfguard import Observation, TensorSpec, Workload, load_predictor, trace
from perfguard.calibrate import calibrate, measured_step
from perfguard.devices.detect import device_here
from perfguard.learning import CALIBRATION, assess
from perfguard.log import MeasurementStore
from perfguard.predictor import TARGETS, Target
from perfguard.workload import Mode

_LEARNT = (0, 3, 5, 10, 20)


_VIT = {"image_size": 64, "patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 128, "mlp_dim": 512}
_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": models.resnet18,
    "mobilenet": models.mobilenet_v3_small,
    "shufflenet": models.shufflenet_v2_x0_5,
    "squeezenet": models.squeezenet1_1,
    "vit": functools.partial(models.VisionTransformer, **_VIT),
    "gru": functools.partial(nn.GRU, 128, 192, num_layers=2, batch_first=True),
}


def workload(name: str, batch_size: int, mode: Mode) -> Workload:
    """One step of the network."""

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output[0][:, -1] if isinstance(output, tuple) else output, targets)

    return Workload(
        _NETWORKS[name](),
        inputs=(batch_size, 40, 128) if name == "gru" else (batch_size, 3, 64, 64),
        targets=TensorSpec((batch_size,), "int64"),
        loss=loss,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-4),
        mode=mode,
        retain="nothing",
        batch_on="device",
    )


def main() -> None:
    """Calibrate, run the other networks, and show a line for each number of steps that were learnt."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gpu", default="cpu")
    arguments = parser.parse_args()
    device, log, net = device_here(arguments.gpu), MeasurementStore(":memory:"), load_predictor()
    calibrate(device, log, seconds=arguments.seconds)
    runs, others = log.observations(device), list[Observation]()
    modes: tuple[Mode, ...] = ("train", "infer")
    for name, batch_size, mode in itertools.product(_NETWORKS, (2, 16), modes):
        make = functools.partial(workload, name, batch_size, mode)
        with torch.device("meta"):
            graph = trace(make(), target=device)
        others.append(Observation(graph, device, measured_step(make, device)))

    def score(target: Target) -> str:
        """Mean and median error of the others, and the share inside the 90% interval."""
        errors, inside = list[float](), list[bool]()
        for run in others:
            prediction = net.predict(run.graph, device).widened(found.widening)
            estimate = prediction.peak_memory if target == "memory" else prediction.step_time
            if (value := run.measured(target)) is not None and run.measurement.status == "ok":
                low, high = estimate.interval()
                errors.append(abs(estimate.median / value - 1))
                inside.append(low <= value <= high)
        return f"{statistics.fmean(errors):.0%} / {statistics.median(errors):.0%}; {statistics.fmean(inside):.0%}"

    rows = []
    for number in (*(number for number in _LEARNT if number < len(runs)), len(runs)):
        found = assess(runs[:number], study=CALIBRATION)
        net.fine_tune(found.observations)
        rows.append([str(number), *(score(target) for target in reversed(TARGETS))])
    show("calibration", ["steps learnt", "time", "memory"], rows, record=arguments.record)


if __name__ == "__main__":
    main()

"""How fast is the measurement log with a million measurements in it?

    python benchmarks/store.py [--rows 1000000] [--log FILE_OR_URL]

Builds a log in bulk, then times, on that log: opening it; appending decisions and measurements one call at a time, as a study
does, each in a transaction of its own; inserting them in bulk, as an import does; and sampling training batches at random, with
the graphs decoded for the first time and again.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _record import parser_of, show
from torch import nn

from perfguard import (
    Device,
    Estimate,
    Measurement,
    MeasurementStore,
    OpGraph,
    Prediction,
    TensorSpec,
    Workload,
    resolve_device,
    trace,
)
from perfguard.log import _schema as schema

_ROWS_AT_ONCE = 50_000
_NUM_GRAPHS = 500
_BATCH = 256


def graphs() -> list[OpGraph]:
    """Perceptrons of two to eleven layers and fifty widths."""
    made = []
    for depth, width in itertools.product(range(2, 12), range(64, 64 + 50 * 8, 8)):
        layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        made.append(trace(Workload(model, (64, width), TensorSpec((64,), "int64"), nn.functional.cross_entropy)))
    return made[:_NUM_GRAPHS]


def entries(numbers: range, known: list[OpGraph], device: Device) -> list[schema.Entry]:
    """Decisions and their measurements, each table's in the order of its key."""
    decision = schema.decision_entry(
        prediction(device),
        {"lr": 0.1, "width": 64},
        study="study",
        action="launch",
        reason="needs 1.0 GiB (0.9 GiB to 1.1 GiB), the budget is 38.0 GiB",
        device_hash=schema.device_entry(device).row["content_hash"],
    ).row
    measured = schema.measurement_entry(measurement(device)).row
    decisions, measurements = [], []
    for number, decision_id in zip(numbers, sorted(uuid.uuid4().hex for _ in numbers), strict=True):
        now_ns, graph_hash = time.time_ns(), known[number % len(known)].content_hash
        keys = {"decision_id": decision_id, "trial": number, "graph_hash": graph_hash, "created_at_ns": now_ns}
        decisions.append(schema.Entry("decisions", decision | keys))
        measurements.append(schema.Entry("measurements", measured | {"decision_id": decision_id, "recorded_at_ns": now_ns}))
    return decisions + measurements


def prediction(device: Device) -> Prediction:
    """What a decision carries."""
    seconds = Estimate(0.1, 0.1)
    return Prediction(Estimate(2**30, 0.1), seconds, seconds.scaled(100), "guardnet-1", device.id, trained_on_device=True)


def measurement(device: Device) -> Measurement:
    """What a run on a GPU tells."""
    return Measurement(
        "ok", device.id, device.name, 2**30, 0.1, 10.0, 100, "nvml-process+allocator", "torch2.13.0", "", 2**29, 2**29,
        0.9, 2500.0, 1.4e9, "power cap", 0.01, 0, "550.54", "high",
    )  # fmt: skip


def rows_per_second(call: Callable[[int], int], numbers: range) -> str:
    """Rows that ``call`` writes over ``numbers``, by the second, and by the second of this process's own work."""
    start, own_start = time.perf_counter(), time.process_time()
    rows = sum(call(number) for number in numbers)
    return f"{rows / (time.perf_counter() - start):,.0f} ({rows / (time.process_time() - own_start):,.0f})"


def sampling(store: MeasurementStore, draw: random.Random, times: int, device_id: str | None = None) -> list[tuple[float, float]]:
    """Wall-clock and CPU milliseconds of each draw."""
    taken = []
    for _ in range(times):
        start, own_start = time.perf_counter(), time.process_time()
        assert len(store.sample(_BATCH, draw, device_id=device_id)) > 0.7 * _BATCH  # stretches may overlap
        taken.append(((time.perf_counter() - start) * 1e3, (time.process_time() - own_start) * 1e3))
    return taken


def build(store: MeasurementStore, num_rows: int, known: list[OpGraph], device: Device) -> None:
    """Fill the log with ``num_rows`` decisions and as many measurements."""
    store.insert([schema.device_entry(device), *map(schema.graph_entry, known)])
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        store.insert(entries(range(start, min(start + _ROWS_AT_ONCE, num_rows)), known, device))


def main() -> None:
    """Build, time, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--log", help="a path or a URL that does not exist yet; default: an SQLite file that is removed again")
    arguments = parser.parse_args()
    device, known = device_and_graphs()
    with tempfile.TemporaryDirectory() as folder:
        location = arguments.log or str(Path(folder) / "log.db")
        rows = list(measure(location, arguments.rows, device, known))
    show("store", [f"{arguments.rows:,} measurements", "result"], rows, record=arguments.record)


def device_and_graphs() -> tuple[Device, list[OpGraph]]:
    """What the rows refer to."""
    return resolve_device("a100"), graphs()


def measure(location: str, num_rows: int, device: Device, known: list[OpGraph]) -> Iterator[tuple[str, str]]:
    """The lines of the table."""
    store = MeasurementStore(location)
    start, own_start = time.perf_counter(), time.process_time()
    build(store, num_rows, known, device)
    yield "building it in bulk (CPU time)", f"{time.perf_counter() - start:.0f} s ({time.process_time() - own_start:.0f} s)"
    store.close()
    if Path(location).exists():
        yield "size", f"{Path(location).stat().st_size / 2**20:.0f} MiB"
    start = time.perf_counter()
    store = MeasurementStore(location)
    yield "opening", f"{(time.perf_counter() - start) * 1e3:.0f} ms"

    def append(number: int) -> int:
        row: dict[str, Any] = {"study": "s", "trial": number, "action": "launch", "reason": "fits", "params": {"lr": 0.1}}
        decision_id = store.record_decision(graph=known[number % 500], device=device, prediction=prediction(device), **row)
        store.record_measurement(decision_id, measurement(device))
        return 2

    append(0)
    yield "rows/s appended one at a time (of CPU time)", rows_per_second(append, range(1, 2000))

    def insert(number: int) -> int:
        return store.insert(entries(range(number * 500, number * 500 + 500), known, device))

    yield "rows/s inserted a thousand at once (of CPU time)", rows_per_second(insert, range(20))
    store.close()
    store = MeasurementStore(location)
    draw = random.Random(0)
    first = sampling(store, draw, 1)
    yield f"sampling {_BATCH}, the first time, in ms (CPU time)", f"{first[0][0]:.0f} ({first[0][1]:.0f})"
    for name, device_id in (("all devices", None), ("one device", device.id)):
        times = sampling(store, draw, 50, device_id)
        median, worst = (statistics.median(wall for wall, _ in times), max(wall for wall, _ in times))
        own = statistics.median(own for _, own in times)
        yield f"sampling {_BATCH} of {name}, median and worst, in ms (CPU time)", f"{median:.0f}, {worst:.0f} ({own:.0f})"
    start = time.perf_counter()
    assert len(store.observations(device.id)) == min(500, num_rows)
    yield "the newest 500 of a device", f"{(time.perf_counter() - start) * 1e3:.0f} ms"
    store.close()


if __name__ == "__main__":
    main()

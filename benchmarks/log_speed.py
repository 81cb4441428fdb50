"""How fast is the measurement log with a million measurements in it?

    python benchmarks/log_speed.py [--rows 1000000] [--log FILE_OR_URL]

Builds a log in bulk. Then it times, on that log: opening it; decisions and measurements one call at a time, as a study writes
them, each in a transaction of its own; the runs that a guard learns from; and the records of a study.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from _record import parser_of, show
from torch import nn

from perfguard import (
    Device,
    Estimate,
    Limit,
    Measurement,
    MeasurementStore,
    OpGraph,
    Prediction,
    TensorSpec,
    Verdict,
    Workload,
    resolve_device,
    trace,
)
from perfguard.log_database import Database, parse_url
from perfguard.log_tables import Row, decision_row, device_row, graph_row, measurement_row


def make_graphs() -> list[OpGraph]:
    """Return 500 perceptrons of two to eleven layers and fifty widths."""
    made = []
    for depth, width in itertools.product(range(2, 12), range(64, 64 + 50 * 8, 8)):
        layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        made.append(trace(Workload(model, (64, width), TensorSpec((64,), "int64"), nn.functional.cross_entropy)))
    return made


def make_verdict(device: Device) -> Verdict:
    """Return a verdict with a limit of memory and of time."""
    seconds, memory = Estimate(0.1, 0.1), Estimate(2**30, 0.1)
    prediction = Prediction(memory, seconds, seconds.scaled(100), "guardnet-1", device.id, trained_on_device=True)
    limits = Limit("memory", 38 * 2**30, memory), Limit("time", 7200.0, seconds.scaled(100))
    return Verdict.of(prediction, limits, accepted=0.05)


def make_measurement(device: Device) -> Measurement:
    """Return what a run on a GPU tells."""
    return Measurement(
        "ok", device.id, device.name, 2**30, 0.1, 10.0, 100, "nvml-process+allocator", "torch2.13.0", "", 2**29, 2**29,
        0.9, 2500.0, 1.4e9, "power cap", 0.01, 0, "550.54", "high",
    )  # fmt: skip


def build(database: Database, num_rows: int, known: list[OpGraph], device: Device) -> None:
    """Fill the log with ``num_rows`` decisions in studies of a thousand trials, and as many measurements."""
    database.write([device_row(device), *map(graph_row, known)])
    device_hash = device_row(device).values["content_hash"]
    verdict, measurement = make_verdict(device), make_measurement(device)
    for start in range(0, num_rows, 1000):
        rows: list[Row] = []
        for number in range(start, min(start + 1000, num_rows)):
            keys = {"decision_id": uuid.uuid4().hex, "trial": number, "graph_hash": known[number % len(known)].content_hash}
            keys |= {"study": f"study {start}", "created_at_ns": time.time_ns(), "device_hash": device_hash}
            rows.append(decision_row(verdict, {"lr": 0.1, "width": 64}, trial_id=None, host="node", **keys))
            keys = {"decision_id": keys["decision_id"], "recorded_at_ns": time.time_ns(), "set_aside": None}
            rows.append(measurement_row(measurement, **keys))
        database.write(rows)


def ms_of(call: Callable[[], object]) -> str:
    """Milliseconds of a call, the best of three."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e3)
    return f"{min(taken):.1f}"


def measure(location: str, num_rows: int) -> Iterator[tuple[str, str]]:
    """The lines of the table."""
    device, known = resolve_device("a100"), make_graphs()
    verdict, measurement = make_verdict(device), make_measurement(device)
    start = time.perf_counter()
    database = Database(parse_url(location), 2.0)
    build(database, num_rows, known, device)
    database.engine.dispose()
    yield "building it, s", f"{time.perf_counter() - start:.0f}"
    if Path(location).exists():
        yield "size, MiB", f"{Path(location).stat().st_size / 2**20:.0f}"
    yield "opening, ms", ms_of(lambda: MeasurementStore(location).close())
    with MeasurementStore(location) as store:
        start = time.perf_counter()
        for number in range(2000):
            keys = {"study": "s", "trial": number, "params": {"lr": 0.1}}
            decision_id = store.record_decision(verdict, graph=known[number % 500], device=device, **keys)  # type: ignore[arg-type]
            store.record_measurement(decision_id, measurement)
        yield "rows a second, one call each", f"{4000 / (time.perf_counter() - start):,.0f}"
    with MeasurementStore(location) as store:
        start = time.perf_counter()
        assert len(store.observations(device)) == 500
        yield "the newest 500 runs, first call, ms", f"{(time.perf_counter() - start) * 1e3:.0f}"
        yield "the newest 500 runs again, ms", ms_of(lambda: store.observations(device))
        yield "the records of a study of 1,000, ms", ms_of(lambda: store.records("study 0"))


def main() -> None:
    """Build, time, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--log", help="a path or a URL that does not exist yet; default: an SQLite file that is removed again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(arguments.log or str(Path(folder) / "log.db"), arguments.rows))
    show("log", [f"{arguments.rows:,} measurements", "result"], rows, record=arguments.record)


if __name__ == "__main__":
    main()

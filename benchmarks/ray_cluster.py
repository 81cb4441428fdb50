"""A Ray cluster of four nodes on one machine: what the guard costs, what it saves, and what faults do to it.

    python benchmarks/ray_cluster.py runs [--trials 100]       100 trials with and without the guard
    python benchmarks/ray_cluster.py faults [--trials 20]      a node removed, the database restarted

The nodes are those of `ray.cluster_utils.Cluster`: processes that know only each other's address. Trials train a small network
for real, on the CPU. The log is a PostgreSQL server of its own (`--postgres DIR` names the folder of `initdb` and `pg_ctl`), or
with `--sqlite` a file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
}

import ray
import torch
from _record import parser_of, show
from ray import tune
from ray.cluster_utils import Cluster
from ray.tune.search import BasicVariantGenerator
from torch import nn

import perfguard_ray
from perfguard import MeasurementStore, TensorSpec, Workload
from perfguard.quantities import parse_bytes
from perfguard_ray import PerfGuardCallback, PerfGuardVariantGenerator

NODES = 4
MEMORY_BUDGET = "12MiB"
SPACE = {
    "width": tune.choice([64, 256, 512, 1024]),
    "batch_size": tune.choice([64, 256, 1024]),
    "lr": tune.loguniform(1e-3, 1e-1),
}
STEPS = 12


def make_model(config: Mapping[str, Any]) -> nn.Module:
    width = config["width"]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def build(config: Mapping[str, Any]) -> Workload:
    batch_size = config["batch_size"]
    return Workload(
        make_model(config),
        inputs=(batch_size, 64),
        targets=TensorSpec((batch_size,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=config["lr"]),
        steps=STEPS,
    )


def train(config: dict[str, Any]) -> None:
    """Real training: a small perceptron on random images."""
    with perfguard_ray.measure():
        torch.manual_seed(0)
        model = make_model(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        images, labels = torch.randn(config["batch_size"], 64), torch.randint(10, (config["batch_size"],))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if step % 6 == 5:
                tune.report({"loss": float(loss.detach())})


# --- machines


@contextlib.contextmanager
def cluster(cpus_per_node: int = 1) -> Iterator[Cluster]:
    """Four nodes with an object store of 100 MB each."""
    node: dict[str, Any] = {"num_cpus": cpus_per_node, "object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            nodes.add_node(**node)
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        nodes.wait_for_nodes()
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


class Postgres:
    """A PostgreSQL server of its own, as the user postgres where we are root."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.data = folder / "pgdata"
        self.binaries = binaries
        self._run("initdb", "--auth=trust", "--username=postgres", "-D", str(self.data))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self.data} -c max_connections=200"
        self._run("pg_ctl", "-D", str(self.data), "-w", "-l", str(self.data / "log"), "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-w", "-m", "immediate", "stop")

    def _run(self, *command: str) -> None:
        words = [str(self.binaries / command[0]), *command[1:]]
        if os.geteuid() == 0:
            words = ["runuser", "-u", "postgres", "--", *words]
        subprocess.run(words, check=True, capture_output=True, text=True, cwd="/")


@contextlib.contextmanager
def log_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Postgres | None]]:
    """A fresh measurement log, and the server behind it."""
    folder = Path(tempfile.mkdtemp(prefix="perfguard-ray-"))
    folder.chmod(0o777)
    server = None if arguments.sqlite else Postgres(folder, arguments.postgres)
    try:
        yield (f"{folder}/log.db" if server is None else server.url), server
    finally:
        if server is not None:
            with contextlib.suppress(subprocess.CalledProcessError):
                server.stop()
        shutil.rmtree(folder, ignore_errors=True)


# --- runs


def run(trials: int, log: str, *, guarded: bool, seed: int, disturb: Callable[[], None] | None = None) -> dict[str, Any]:
    """One Tune run; what came of it."""
    folder = tempfile.mkdtemp(prefix="perfguard-ray-run-")
    plain = BasicVariantGenerator(random_state=seed, max_concurrent=0)
    verdict_s: list[float] = []
    # Without the guard the budget is out of reach, so that all runs and is measured in the same way.
    budget = MEMORY_BUDGET if guarded else None
    study = f"run-{time.time_ns()}"
    search = PerfGuardVariantGenerator(plain, gpu="cpu", build=build, memory_budget=budget, log=log, study=study)
    judge = search.ledger.judge

    def timed_judge(config: Mapping[str, Any], **options: Any) -> Any:
        start = time.perf_counter()
        entry = judge(config, **options)
        verdict_s.append(time.perf_counter() - start)
        return entry

    search.ledger.judge = timed_judge  # type: ignore[method-assign]
    tuner = tune.Tuner(
        train,
        param_space=SPACE,
        tune_config=tune.TuneConfig(search_alg=search, num_samples=trials, metric="loss", mode="min", reuse_actors=True),
        run_config=tune.RunConfig(
            storage_path=folder,
            verbose=0,
            callbacks=[PerfGuardCallback(search)],
            failure_config=tune.FailureConfig(max_failures=3),
        ),
    )
    trouble = None if disturb is None else threading.Thread(target=disturb, daemon=True)
    if trouble is not None:
        trouble.start()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = tuner.fit()
        search.ledger.guard.log.flush()
    elapsed_s = time.perf_counter() - start
    if trouble is not None:
        trouble.join()
    shutil.rmtree(folder, ignore_errors=True)
    records = MeasurementStore(log).records(study)
    ran = [record for record in records if record.status is not None]
    wasted = [record for record in ran if record.measured.get("memory", 0) > parse_bytes(MEMORY_BUDGET)]
    return {
        "trials": len(results),
        "errors": results.num_errors,
        "logged": len(ran),
        "rejected": sum(record.is_pruned for record in records),
        "wasted": len(wasted),
        "wasted_s": sum(record.measured.get("time", 0) for record in wasted),
        "elapsed_s": elapsed_s,
        "verdict_ms": 1e3 * statistics.median(verdict_s) if verdict_s else 0.0,
        "verdict_p99_ms": 1e3 * sorted(verdict_s)[int(0.99 * (len(verdict_s) - 1))] if verdict_s else 0.0,
        "warnings": sorted({f"{one.category.__name__}" for one in caught if "perfguard" in str(one.category.__module__)}),
    }


COLUMNS = ("run", "trials that ran", "failed", "rows logged", "rejected", "over the budget", "s in those", "s in all",
           "verdict, ms", "99th percentile, ms", "warnings")  # fmt: skip


def row_of(name: str, one: Mapping[str, Any]) -> list[str]:
    """Return the line of one run."""
    counts = (str(one[key]) for key in ("trials", "errors", "logged", "rejected", "wasted"))
    times = f"{one['wasted_s']:.1f}", f"{one['elapsed_s']:.0f}", f"{one['verdict_ms']:.1f}", f"{one['verdict_p99_ms']:.1f}"
    return [name, *counts, *times, ", ".join(one["warnings"]) or "-"]


def compare_runs(arguments: argparse.Namespace) -> None:
    """The same search with and without the guard, on fresh logs."""
    rows = []
    for name, guarded in (("without the guard", False), ("with the guard", True)):
        with log_of(arguments) as (log, _), cluster():
            rows.append(row_of(name, run(arguments.trials, log, guarded=guarded, seed=arguments.seed)))
    show("ray-runs", COLUMNS, rows, record=arguments.record)


def break_things(arguments: argparse.Namespace) -> None:
    """One run for each fault, which strikes while trials run."""
    rows = []
    for name in ("node removed", "database restarted"):
        if name == "database restarted" and arguments.sqlite:
            continue
        with log_of(arguments) as (log, server), cluster() as nodes:
            disturb = functools.partial(_disturb, name, nodes, server)
            rows.append(row_of(name, run(arguments.trials, log, guarded=True, seed=arguments.seed, disturb=disturb)))
    show("ray-faults", COLUMNS, rows, record=arguments.record)


def _disturb(fault: str, nodes: Cluster, server: Postgres | None) -> None:
    time.sleep(8)
    if fault == "node removed":
        nodes.remove_node(sorted(nodes.worker_nodes, key=str)[0], allow_graceful=False)
    else:
        assert server is not None
        server.stop()
        time.sleep(5)
        server.start()


def main() -> None:
    """Run one part."""
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=["runs", "faults"])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sqlite", action="store_true", help="a file instead of a PostgreSQL server")
    parser.add_argument("--postgres", type=Path, default=Path("/usr/lib/postgresql/15/bin"), help="folder of initdb and pg_ctl")
    arguments = parser.parse_args()
    {"runs": compare_runs, "faults": break_things}[arguments.part](arguments)


if __name__ == "__main__":
    main()

"""Processes that write to a log at once, or die while they write: imported once, forked often. Run by test_faults.py.

    python crowd.py kill_writers PATH SCHEMA_1_LOG ROUNDS      one line of JSON: the ids that were acknowledged
    python crowd.py kill_migrations PATH SCHEMA_1_LOG ROUNDS
    python crowd.py write_together URL PROCESSES DECISIONS     one line of JSON: the ids that were written

Only plain forks, of a process with one thread: nothing here may start another.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import alembic.migration
import alembic.operations  # noqa: F401  so that a child is killed while it migrates, and not while it imports

from perfguard.log import MeasurementStore
from perfguard.measure import Measurement

MEASUREMENT = Measurement("ok", "toy", "Toy", 1100, 0.3, 30.0, 100, "double", "torch", note="x" * 500)


def write(store: MeasurementStore, trial: int) -> str:
    """A decision and its measurement; back when both are acknowledged."""
    decision_id = store.record_decision(
        study="crowd", trial=trial, graph=None, device=None, action="launch", reason="x" * 500, prediction=None, params={}
    )
    store.record_measurement(decision_id, MEASUREMENT)
    return decision_id


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A child that does ``work`` with the writing end of a pipe; its id and the reading end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 1
        try:
            work(writer)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    return pid, reader


def read_all(reader: int) -> list[str]:
    """The whole lines that a child wrote before it ended."""
    with os.fdopen(reader, "rb") as file:
        *lines, _ = file.read().decode().split("\n")
    return lines


def kill_writers(path: str, _template: str, rounds: str) -> None:
    """Kill -9 a writer, who also promotes weights, at a random moment, again and again, on the same log."""

    def write_for_ever(writer: int) -> None:
        with MeasurementStore(path) as store:
            for trial in range(10**9):
                os.write(writer, f"{write(store, trial)}\n".encode())
                if trial % 3 == 0:
                    weights_id = store.record_weights(predictor="crowd", data=b"x" * 1000)
                    store.set_weights_state(weights_id, "promoted")

    acknowledged: list[str] = []
    for _ in range(int(rounds)):
        is_open = random.random() < 0.9  # the others die while they open the log
        acknowledged += killed_after(write_for_ever, random.uniform(0.0, 0.05), first_line=is_open)
    print(json.dumps(acknowledged))


def kill_migrations(path: str, template: str, rounds: str) -> None:
    """Kill -9 a process that migrates an old log, then let another one open it and see what it finds."""
    found = []

    def open_it(writer: int) -> None:
        MeasurementStore(path).close()
        os.write(writer, b"migrated\n")

    def look(writer: int) -> None:
        with MeasurementStore(path) as store:
            counts = store.counts()
            last = store.decisions(newest=2)
            os.write(writer, f"{counts['decisions']} {counts['measurements']} {last[0].status}\n".encode())

    for _ in range(int(rounds)):
        for leftover in Path(path).parent.glob(f"{Path(path).name}*"):
            leftover.unlink()
        shutil.copy(template, path)
        was_done = bool(killed_after(open_it, random.uniform(0.0, 0.03)))
        pid, reader = forked(look)
        (line,) = read_all(reader)
        os.waitpid(pid, 0)
        found.append([line, was_done])
    print(json.dumps(found))


def killed_after(work: Callable[[int], None], seconds: float, *, first_line: bool = False) -> list[str]:
    """What a child wrote until it was killed, ``seconds`` after its start or after its first line."""
    pid, reader = forked(work)
    if first_line:
        select.select([reader], [], [], 10.0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    lines = read_all(reader)
    os.waitpid(pid, 0)
    return lines


def write_together(url: str, processes: str, decisions: str) -> None:
    """Processes that begin at the same moment, on a log that is not there yet."""
    go_reader, go_writer = os.pipe()

    def work(writer: int) -> None:
        os.close(go_writer)
        os.read(go_reader, 1)  # end of file, when all are there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a row that waits for the lock is kept; it must arrive all the same
            with MeasurementStore(url) as store:
                for trial in range(int(decisions)):
                    os.write(writer, f"{write(store, trial)}\n".encode())

    children = [forked(work) for _ in range(int(processes))]
    os.close(go_reader)
    os.close(go_writer)
    written = [line for _, reader in children for line in read_all(reader)]
    statuses = [os.waitpid(pid, 0)[1] for pid, _ in children]
    assert not any(statuses), statuses
    print(json.dumps(written))


if __name__ == "__main__":
    {"kill_writers": kill_writers, "kill_migrations": kill_migrations, "write_together": write_together}[sys.argv[1]](
        *sys.argv[2:]
    )

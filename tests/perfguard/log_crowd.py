"""Processes that write to a log at once, or die while they write: imported once, forked often. Run by test_log_faults.py.

    python log_crowd.py kill_writers PATH ROUNDS                   one line of JSON: the ids that were acknowledged
    python log_crowd.py write_together URL PROCESSES DECISIONS     one line of JSON: the ids that were written

Only plain forks, of a process with one thread: nothing here may start another.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable

from perfguard.log import MeasurementStore
from perfguard.measure import Measurement
from perfguard.verdict import Verdict

MEASUREMENT = Measurement("ok", "toy", "Toy", 1100, 0.3, 30.0, 100, "double", "torch", note="x" * 500)


def write(store: MeasurementStore, trial: int) -> str:
    """A decision and its measurement; back when both are acknowledged."""
    verdict = Verdict(action="launch", remark="x" * 500)
    decision_id = store.record_decision(verdict, graph=None, device=None, study="crowd", trial=trial, params={})
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


def kill_writers(path: str, rounds: str) -> None:
    """Kill -9 a writer, who also promotes weights, at a random moment, again and again, on the same log."""

    def write_for_ever(writer: int) -> None:
        with MeasurementStore(path) as store:
            for trial in range(10**9):
                os.write(writer, f"{write(store, trial)}\n".encode())
                if trial % 3 == 0:
                    store.promote("crowd", b"x" * 1000)

    acknowledged: list[str] = []
    for _ in range(int(rounds)):
        is_open = random.random() < 0.9  # the others die while they open the log
        acknowledged += killed_after(write_for_ever, random.uniform(0.0, 0.05), first_line=is_open)
    print(json.dumps(acknowledged))


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
    what, *words = sys.argv[1:]
    kill_writers(*words) if what == "kill_writers" else write_together(*words)

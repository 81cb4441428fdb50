"""One verdict for all ranks of a process group: rank 0 judges, all prune together, and one row goes into the log.

Rank 0 has Optuna's trial, and the other ranks have None. They talk through the store of the process group and not by collectives,
so no rank waits for ever for one that has failed. Each trial has keys of its own:

    joined/RANK    another rank has begun the trial
    verdict        what rank 0 decided: the columns of the verdict, or the error that ends the trial on all ranks
    ended/RANK     what the trial cost there
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import optuna

from perfguard.exceptions import ConfigurationError, UnguardedTrialError
from perfguard.measure import Measurement, Status

LONGEST_WAIT_S = 60.0
"""How long a rank that has ended its trial waits for the others to end theirs. They run in lockstep until then."""
_WORSE: tuple[Status, ...] = ("ok", "interrupted", "failed", "timeout", "oom")
"""The last of these that a rank ended with is the trial's: the other ranks fail because that one does."""
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def own_trial(trial: Any) -> Any:
    """Return Optuna's trial behind a TorchDistributedTrial, which is None on all ranks but 0. Any other trial is its own."""
    return trial._delegate if type(trial).__name__ == "TorchDistributedTrial" else trial  # private (optuna-integration 3 to 5)


def leads_ranks() -> bool:
    """Return whether this process is rank 0 of several, so that an error that it raises alone would leave the others waiting."""
    return _group_size() > 1 and sys.modules["torch"].distributed.get_rank() == 0


def _group_size() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size())


class Ranks:
    """The ranks that run one trial together.

    All ranks of the default group do. Subgroups with a study each are not known here.

    Args:
        name: of what all ranks call for the trial. They call it equally often.
    """

    def __init__(self, name: str) -> None:
        c10d: Any = sys.modules["torch"].distributed.distributed_c10d
        self._rank, self._size = c10d.get_rank(), c10d.get_world_size()
        # The group's store has no public name (PyTorch 1.8 to 2.13).
        self._store = c10d.PrefixStore(f"perfguard/{name}/{next(_numbers[name])}", c10d._get_default_store())
        self.missing: list[int] = []
        """The other ranks that had not ended the trial when this rank did."""

    @classmethod
    def of(cls, trial: optuna.Trial | None, name: str) -> Ranks | None:
        """Return the ranks that run ``trial``. None: this process runs it alone.

        Raises:
            ConfigurationError: if there is no trial, and rank 0 has none either.
        """
        if trial is not None:
            return cls(name) if leads_ranks() else None  # another rank with a trial has a study of its own
        if _group_size() == 1 or leads_ranks():
            raise ConfigurationError(
                "There is no trial. Only the ranks other than 0 of a process group (torch.distributed) give None for it. "
                "Make the process group before the first trial, by init_process_group() or Accelerator()."
            )
        return cls(name)

    @contextmanager
    def judging(self) -> Iterator[dict[str, Any]]:
        """Share with the other ranks how the block of rank 0 ends. It may add the columns of a verdict to what it gets."""
        shared: dict[str, Any] = {}
        try:
            yield shared
        except optuna.TrialPruned as error:
            shared = {"pruned": str(error)}
            raise
        except BaseException as error:
            shared = {"error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            self._store.set("verdict", json.dumps(shared))

    def join(self) -> dict[str, Any]:
        """Wait on another rank for what rank 0 has shared.

        Raises:
            optuna.TrialPruned: if rank 0 prunes the trial.
            UnguardedTrialError: if rank 0 could not begin it.
        """
        self._store.set(f"joined/{self._rank}", "")
        self._store.wait(["verdict"], datetime.timedelta(minutes=30))  # as long as a TorchDistributedTrial waits for rank 0
        shared: dict[str, Any] = json.loads(self._store.get("verdict"))
        if "pruned" in shared:
            raise optuna.TrialPruned(shared["pruned"])
        if "error" in shared:
            raise UnguardedTrialError(f"Rank 0 could not begin the trial: {shared['error']}")
        return shared

    def end(self, own: Measurement | None, status: Status) -> Measurement | None:
        """Tell the other ranks that this one has ended the trial. On rank 0, return what it cost on all that have ended it.

        Rank 0 waits for the others if it has measured the trial. Another rank waits only if it ran out of memory: the trial is
        pruned if all have ended it. A rank that ends it alone must fail, because the others wait for it in a collective of the
        trial.
        """
        self.missing = others = [rank for rank in range(self._size) if rank != self._rank]
        is_merged = self._rank == 0 and own is not None and status == "ok"
        ends_at = time.monotonic() + (LONGEST_WAIT_S if is_merged or status == "oom" else 0.0)
        try:
            self._store.set(f"ended/{self._rank}", json.dumps(None if own is None else asdict(own)))
            others = [rank for rank in others if rank == 0 or self._store.check([f"joined/{rank}"])]
            while missing := [rank for rank in others if not self._store.check([f"ended/{rank}"])]:
                if time.monotonic() >= ends_at:
                    break
                time.sleep(0.01)
            ended = {rank: json.loads(self._store.get(f"ended/{rank}")) for rank in others if rank not in missing}
        except RuntimeError:  # the process that keeps the store is gone
            return own
        self.missing = missing
        if self._rank or own is None:
            return own
        return _of_all({0: own} | {rank: Measurement(**fields) for rank, fields in ended.items() if fields}, missing)


def _of_all(measured: Mapping[int, Measurement], missing: Sequence[int]) -> Measurement:
    """Return the largest memory and the slowest step of all ranks, with the worst status."""
    largest = max(measured.values(), key=lambda one: one.peak_memory_bytes or 0)
    notes = [f"rank {rank}: {one.note}" for rank, one in measured.items() if one.note]
    notes += [f"rank {rank} ran on {one.device_name}" for rank, one in measured.items() if one.device_id != largest.device_id]
    notes += [f"rank {rank} did not end the trial" for rank in missing]
    status = max((one.status for one in measured.values()), key=_WORSE.index)
    return replace(
        largest,
        status="failed" if missing and status == "ok" else status,
        step_time_s=max((one.step_time_s for one in measured.values() if one.step_time_s is not None), default=None),
        total_time_s=max(one.total_time_s for one in measured.values()),
        note="; ".join(notes),
    )

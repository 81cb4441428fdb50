"""One verdict for all ranks of a process group: rank 0 judges, all prune together, and one row goes into the log.

Rank 0 has Optuna's trial, and the other ranks have None. They talk through the store of the process group and not by collectives,
so no rank waits for ever for one that has failed. Each trial has keys of its own:

    joined/RANK    another rank has begun the trial
    verdict        what rank 0 decided: the columns of the verdict, or the error that ends the trial on all ranks
    repair         what `repair_of` returns on all ranks
    ended/RANK     how the trial ended there, how many collectives it took part in, and what it cost
    apart          after an error of memory: why the ranks do not end the trial together, or "", and whether it runs again

After an error of memory, ranks go on together only if no collective waits for one that will not come: each has ended the trial,
and has begun as many collectives as the others. The first rank that knows decides, and the others read what it has decided.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any

import optuna

from perfguard.exceptions import ConfigurationError, UnguardedTrialError, UnguardedTrialWarning, warn_user
from perfguard.measure import Measurement, Status
from perfguard.repair import AS_PROPOSED, Repair

LONGEST_WAIT_S = 60.0
"""How long a rank that has ended its trial waits for the others to end theirs. They run in lockstep until then."""
_LONGEST_VERDICT = datetime.timedelta(minutes=30)
"""As long as a TorchDistributedTrial waits for rank 0."""
_WORSE: tuple[Status, ...] = ("ok", "interrupted", "failed", "timeout", "oom")
"""The last of these that a rank ended with is the trial's: the other ranks fail because that one does."""
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def own_trial(trial: Any) -> Any:
    """Return Optuna's trial behind a TorchDistributedTrial, which is None on all ranks but 0. Any other trial is its own."""
    return trial._delegate if type(trial).__name__ == "TorchDistributedTrial" else trial  # private (optuna-integration 3 to 5)


running: ContextVar[Ranks | None] = ContextVar("running", default=None)
"""The ranks that run a guarded objective at the moment."""


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
        self._name = name
        self._num_tries = 0
        self.begin()

    def begin(self) -> None:
        """Begin a try of the trial. All ranks do."""
        c10d: Any = sys.modules["torch"].distributed.distributed_c10d
        self._rank = c10d.get_rank()
        self._size = c10d.get_world_size()
        # The group's store has no public name (PyTorch 1.8 to 2.13).
        self._store = c10d.PrefixStore(f"perfguard/{self._name}/{next(_numbers[self._name])}", c10d._get_default_store())
        self._num_tries += 1
        self._is_over = False
        self.end_together = False
        """Whether all ranks have ended the trial, at least one of them out of memory, and can go on together."""
        self.repeat = False
        """Whether they can run it once more: none has completed it, and this was the first try."""

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
        self._store.wait(["verdict"], _LONGEST_VERDICT)
        shared: dict[str, Any] = json.loads(self._store.get("verdict"))
        if "pruned" in shared:
            raise optuna.TrialPruned(shared["pruned"])
        if "error" in shared:
            raise UnguardedTrialError(f"Rank 0 could not begin the trial: {shared['error']}")
        return shared

    def repair(self, find: Callable[[], Repair]) -> Repair:
        """Return on all ranks what ``find`` returns on rank 0, which has none if it ends before. All ranks call it."""
        if self._rank == 0:
            self._store.set("repair", json.dumps(asdict(find())))
        self._store.wait(["repair"], _LONGEST_VERDICT)
        return Repair(**json.loads(self._store.get("repair")))

    def end(self, own: Measurement | None, status: Status) -> Measurement | None:
        """Tell the other ranks that this one has ended the trial. On rank 0, return what it cost on all that have ended it.

        Rank 0 waits for the others if it has measured the trial. Another rank waits only after an error of memory, its own or
        one that another rank has told of: the ranks end the trial together, if that is possible (:attr:`end_together`).
        """
        if self._is_over:
            return None
        self._is_over = True
        is_merged = self._rank == 0 and own is not None and status == "ok"
        fails = status in ("oom", "failed")
        told = {"status": status, "collectives": _collectives(), "measured": None if own is None else asdict(own)}
        ended: dict[int, dict[str, Any]] = {self._rank: told}
        try:
            self._store.set(f"ended/{self._rank}", json.dumps(told))
            missing = self._await_others(ended, is_merged=is_merged, fails=fails)
            if self._rank == 0:
                self._store.compare_set("repair", "", json.dumps(asdict(AS_PROPOSED)))  # for ranks that ask too late
            if fails:
                self._agree(ended, missing)
        except RuntimeError:  # the process that keeps the store is gone
            return own
        if self._rank or own is None:
            return own
        return _of_all({rank: Measurement(**one["measured"]) for rank, one in ended.items() if one["measured"]}, missing)

    def _await_others(self, ended: dict[int, dict[str, Any]], *, is_merged: bool, fails: bool) -> list[int]:
        """Add to ``ended`` the ranks that end the trial, for as long as :meth:`end` waits. Return those that have not."""
        ends_at = time.monotonic() + LONGEST_WAIT_S
        ranks = [rank for rank in range(self._size) if rank in (0, self._rank) or self._store.check([f"joined/{rank}"])]
        while True:
            new = [rank for rank in ranks if rank not in ended and self._store.check([f"ended/{rank}"])]
            ended |= {rank: json.loads(self._store.get(f"ended/{rank}")) for rank in new}
            missing = [rank for rank in ranks if rank not in ended]
            waits = is_merged or (fails and any(one["status"] == "oom" for one in ended.values()))
            if not missing or not waits or time.monotonic() >= ends_at:
                return missing
            time.sleep(0.01)

    def _agree(self, ended: Mapping[int, Mapping[str, Any]], missing: Sequence[int]) -> None:
        """Agree with the other ranks on whether they end the trial together. The first rank that knows decides for all."""
        ran_out = [rank for rank, one in ended.items() if one["status"] == "oom"]
        begun = {(group, number) for one in ended.values() for group, number in one["collectives"].items()}
        why = ""
        if not ran_out:
            why = f"rank {self._rank} had failed before"
        elif missing:
            why = f"{_named(missing)} had not ended it {LONGEST_WAIT_S:g} s later, as one that waits in a collective"
        elif len(begun) > len({group for group, _ in begun}):
            why = "the ranks have begun different numbers of collectives"
        repeat = not why and self._num_tries == 1 and all(one["status"] != "ok" for one in ended.values())
        why, self.repeat = json.loads(self._store.compare_set("apart", "", json.dumps((why, repeat))))
        self.end_together = not why
        if why and ran_out:
            warn_user(
                f"{_named(ran_out).capitalize()} ran out of memory in a trial, and {why}. So the ranks cannot end the trial "
                "together, and it fails on each. Start the study again, with a lower memory_budget or risk.",
                UnguardedTrialWarning,
            )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _collectives() -> dict[str, int]:
    """How many collectives this process has begun in each of its groups. One more than on another rank waits for that rank."""
    counts = {}
    for group in sys.modules["torch"].distributed.distributed_c10d._world.pg_map:  # private (PyTorch 2.1 to 2.13)
        for device in group._device_types:
            with suppress(RuntimeError, AttributeError):  # a backend that does not count
                counts[f"{group.group_name} {device.type}"] = group._get_backend(device)._get_sequence_number_for_group()
    return counts


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

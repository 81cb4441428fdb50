"""DryRuns: captures trials in processes of their own, so that nothing of the user's changes.

    this process    answers what a trial's parameters are
    the server      forked before the first trial, so before this process has touched a GPU; forks a child for each dry run
    a child         runs the objective on the stage, sends what it saw, and ends without a trace

Where no process can be forked, a new one makes one dry run, in the place of both (`spawned.py`).

What dry runs import, the server imports before the next one (`preload.py`).

Messages to the server and the child are (word, content); those from them are (number of the dry run, word, content).

A child that hangs, dies or takes too much memory costs its limit, and its trial runs unguarded, with the cause.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from perfguard.capture.child import (
    HAS_SENT,
    Answer,
    Ask,
    autograd_refuses_forks,
    await_child,
    can_fork,
    child_sealed,
    compute_alone,
    dry_run,
    end_orphans,
    fork,
    kill_tree,
    limit_stalls,
    load_stage,
    silence_output,
)
from perfguard.capture.errors import LeftOutError, SelfEnded
from perfguard.capture.preload import preload
from perfguard.capture.remembered import Remembered
from perfguard.capture.seal import adopt_orphans, remove_scratch
from perfguard.capture.spawned import Spawned
from perfguard.exceptions import CaptureError

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.workload import CapturedTrial


class DryRuns:
    """Dry runs of one objective, remembered by the parameters that change its step.

    Args:
        objective: is called in the child as ``objective(ask)``.
        device: the guarded device.
        most_seconds: how long a dry run may take, and ten times as long as the longest so far.
        most_bytes: the most host memory that a dry run may take beyond what this process has.
        most_failed: dry runs that fail in a row before no more are made.
        spares: give all batches for a while. Without, the steps of a trial may not be seen.
        network: leave the network open in dry runs.
    """

    def __init__(
        self,
        objective: Callable[[Ask], object],
        device: Device,
        *,
        most_seconds: float = 60.0,
        most_bytes: int = 8 * 2**30,
        most_failed: int = 3,
        spares: bool = True,
        network: bool = False,
    ) -> None:
        self._objective = objective
        self._device = device
        self._most_seconds = most_seconds
        self._most_bytes = most_bytes
        self._longest_s = 0.0
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._server = 0
        self._finalizer: Any = None
        self._spawned: Spawned | None = None
        """None: the server is forked."""
        self.most_failed = most_failed
        self._num_failed_late = 0
        self._num_runs = 0
        self._imported: dict[str, None] = {}
        """Modules that dry runs have imported, and the server has not."""
        self._remembered = Remembered(most_failed=most_failed)
        self._spares = spares
        self._replays: bool | None = None
        """Whether a loop may go on without its model. None: it may, until an error may come from that."""
        self._network = network
        self.note_seconds: Callable[[Mapping[str, float]], object] = lambda seconds: None
        """Called with the seconds of each dry run, by part."""
        self.may_stand_in: Callable[[CapturedTrial], bool] | None = None
        """Returns whether a captured trial may stand in for one alike, so that no dry run is made. None: none may."""

    def start(self) -> None:
        """Start the server, unless it runs. Call it before the first trial.

        Raises:
            CaptureError: if none can be forked, and the objective cannot be sent to a new process.
        """
        if self._server:
            return
        if can_fork():
            with suppress(OSError, CaptureError):
                self._fork()
                return
        self._spawned = Spawned(self._objective, self._device, network=self._network)
        self._pipe = self._spawned.pipe
        self._server = self._spawned.pid
        self._finalizer = weakref.finalize(self, self._spawned.end, os.getpid())

    def _fork(self) -> None:
        keeps_autograd = autograd_refuses_forks()
        here, there = Pipe()
        self._server = fork(keeps_autograd=keeps_autograd)
        if not self._server:
            here.close()
            _serve(there, self._objective, self._device, self._most_bytes, os.getppid(), keeps_autograd, self._network)
        there.close()
        limit_stalls(here)
        self._pipe = here
        self._finalizer = weakref.finalize(self, _end_server, self._server, here, os.getpid())

    def close(self) -> None:
        """End the server, and the dry run that it may be in. So does the end of this object."""
        if self._pipe is not None:
            self._finalizer()
            self._pipe = None
            self._server = 0
            self._spawned = None

    def afford(self, trial_s: float, *, share: float = 0.05) -> None:
        """Let a dry run take a ``share`` of a trial of ``trial_s`` seconds. Who trains for hours may set up for minutes."""
        self._most_seconds = max(self._most_seconds, share * trial_s)

    def judges_late(self, problem: Exception) -> bool:
        """Whether a trial whose dry run has shown nothing but ``problem`` is to be judged at its first forward pass."""
        may_help = isinstance(problem, CaptureError) and not isinstance(problem, SelfEnded) and can_fork()
        return may_help and self._num_failed_late < self.most_failed

    def note_first_forward(self, found: CapturedTrial | Exception, set_up_s: float) -> None:
        """Note what a trial has shown at its first forward pass. If a dry run may not take ``set_up_s``, no more are made."""
        self._num_failed_late = self._num_failed_late + 1 if isinstance(found, CaptureError) else 0
        if set_up_s > self._most_seconds:
            self._remembered.give_up(CaptureError(f"the set-up of the objective takes {set_up_s:.0f} s"))

    def capture(self, answer: Callable[..., Answer], params: Mapping[str, Any] | None = None) -> CapturedTrial:
        """Return what the trial would run whose parameters ``answer(*question)`` knows.

        What ``answer`` raises ends the dry run and is raised here.

        Args:
            answer: the parameters, as the objective asks for them.
            params: all parameters, if they are known before. Then nothing runs where an equal trial was seen.

        Raises:
            KeyError: if ``params`` lacks a parameter that every trial so far has had.
            CaptureError: if the dry run does not show it.
            TooLargeError: if a tensor of the trial does not fit into any memory.
        """
        with self._lock:
            answers: dict[str, Answer] = {}
            remembered = self._remembered
            found = remembered.foresee(answer, answers) if params is None else remembered.of_params(params)
            if found is None and self.may_stand_in is not None:
                found = self._stand_in(self.may_stand_in, answer, answers, params)
            if found is None:
                answers.clear()
                found = self._run(answer, answers, spares=self._spares)
                self._remember(answers, found)
            if isinstance(found, Exception):
                raise copy.copy(found)  # each raise adds frames to the traceback of the one that is remembered
            return found

    def _stand_in(
        self,
        may: Callable[[CapturedTrial], bool],
        answer: Callable[..., Answer],
        answers: dict[str, Answer],
        params: Mapping[str, Any] | None,
    ) -> CapturedTrial | None:
        """Return a captured trial that is alike, if it ``may`` stand in. None: a dry run must show the trial."""
        alike = self._remembered.alike
        if params is None and not alike.foresee(answer, answers):
            return None
        found = alike.nearest({name: given.value for name, given in answers.items()} if params is None else params)
        return found if found is not None and may(found) else None

    def _remember(self, answers: Mapping[str, Answer], found: CapturedTrial | Exception) -> None:
        remembered = self._remembered
        if found is remembered.of(answers):
            return  # nothing ran
        if remembered.is_new_space(answers):
            remembered.note_space(answers)
            if not isinstance(found, Exception):
                remembered.note_space(answers, by_value=self._depends_on_values(answers, found))
        remembered.note(answers, found)

    def _depends_on_values(self, answers: Mapping[str, Answer], captured: CapturedTrial) -> bool:
        """Whether another value of the continuous parameters gives another step. A learning rate does not."""
        if all(found.other is None for found in answers.values()):
            return False

        def varied(*, spares: bool) -> CapturedTrial | Exception:
            order = [*answers.values()]
            varied_answers: dict[str, Answer] = {}

            def answer(*question: Any) -> Answer:
                if len(varied_answers) == len(order):
                    raise StopIteration
                found = order[len(varied_answers)]
                if question and question[0] != found.name:  # it goes another way
                    raise StopIteration
                return found if found.other is None else found._replace(value=found.other)

            try:
                return self._run(answer, varied_answers, spares=spares)
            except StopIteration as more:  # it has more parameters then
                return more

        other = varied(spares=False)
        if isinstance(other, Exception) or other.graph.content_hash != captured.graph.content_hash:
            return True
        if (other.steps, other.unseen) == (captured.steps, captured.unseen):
            self._spares = False
            return False
        again = varied(spares=True)  # is it the other values, or the loaders that were cut at once?
        return isinstance(again, Exception) or again.steps != captured.steps

    def _run(self, answer: Callable[..., Answer], answers: dict[str, Answer], *, spares: bool) -> CapturedTrial | Exception:
        """Return what a dry run shows. It ends as soon as its ``answers``, which it fills in, are known ones.

        A loop that has raised an error while its model was left out is dry-run with it, once: it may have looked at what only a
        model does.
        """
        found = self._run_once(answer, answers, spares=spares)
        may_be_lost = isinstance(found, LeftOutError) if isinstance(found, Exception) else found.may_be_lost
        if not may_be_lost or self._replays is not None:
            return found
        answers.clear()
        self._replays = False
        whole = self._run_once(answer, answers, spares=spares)
        self._replays = isinstance(whole, Exception) or bool(whole.unseen)  # then the error has another reason
        return whole

    def _run_once(self, answer: Callable[..., Answer], answers: dict[str, Answer], *, spares: bool) -> CapturedTrial | Exception:
        began = time.monotonic()
        try:
            found = self._converse(answer, answers, {"spares": spares, "replays": self._replays is not False})
            if isinstance(found, Exception) or "process" in found.seconds:  # one that is remembered has its own
                return found
            around_s = time.monotonic() - began - sum(found.seconds.values())
            found = replace(found, seconds={**found.seconds, "process": around_s})
            self.note_seconds(found.seconds)
            return found
        finally:
            if self._spawned is not None:
                self.close()
                with suppress(CaptureError):  # the next one loads while the trial runs
                    self.start()

    def _converse(
        self, answer: Callable[..., Answer], answers: dict[str, Answer], options: Mapping[str, bool]
    ) -> CapturedTrial | Exception:
        try:
            self.start()
            if self._spawned is not None:
                self._spawned.await_start()
        except CaptureError as error:
            return error
        pipe = self._pipe
        assert pipe is not None
        self._num_runs += 1
        began = time.monotonic()
        most_s = max(self._most_seconds, 10 * self._longest_s)
        try:
            self._let_server_import(pipe)
            pipe.send(("run", (self._num_runs, most_s, options)))
            while True:
                if problem := self._await_word(pipe, began, most_s):
                    self.close()
                    return CaptureError(problem)
                number, word, content = pipe.recv()
                if number != self._num_runs:  # the last word of a dry run before
                    continue
                if word == "imported":
                    self._imported.update(dict.fromkeys(content))
                    continue
                if word != "ask":
                    self._longest_s = max(self._longest_s, time.monotonic() - began)
                    shown: CapturedTrial | Exception = content
                    return shown
                self._remembered.note_question(answers, content)
                try:
                    found = answer(*content)
                except BaseException:
                    pipe.send(("cancel", None))
                    raise
                answers[found.name] = found
                known = self._remembered.of(answers)
                if known is not None:
                    pipe.send(("cancel", None))
                    return known
                pipe.send(("answer", found.value))
        except (EOFError, OSError) as error:
            self.close()
            return CaptureError(f"the process for dry runs has ended ({type(error).__name__})")
        except KeyboardInterrupt:
            self.close()
            raise

    def _let_server_import(self, pipe: Connection) -> None:
        """Let the server import what dry runs have imported, as far as this process has imported it too."""
        names = tuple(name for name in self._imported if name in sys.modules)
        if names and self._spawned is None:
            pipe.send(("import", names))
            self._imported = {name: None for name in self._imported if name not in names}

    def _await_word(self, pipe: Connection, began: float, most_s: float) -> str:
        """Wait for a message, and return why there is none. Empty: there is one, or its sender has ended."""
        if self._spawned is not None:
            return self._spawned.await_word(began, most_s, self._most_bytes)
        return "" if pipe.poll(most_s + 10) else "the process for dry runs does not answer"  # the server itself is stuck

    def __reduce__(self) -> Any:
        return type(None), ()  # they belong to one process, so a guard that is sent to another has none


def _serve(
    pipe: Connection,
    objective: Callable[[Ask], object],
    device: Device,
    most_bytes: int,
    parent: int,
    keeps_autograd: bool,
    network: bool,
) -> NoReturn:
    """Fork a child for each request, until the process before ends or closes the pipe."""
    try:
        os.setpgid(0, 0)  # Ctrl-C is for the process that the user sees
        silence_output()
        import safetensors.torch  # noqa: F401 - the children find it imported

        load_stage()
        gc.freeze()
        adopt_orphans()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.getppid() == parent:
            if not pipe.poll(1.0):  # other processes may hold the other end open
                continue
            request, content = pipe.recv()
            if request == "import":
                preload(content, device)
                compute_alone()
                gc.freeze()
            if request != "run":  # for a child that has ended by itself
                continue
            number, most_s, options = content
            child = fork(keeps_autograd=keeps_autograd)
            if not child:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                with child_sealed([pipe.fileno()], network=network) as seal:
                    dry_run(pipe, number, objective, device, options=options, seal=seal)
                os._exit(HAS_SENT)
            problem = await_child(child, most_s, most_bytes, parent)
            end_orphans()  # processes that the objective has started
            remove_scratch(child)
            if problem:
                pipe.send((number, "failed", CaptureError(problem)))
    except BaseException:  # the other end is closed
        pass
    finally:
        os._exit(0)


def _end_server(server: int, pipe: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a process that was forked meanwhile
        return
    pipe.close()
    children = _children_of(server)
    kill_tree(server)
    for child in children:
        remove_scratch(child)


def _children_of(process: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(process).children()]
    except psutil.Error:
        return []

"""The child of a dry run: how it is forked, what it may not do, what it runs, and how whoever forked it waits.

The time and the memory of a child are limited. It reads no input, prints and logs nothing, and is sealed (`seal/`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from perfguard.capture.held import held_bytes
from perfguard.capture.preload import imported_since
from perfguard.capture.seal import Seal, explain, leave_databases, sealed
from perfguard.capture.stops import is_of_user
from perfguard.exceptions import CaptureError, TooLargeError

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.verdict import Source
    from perfguard.workload import CapturedTrial


class Answer(NamedTuple):
    """The value of a parameter of a trial."""

    name: str
    value: Any
    other: Any = None
    """Another value that the search may propose, of a parameter that is continuous. None: it is not."""
    is_fact: bool = False
    """Whether it is what the objective has read of its trial, such as its number, and no parameter."""


HAS_SENT = 86
"""Exit status of a child that has said what it was forked for. Any other: something else has ended its process."""

Ask = Callable[..., Any]
"""``ask(*question)`` returns the value of a parameter. The question is the tuner's own, and can be pickled."""


class _Cancelled(BaseException):
    """Ends an objective whose next answers are known: what it shows is known too."""


def can_fork() -> bool:
    """Whether this system has a fork. Windows has none."""
    return hasattr(os, "fork")


def autograd_refuses_forks(*, most_seconds: float = 5.0) -> bool:
    """Whether a backward pass raises in a child of this process: one was run here, and PyTorch sees a GPU. A child tries it."""
    if "torch" not in sys.modules:
        return False
    child = fork(keeps_autograd=False)
    if not child:
        import torch

        try:
            torch.ones((), device="cpu", requires_grad=True).backward()  # a script may have set another default
        except RuntimeError:
            os._exit(HAS_SENT)
        os._exit(0)
    return not await_child(child, most_seconds, sys.maxsize, os.getppid())


def fork(*, keeps_autograd: bool) -> int:
    """Fork as ``os.fork`` does. With ``keeps_autograd``, PyTorch learns nothing of it, so its autograd runs in the child.

    PyTorch refuses because the threads that run its backward passes on GPUs are not in the child. A dry run needs none of them.

    Raises:
        CaptureError: if this system cannot hide a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; one whose lock is held costs the time limit
        if not keeps_autograd:
            return os.fork()
        hidden = getattr(ctypes.PyDLL(None), "_Fork", None)  # POSIX.1-2024: without the handlers of pthread_atfork; glibc 2.34
        if hidden is None:
            raise CaptureError(
                "A backward pass was run in this process already, so PyTorch refuses one in a dry run. Begin the study first."
            )
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        process = int(hidden())
        (python.PyOS_AfterFork_Parent if process else python.PyOS_AfterFork_Child)()
    if not process:  # OpenBLAS has not learnt of it, either
        _limit_threads_of_libraries()
    return process


def load_stage() -> None:
    """Import what each dry run needs, and let this process :func:`compute_alone`.

    PyTorch loads its compiler with the first optimizer, which takes a second or two, and keeps alive what is on the stack then.
    """
    import torch._dynamo  # noqa: F401

    import perfguard.capture.trial  # noqa: F401

    compute_alone()


def compute_alone() -> None:
    """Let this process, which is thrown away, compute in one thread, whatever its code asks for.

    The threads of the process before have not come along, and OpenMP would wait for them.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_num_threads = lambda nthreads: None
    torch.set_num_interop_threads = lambda nthreads: None
    _limit_threads_of_libraries()


def _limit_threads_of_libraries() -> None:
    with suppress(ImportError):
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        threadpool_limits(1)


def silence_output() -> None:
    """Keep a process that was forked from reading, printing, logging and warning, and from the connections to databases."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.stdout = sys.stderr = open(null, "w", closefd=False)  # a notebook's, or a test suite's, are others  # noqa: SIM115
    logging.disable()
    faulthandler.disable()
    warnings.simplefilter("ignore")
    leave_databases()


def await_child(child: int, most_s: float, most_bytes: int, parent: int, wait: Callable[[float], object] = time.sleep) -> str:
    """Wait for a child, and return why it has not sent what it saw. Empty: it has."""
    began = time.monotonic()
    pause = 0.001
    before = held_bytes(os.getpid())
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            return f"the dry run of the objective was ended by signal {os.WTERMSIG(status)}"
        if ended:
            code = os.WEXITSTATUS(status)
            return "" if code == HAS_SENT else f"the objective has ended the process of its dry run (exit status {code})"
        problem = beyond_limits(child, began, before, most_s, most_bytes)
        if not problem and os.getppid() != parent:
            problem = "nobody waits for it"
        if not problem:
            wait(pause)
            pause = min(2 * pause, 0.01)
            continue
        kill_tree(child)
        return problem


def kill_tree(process: int, *, most_s: float = 10.0) -> None:
    """Kill a child of this process and all that it has started, and wait ``most_s`` seconds for its end."""
    started: list[psutil.Process] = []
    with suppress(psutil.Error):
        started = psutil.Process(process).children(recursive=True)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    for each in started:
        with suppress(psutil.Error):
            each.kill()
    ends_at = time.monotonic() + most_s  # a process that hangs in the kernel, at a disk for instance, ends later
    with suppress(ChildProcessError):
        while not os.waitpid(process, os.WNOHANG)[0] and time.monotonic() < ends_at:
            time.sleep(0.001)


def end_orphans() -> None:
    """End what a child that has ended has left to this process, which has adopted it."""
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            each.kill()
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def limit_stalls(pipe: Any, *, most_s: float = 10.0) -> None:
    """Let a read or a write raise an OSError if the other side stops for ``most_s`` seconds in the middle of a message."""
    seconds = struct.pack("ll", int(most_s), 0)
    with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as connection:  # Windows has pipes that are no sockets
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, seconds)


def beyond_limits(process: int, began: float, before: int, most_s: float, most_bytes: int) -> str:
    """Return which limit a dry run has passed that ``began`` with ``before`` bytes of memory. Empty: none."""
    if time.monotonic() - began > most_s:
        return f"the dry run of the objective did not end within {most_s:g} s"
    if held_bytes(process) - before > most_bytes:
        return f"the dry run of the objective took more than {most_bytes / 2**30:.3g} GiB of host memory"
    return ""


def dry_run(
    pipe: Any, number: int, objective: Callable[[Ask], object], device: Device, *, options: Mapping[str, bool], seal: Seal
) -> None:
    """Run in the child: capture the objective, and send what it shows."""
    process = os.getpid()
    imported_before = {*sys.modules}
    is_cancelled = False

    def send(word: str, content: Any) -> None:
        if os.getpid() != process:  # the objective has forked
            os._exit(0)
        pipe.send((number, word, content))

    def ask(*question: Any) -> Any:
        nonlocal is_cancelled
        if not is_cancelled:
            send("ask", question)
            word, value = pipe.recv()
            is_cancelled = word == "cancel"
        if not is_cancelled:
            return value
        _end_soon()
        raise _Cancelled

    found = capture_or_error(lambda: objective(ask), device, options=options, seal=seal)
    if is_cancelled:
        return
    if imported := imported_since(imported_before):
        send("imported", imported)
    try:
        send("failed" if isinstance(found, Exception) else "captured", found)
    except Exception as error:
        send("failed", CaptureError(f"what the dry run saw cannot be sent: {_short(error)}"))


def _end_soon(*, most_s: float = 2.0) -> None:
    """End this process in ``most_s`` seconds, if the objective does not unwind until then."""
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():  # Windows has none
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, most_s)


@contextmanager
def child_sealed(keep: Collection[int], *, network: bool) -> Iterator[Seal]:
    """Seal this process, which is thrown away after the block, and let it be the first to end where memory ends."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with sealed(keep=keep, network=network) as seal:
        yield seal


def capture_or_error(
    run: Callable[[], object], device: Device, *, options: Mapping[str, bool], seal: Seal
) -> CapturedTrial | Exception:
    """Capture an objective without arguments in this process, which is thrown away after it. Return why, if that fails.

    The ``options`` are those of :func:`perfguard.capture.trial.capture`.
    """

    def show() -> CapturedTrial:
        from perfguard.capture.trial import capture

        return capture(run, device, spares=options["spares"], replays=options["replays"])

    return shown(show, seal, "captured")


def shown(show: Callable[[], CapturedTrial], seal: Seal, source: Source) -> CapturedTrial | Exception:
    """Return what ``show`` returns, with its ``source``, or why it fails."""
    found: CapturedTrial | Exception
    try:
        found = replace(show(), source=source if seal.is_tight else _NOT_SEALED[source])
    except (CaptureError, TooLargeError) as error:
        found = error
    except BaseException as error:
        place = _line_of_user(error)
        words = f"{type(error).__name__}: {_short(error)}"
        found = CaptureError(f"the dry run of the objective ends{place} with {words}{explain(error, seal)}")
    return seal.programs.problem or found


_NOT_SEALED: dict[Source, Source] = {
    "captured": "captured, not sealed",
    "captured at the first forward pass": "captured at the first forward pass, not sealed",
}


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:240]


def _line_of_user(error: BaseException) -> str:
    """The last line of the user's own that ``error`` came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_of_user(frame.filename) and not frame.filename.startswith("<"):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""

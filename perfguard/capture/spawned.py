"""Spawned: a process for one dry run where none can be forked: on Windows, or where PyTorch or the system refuses.

It begins from nothing and is sent what it needs: the objective with all that it refers to, by value where it belongs to a script
or a notebook (cloudpickle), and the settings of PyTorch. So nothing that it does can change anything here. It imports and loads
before it is asked, while the trial before runs.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Client, Connection
from operator import attrgetter
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil

from perfguard.capture.child import beyond_limits, child_sealed, dry_run, limit_stalls, load_stage, silence_output
from perfguard.capture.held import held_bytes
from perfguard.capture.seal import Seal, remove_scratch
from perfguard.exceptions import CaptureError

if TYPE_CHECKING:
    from perfguard.devices import Device

_START = """
import sys
sys.path.pop(0)  # the folder of the user, whose modules may have the names of those of Python
import pickle
from multiprocessing.connection import Listener
sys.path[:], sys.argv[:], key, network = pickle.load(sys.stdin.buffer)
with Listener(("127.0.0.1", 0), authkey=key) as listener:
    print(listener.address[1], flush=True)
    pipe = listener.accept()
from perfguard.capture.spawned import main
main(pipe, network)
"""
_STATES = (
    ("random", "getstate", "setstate"),
    ("numpy", "random.get_state", "random.set_state"),
    ("torch", "get_rng_state", "set_rng_state"),
    ("torch", "get_default_dtype", "set_default_dtype"),
    ("torch", "backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp"),
    ("torch", "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp"),
)
"""What a script sets before its study begins, by module, and how it is read and set."""
_SWITCHES = (
    ("cudnn", "benchmark"),
    ("cudnn", "allow_tf32"),
    ("cuda.matmul", "allow_tf32"),
    ("cudnn.conv", "fp32_precision"),  # since PyTorch 2.9; to read an old switch raises if a new one was set
    ("cuda.matmul", "fp32_precision"),
)
"""Likewise, in `torch.backends`. A graph depends on them."""


class Spawned:
    """A process that makes one dry run.

    Args:
        objective, device, network: as for :class:`DryRuns`.

    Raises:
        CaptureError: if the objective cannot be sent, or no process starts.
    """

    def __init__(self, objective: Callable[..., object], device: Device, *, network: bool = False) -> None:
        import cloudpickle  # type: ignore[import-untyped]

        try:
            load = cloudpickle.dumps((_settings(), objective, device))
        except Exception as error:
            raise CaptureError(
                "No process can be forked here, and the objective cannot be sent to a new one "
                f"({type(error).__name__}: {error}). "
                "Make what it names in the objective, or describe what trials run: build=... or guard.trial(...)."
            ) from error
        key = secrets.token_bytes(32)
        command = [sys.executable, "-c", _START]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen(command, start_new_session=True, **streams)
            with self._process.stdin as given, self._process.stdout as said:  # type: ignore[union-attr]
                pickle.dump((sys.path, sys.argv, key, network), given)
                given.flush()
                address = "127.0.0.1", int(_within(said.readline))
                self.pipe: Connection = _within(lambda: Client(address, authkey=key))
            limit_stalls(self.pipe)
            self.pipe.send(load)
        except (OSError, EOFError, TypeError, ValueError) as error:  # Python is embedded, for instance
            raise CaptureError(f"no process for dry runs starts ({type(error).__name__}: {error})") from error
        self.pid = self._process.pid
        self._before = 0

    def await_start(self, *, most_seconds: float = 300.0) -> None:
        """Wait until it has loaded the objective.

        Raises:
            CaptureError: if it cannot.
        """
        if not self.pipe.poll(most_seconds):
            raise CaptureError("the process for dry runs does not start")
        try:
            problem, self.pid = self.pipe.recv()  # in a virtual environment of Windows it is not the one that was started
        except (EOFError, OSError) as error:
            raise CaptureError("a new process ends as it loads the objective. Describe what trials run: build=...") from error
        if problem is not None:
            raise problem
        self._before = held_bytes(self.pid)

    def await_word(self, began: float, most_s: float, most_bytes: int) -> str:
        """Wait for its next message, and return why there is none. Empty: there is one, or the process has ended."""
        while not self.pipe.poll(0.02):
            if problem := beyond_limits(self.pid, began, self._before, most_s, most_bytes):
                return problem
        return ""

    def end(self, owner: int) -> None:
        """End it, and all that it has started. Only process ``owner`` does."""
        if os.getpid() != owner:
            return
        self.pipe.close()
        with suppress(psutil.Error):
            for each in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    each.kill()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, at a disk for instance, and ends later
            self._process.wait(10)
        remove_scratch(self.pid)


def _within(call: Callable[[], Any], *, most_s: float = 60.0) -> Any:
    """Return what ``call`` returns, which waits for the process.

    Raises:
        TimeoutError: if the process does not answer for ``most_s`` seconds.
    """
    found: SimpleQueue[Any] = SimpleQueue()

    def answer() -> None:
        try:
            found.put(call())
        except Exception as error:
            found.put(error)

    threading.Thread(target=answer, daemon=True).start()
    try:
        answered = found.get(timeout=most_s)
    except Empty:
        raise TimeoutError(f"it does not answer for {most_s:g} s") from None
    if isinstance(answered, Exception):
        raise answered
    return answered


def _settings() -> list[tuple[Any, ...]]:
    states = [(module, put, attrgetter(get)(sys.modules[module])()) for module, get, put in _STATES if module in sys.modules]
    return states + [(*switch, _read(*switch)) for switch in _SWITCHES if "torch" in sys.modules]


def _have(settings: list[tuple[Any, ...]]) -> None:
    for owner, name, value in settings:
        if (owner, name) not in _SWITCHES:
            attrgetter(name)(import_module(owner))(value)
        elif value not in (None, _read(owner, name)):
            setattr(attrgetter(owner)(sys.modules["torch"].backends), name, value)


def _read(owner: str, name: str) -> Any:
    with suppress(RuntimeError, AttributeError):
        return getattr(attrgetter(owner)(sys.modules["torch"].backends), name)


def main(pipe: Connection, network: bool) -> None:
    """Run in the process: load the objective, and make one dry run of it."""
    silence_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that the user sees
    with child_sealed([pipe.fileno()], network=network) as seal:  # while it has one thread
        _make_dry_run(pipe, seal)
        threading.Event().wait()  # to be ended


def _make_dry_run(pipe: Connection, seal: Seal) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    problem: CaptureError | None = None
    objective: Any = None
    device: Any = None
    try:
        settings, objective, device = pickle.loads(inbox.get())
        load_stage()
        _have(settings)
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
        problem = CaptureError(f"a new process cannot load the objective ({words}). Describe what trials run: build=...")
    pipe.send((problem, os.getpid()))
    _, (number, _, options) = inbox.get()
    dry_run(SimpleNamespace(send=pipe.send, recv=inbox.get), number, objective, device, options=options, seal=seal)


def _listen(pipe: Connection, inbox: SimpleQueue[Any]) -> None:
    """End this process as soon as the other end is closed, whatever the objective does."""
    with suppress(EOFError, OSError):
        while True:
            message = pipe.recv()
            if message[0] != "cancel":  # else whoever asks waits until this process is ended
                inbox.put(message)
    os._exit(0)

"""Ray's workers, forked by a server that has imported PyTorch and PerfGuard already.

A worker of Ray imports `ray`, and then what unpickles its function: five seconds of processor time, which is most of what a test
of a few small trials takes. Here Ray starts this file in the place of its `setup_worker.py`. It asks the server for the worker
and ends, because Ray knows a worker by the id and the process with which it registers. A worker with a runtime environment that
is more than variables begins as Ray begins it.

The example of Ray and the Python of docs/ray.md run with workers as users have them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

    import pytest

_ADDRESS = "PERFGUARD_TESTS_WARM_RAY"
_SETUP = "PERFGUARD_TESTS_WARM_RAY_SETUP"
_IMPORTED = ("torch", "torch._meta_registrations", "ray.tune", "ray.train.torch", "perfguard_models.guardnet", "perfguard_ray")


def begin(folder: Path, environment: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Let a Ray that starts while ``environment`` lasts have such workers.

    Args:
        folder: for the server's address.
        environment: what Ray and its processes find.

    Returns:
        The server. End it with ``communicate()``.
    """
    import subprocess

    from ray._private import ray_constants, services  # private, Ray 2.43 to 2.60

    setup = Path(services.__file__).parent / "workers" / ray_constants.SETUP_WORKER_FILENAME
    # Ray reads its settings as it is imported, so the server has them already: no token, the first job of a new cluster, and
    # the process with which a worker ends.
    environment.setenv("RAY_AUTH_MODE", "disabled")
    settings = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "server"))
        listener.listen(16)
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=os.environ | settings,
        )
        environment.setenv(_ADDRESS, listener.getsockname())
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"  # Ray gives up if its own processes are slow to start beside the imports
    environment.setenv(_SETUP, str(setup))
    environment.setattr(ray_constants, "SETUP_WORKER_FILENAME", __file__)
    return server


def _ask() -> None:
    """Let the server fork a worker. This process of Ray must begin fast, so it imports little."""
    arguments = sys.argv[1:]
    context = next((word for word in arguments if word.startswith("--serialized-runtime-env-context=")), "")
    changes = json.loads(context.partition("=")[2] or "{}")
    variables = changes.pop("env_vars", None) or {}
    has_this_python = changes.pop("py_executable", None) in (None, sys.executable)
    if any(changes.values()) or not has_this_python:
        os.execv(sys.executable, [sys.executable, os.environ[_SETUP], *arguments])
    worker = [word for word in arguments if not word.startswith(("--serialized-runtime-env-context=", "--language="))]
    request = {"arguments": worker, "folder": str(Path.cwd()), "environment": {**os.environ, **variables}}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[_ADDRESS])
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        server.recv(1)  # nothing comes: the worker has begun


def _serve(number: int) -> None:
    """Fork workers for who asks at the socket ``number``, until the standard input ends."""
    import gc
    import importlib
    import select
    import signal

    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=number) as listener:
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if listener not in ready:
                return
            asker, _ = listener.accept()
            if not os.fork():
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become_worker(asker)
            asker.close()


def _become_worker(asker: socket.socket) -> None:
    """Run the worker that ``asker`` wants, to its end."""
    import runpy

    _, streams, _, _ = socket.recv_fds(asker, 1, 3)
    with asker.makefile("rb") as sent:
        request = json.loads(sent.read())
    asker.close()
    os.setpgid(0, 0)  # Ray kills the process group of a worker that has ended
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(int(sys.argv[2]))
    else:
        _ask()

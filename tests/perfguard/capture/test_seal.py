"""Attacks on the seal of a dry run, on each of its rungs: what a process does there must change nothing outside of it."""

import ctypes
import errno
import hashlib
import io
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from os import remove, rename
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.capture.seal import RUNGS, Rung, Seal, explain, ladder, linux, remove_scratch, sealed

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's rungs are Linux's"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]
KERNEL_RUNGS = RUNGS[:2]
HAS_THREADS = 77
"""Exit status of a forked process that has threads from the beginning."""


def has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1


def in_seal(
    rung: str | None,
    run: Callable[[Seal], object],
    *,
    before: Callable[[], object] = lambda: None,
    within_s: float = 20.0,
    **settings: Any,
) -> tuple[int, str]:
    """Run ``run`` in a process sealed by ``rung``, or by the strongest. Return its status, and what it returns or raises.

    ``before`` prepares the system of that process alone.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.environ |= {"PERFGUARD_SEAL": rung} if rung else {}
            signal.alarm(int(within_s))
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 2)
            before()
            had_threads = has_threads()
            with sealed(keep=[write], **settings) as seal:
                if rung not in (None, seal.rung) and (had_threads or has_threads()):
                    status = HAS_THREADS
                    os._exit(status)
                try:
                    assert rung in (None, seal.rung)
                    said = str(run(seal))
                    status = 0
                except BaseException as error:
                    said = f"{type(error).__name__}: {error}{explain(error, seal)}"
                os.write(write, said.encode()[:4000])
        finally:
            os._exit(status)
    os.close(write)
    with open(read) as pipe:  # to the end of the process and of all that has its end of the pipe
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    remove_scratch(child)
    if status == HAS_THREADS:
        pytest.skip("a library of another test starts threads in each process that is forked, so the kernel gives it no view")
    return status, said


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# --- Files ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A hundred files, some of them in folders, a link, and a database."""
    for number in range(94):
        (tmp_path / f"sub{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"sub{number % 3}" / f"file{number}").write_bytes(b"precious " * 100)
    for name in ("best.pt", "model.pt", "array.npy", "table.json"):
        (tmp_path / name).write_bytes(b"precious " * 1000)
    (tmp_path / "link").symlink_to("best.pt")
    with sqlite3.connect(tmp_path / "own.db") as database:
        database.execute("CREATE TABLE found (value)")
    database.close()
    return tmp_path


def state(folder: Path) -> dict[str, object]:
    """What is in a folder: names, contents, modes, owners and times of change."""
    found: dict[str, object] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = digest, info.st_mode, info.st_uid, info.st_ino, info.st_nlink, info.st_mtime_ns, info.st_size
    return found


def in_a_process(attack: Callable[[], object]) -> None:
    child = os.fork()
    if not child:
        attack()
        os._exit(0)
    os.waitpid(child, 0)


def in_a_thread(attack: Callable[[], object]) -> None:
    thread = threading.Thread(target=attack)
    thread.start()
    thread.join()


def overwrite(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"x")


def replace_best(folder: Path) -> None:
    temporary = folder / "temporary"
    temporary.write_bytes(b"new")
    rename(temporary, folder / "best.pt")


def write_mapped(folder: Path) -> None:
    np.memmap(folder / "array.npy", np.uint8, "r+")[:] = 0


def open_and_truncate(folder: Path) -> None:
    os.close(os.open(folder / "best.pt", os.O_RDWR | os.O_TRUNC))


def insert_a_row(folder: Path) -> None:
    with sqlite3.connect(folder / "own.db") as database:
        database.execute("INSERT INTO found VALUES (1)")


def write_through_links(folder: Path) -> None:
    (folder / "link").write_bytes(b"x")
    os.link(folder / "model.pt", folder / "hard")
    (folder / "hard").write_bytes(b"x")


def change_all(folder: Path) -> None:
    os.chmod(folder / "best.pt", 0)
    os.utime(folder / "model.pt", (0, 0))
    with suppress(OSError):
        os.chown(folder / "table.json", 12, 34)
    with suppress(OSError):
        os.setxattr(folder / "table.json", "user.mark", b"x")


def fill(folder: Path) -> None:
    for number in range(10_000):
        (folder / f"new{number}").write_bytes(b"x" * 2**20)


def pool_removes(folder: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(os.remove, sorted(map(str, (folder / "sub0").iterdir())))


ATTACKS: dict[str, Callable[[Path], object]] = {
    "remove": lambda folder: os.remove(folder / "best.pt"),
    "a name imported from os": lambda folder: remove(folder / "best.pt"),
    "unlink": lambda folder: (folder / "best.pt").unlink(),
    "rename over": replace_best,
    "replace": lambda folder: os.replace(folder / "model.pt", folder / "best.pt"),
    "write": lambda folder: overwrite(folder / "best.pt"),
    "append": lambda folder: (folder / "best.pt").open("ab").write(b"x"),
    "truncate": lambda folder: os.truncate(folder / "best.pt", 0),
    "open and truncate": open_and_truncate,
    "FileIO": lambda folder: io.FileIO(folder / "best.pt", "w").write(b"x"),
    "links": write_through_links,
    "modes, times, owners": change_all,
    "memory-map": write_mapped,
    "new folders": lambda folder: (folder / "a" / "b").mkdir(parents=True),
    "rmtree": lambda folder: shutil.rmtree(folder / "sub1"),
    "move": lambda folder: shutil.move(folder / "sub1", folder / "sub9"),
    "sqlite": insert_a_row,
    "torch.save": lambda folder: torch.save(nn.Linear(2, 2), folder / "model.pt"),
    "a pool": pool_removes,
    "a thread": lambda folder: in_a_thread(lambda: remove(folder / "best.pt")),
    "a process": lambda folder: in_a_process(lambda: remove(folder / "best.pt")),
    "fill": fill,
}
IN_OTHER_LANGUAGES: dict[str, Callable[[Path], object]] = {
    "C": lambda folder: ctypes.CDLL(None).unlink(os.fsencode(folder / "best.pt")),
    "C truncates": lambda folder: ctypes.CDLL(None).truncate(os.fsencode(folder / "best.pt"), ctypes.c_long(0)),
    "C++": lambda folder: torch.jit.save(torch.jit.script(nn.ReLU()), str(folder / "model.pt")),
    "a shell": lambda folder: os.system(f"rm -rf {folder}/* 2>/dev/null"),
    "a program": lambda folder: subprocess.run(["sh", "-c", f"mv {folder}/best.pt {folder}/x; echo > {folder}/model.pt"]),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_that_a_sealed_process_does_changes_a_file(rung: Rung, folder: Path) -> None:
    before = state(folder)
    attacks = ATTACKS | (IN_OTHER_LANGUAGES if rung in KERNEL_RUNGS else {})
    for name, attack in attacks.items():
        in_seal(rung, lambda seal: attack(folder), most_bytes=2**25)  # noqa: B023
        assert state(folder) == before, name


@pytest.mark.parametrize("rung", KERNEL_RUNGS)
def test_a_program_that_outlives_the_objective_changes_nothing_and_is_ended(rung: Rung, folder: Path) -> None:
    before = state(folder)
    mark = f"perfguard-{os.getpid()}-{rung}"
    script = f"exec -a {mark} sh -c 'sleep 1; rm -rf {folder}/*; sleep 60'"

    def attack(seal: Seal) -> None:
        subprocess.Popen(["setsid", "--fork", "bash", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(0.5)

    assert in_seal(rung, attack) == (0, "None")
    time.sleep(1.0)
    assert state(folder) == before
    assert mark not in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("rung", RUNGS)
def test_what_was_open_before_is_a_copy(rung: Rung, folder: Path, stack: ExitStack) -> None:
    before = state(folder)
    update = stack.enter_context((folder / "best.pt").open("r+b", buffering=0))
    append = stack.enter_context((folder / "model.pt").open("ab", buffering=0))
    array = stack.enter_context((folder / "array.npy").open("r+b"))
    mapped = stack.enter_context(mmap.mmap(array.fileno(), 0))
    inside = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, inside)
    counter = multiprocessing.get_context("fork").Value("i", 4)
    anonymous = stack.enter_context(mmap.mmap(-1, mmap.PAGESIZE))
    update.seek(3)

    def attack(seal: Seal) -> str:
        read = update.read(4)
        writes: list[Callable[[], object]] = [
            lambda: update.write(b"x"),
            lambda: append.write(b"x"),
            lambda: os.ftruncate(update.fileno(), 0),
            lambda: os.remove("table.json", dir_fd=inside),
            lambda: mapped.__setitem__(0, 0),
            lambda: setattr(counter, "value", 5),
            lambda: anonymous.__setitem__(0, 1),
        ]
        for write in writes:
            with suppress(OSError):
                write()
        return read.decode()

    status, said = in_seal(rung, attack)
    assert (status, said) == (0, "ciou")
    assert state(folder) == before
    assert counter.value == 4
    assert anonymous[0] == 0
    assert update.tell() == 3


def write_and_read(folder: Path) -> None:
    (folder / "cache" / "deep").mkdir(parents=True)
    cache = folder / "cache" / "deep" / "lengths.json"
    cache.write_text("[1, 2]")
    assert json.loads(cache.read_text()) == [1, 2]
    assert [path.name for path in (folder / "cache").rglob("*.json")] == ["lengths.json"]
    os.replace(cache, folder / "final.json")
    assert (folder / "final.json").exists()
    assert not cache.exists()
    assert "final.json" in os.listdir(folder)
    with (folder / "table.json").open("a") as file:
        file.write("more")
    assert (folder / "table.json").read_text().endswith("precious more")
    shutil.rmtree(folder / "sub0")
    assert not (folder / "sub0").exists()
    (folder / "sub0").mkdir()
    assert os.listdir(folder / "sub0") == []
    assert sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) == ["cache", "sub0", "sub1", "sub2"]
    with pytest.raises(FileExistsError):
        (folder / "sub1").mkdir()
    with pytest.raises(FileNotFoundError):
        (folder / "nowhere" / "file").write_text("")
    np.save(folder / "array.npy", np.arange(3))
    assert np.load(folder / "array.npy").tolist() == [0, 1, 2]
    insert_a_row(folder)
    assert sqlite3.connect(folder / "own.db").execute("SELECT * FROM found").fetchall() == [(1,)]
    torch.save({"weight": torch.ones(2)}, folder / "best.pt")
    assert torch.load(folder / "best.pt")["weight"].tolist() == [1, 1]
    os.chdir(folder / "cache")
    Path("here").write_text("x")
    assert (folder / "cache" / "here").exists()
    os.chdir(folder / "sub1")
    assert len(os.listdir(".")) == len(os.listdir(folder / "sub1")) > 30
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(len, ["a", "bb"]) == [1, 2]


@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_written_is_read_back(rung: Rung, folder: Path) -> None:
    before = state(folder)
    assert in_seal(rung, lambda seal: write_and_read(folder)) == (0, "None")
    assert state(folder) == before


@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_is_left_in_temporary_folders(rung: Rung, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = set(os.listdir("/dev/shm"))

    def attack(seal: Seal) -> None:
        tempfile.mkdtemp()
        Path(tempfile.gettempdir(), "new").write_text("x")
        multiprocessing.get_context("fork").Lock()

    assert in_seal(rung, attack) == (0, "None")
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= before | {name for name in os.listdir("/dev/shm") if not name.startswith("perfguard")}


@pytest.mark.parametrize("rung", KERNEL_RUNGS[:1])
def test_a_full_scratch_space_is_said(rung: Rung, folder: Path) -> None:
    status, said = in_seal(rung, lambda seal: fill(folder), most_bytes=2**24)
    assert status == 1
    assert "The dry run has filled the space that it has for files" in said


# --- Network and signals --------------------------------------------------------------------------------------------------------


class Server:
    """Counts the connections and the bytes that reach it."""

    def __init__(self, family: int, kind: int, address: Any) -> None:
        self.socket = socket.socket(family, kind)
        self.socket.bind(address)
        self.address = self.socket.getsockname()
        self.kind = kind
        if kind == socket.SOCK_STREAM:
            self.socket.listen()
        self.socket.setblocking(False)

    def was_reached(self) -> bool:
        try:
            if self.kind == socket.SOCK_STREAM:
                self.socket.accept()[0].close()
            else:
                self.socket.recv(100)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    found = [
        Server(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        Server(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        Server(socket.AF_UNIX, socket.SOCK_STREAM, str(tmp_path / "s")),
        Server(socket.AF_UNIX, socket.SOCK_STREAM, f"\0perfguard-{os.getpid()}"),
        Server(socket.AF_UNIX, socket.SOCK_DGRAM, str(tmp_path / "d")),
    ]
    yield found
    for server in found:
        server.socket.close()


def reach(server: Server) -> None:
    with socket.socket(server.socket.family, server.kind) as client:
        client.connect(server.address)
        client.send(b"hello")


@pytest.mark.parametrize("rung", RUNGS)
def test_no_byte_leaves_a_sealed_process(rung: Rung, servers: list[Server], stack: ExitStack) -> None:
    here, there = map(stack.enter_context, socket.socketpair())
    here.setblocking(False)
    pipe = os.pipe()
    for end in pipe:
        stack.callback(os.close, end)
    os.set_blocking(pipe[0], False)

    def attack(seal: Seal) -> list[str]:
        words = []
        for server in servers:
            try:
                reach(server)
                words.append("reached")
            except OSError as error:
                words.append(explain(error, seal) and "refused")
        with suppress(OSError):
            there.send(b"x")
        with suppress(OSError):
            os.write(pipe[1], b"x")
        if rung in KERNEL_RUNGS:
            subprocess.run(["bash", "-c", f"echo x > /dev/tcp/127.0.0.1/{servers[0].address[1]}"])
        return words

    status, said = in_seal(rung, attack)
    # A datagram to an address of this machine has no error: it goes to the loopback of a network of its own.
    assert (status, said.replace("reached", "refused", 1)) == (0, str(["refused"] * len(servers)))
    assert not any(server.was_reached() for server in servers)
    with pytest.raises(BlockingIOError):
        here.recv(1)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_network_can_be_left_open(rung: Rung, servers: list[Server]) -> None:
    assert in_seal(rung, lambda seal: reach(servers[0]), network=True) == (0, "None")
    assert servers[0].was_reached()


@pytest.mark.parametrize("rung", RUNGS)
def test_no_signal_leaves_a_sealed_process(rung: Rung) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    parent = os.getpid()

    def attack(seal: Seal) -> None:
        with suppress(OSError):
            os.kill(parent, signal.SIGUSR1)
        with suppress(OSError):
            os.killpg(os.getpgid(parent), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        in_seal(rung, attack)
        time.sleep(0.1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == []


@pytest.mark.parametrize("rung", RUNGS)
def test_who_is_refused_the_network_does_not_wait_for_it(rung: Rung, servers: list[Server]) -> None:
    def attack(seal: Seal) -> float:
        began = time.monotonic()
        for _ in range(10):
            with suppress(OSError):
                reach(servers[0])
            time.sleep(60)
        return time.monotonic() - began

    status, said = in_seal(rung, attack)
    assert status == 0, said


# --- Systems --------------------------------------------------------------------------------------------------------------------


def test_a_process_with_threads_takes_the_next_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ladder._climb

    def climb(**settings: Any) -> Rung:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return own(**settings)

    monkeypatch.setattr(ladder, "_climb", climb)
    assert in_seal(None, lambda seal: seal.rung) == (0, "landlock")


def test_a_working_folder_that_was_removed_stays_so(tmp_path: Path) -> None:
    gone = tmp_path / "gone"

    def attack(seal: Seal) -> str:
        with pytest.raises(FileNotFoundError):
            os.getcwd()
        (tmp_path / "new").write_text("x")
        return (tmp_path / "new").read_text()

    here = Path.cwd()
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert in_seal("namespaces", attack) == (0, "x")
    finally:
        os.chdir(here)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_a_system_that_refuses_namespaces_has_the_next_rung(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = linux.call

    def call(name: str, *args: object) -> int:
        if name == "unshare":
            raise OSError(number, os.strerror(number))
        return own(name, *args)

    def attack(seal: Seal) -> Rung:
        overwrite(folder / "best.pt")
        return seal.rung

    monkeypatch.setattr(linux, "call", call)
    before = state(folder)
    assert in_seal(None, attack) == (0, "landlock")
    assert state(folder) == before


def in_a_system_of_its_own(change: Callable[[], object]) -> None:
    """Change what is mounted, for this process alone."""
    linux.call("unshare", linux.NEW_MOUNTS)
    linux.mount(None, "/", flags=linux.RECURSIVE | linux.SLAVE)
    change()


needs_root = pytest.mark.skipif(
    sys.platform == "linux" and os.geteuid() != 0, reason="only root may mount in the namespace of the system"
)


@needs_root
@pytest.mark.parametrize(("rung", "may_write"), [("namespaces", True), ("landlock", False), ("python", False)])
def test_a_system_that_can_only_be_read_is_sealed_too(rung: Rung, may_write: bool, folder: Path) -> None:
    def write(seal: Seal) -> str:
        assert (folder / "best.pt").read_bytes().startswith(b"precious")
        try:
            overwrite(folder / "best.pt")
        except OSError:
            return "refused"
        return "written"

    before = state(folder)
    found = in_seal(rung, write, before=lambda: in_a_system_of_its_own(lambda: linux.make_read_only("/")))
    assert found == (0, "written" if may_write else "refused")
    assert state(folder) == before


@needs_root
@pytest.mark.parametrize("rung", RUNGS)
def test_a_full_temporary_folder_is_no_error_of_the_seal(rung: Rung, folder: Path, stack: ExitStack) -> None:
    # Not beside the folders of a thousand other tests: what lies beside a mount is covered one by one, up to a number.
    full = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))

    def mount_and_fill() -> None:
        linux.mount("tmpfs", full, "tmpfs", options="size=64k")
        tempfile.tempdir = full
        with suppress(OSError):
            Path(full, "all").write_bytes(bytes(2**20))

    before = state(folder)
    status, said = in_seal(rung, lambda seal: "read", before=lambda: in_a_system_of_its_own(mount_and_fill))
    assert (status, said) == (0, "read")
    assert state(folder) == before


def test_very_many_mounts_are_left_to_the_next_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    from perfguard.capture.seal import view

    monkeypatch.setattr(view, "_mount_points", lambda: sorted(f"/usr/lib/{number}" for number in range(10_000)))
    monkeypatch.setattr(view._Cover.__init__, "__kwdefaults__", {"most_mounts": 10})
    status, said = in_seal(None, lambda seal: seal.rung)
    assert (status, said) == (0, "landlock")


# --- What programs do to modes, and who dies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", KERNEL_RUNGS)
@pytest.mark.parametrize(
    "command",
    ["chmod 600 best.pt", "touch -d 2001-01-01 best.pt", "chown 12 best.pt", "ln best.pt hard", "echo x > /dev/of_ours"],
)
def test_a_program_changes_no_mode_time_and_owner(rung: Rung, command: str, folder: Path) -> None:
    before = state(folder)
    in_seal(rung, lambda seal: subprocess.run(["sh", "-c", f"cd {folder}; {command}"], capture_output=True))
    assert state(folder) == before
    assert not Path("/dev/of_ours").exists()


def test_a_file_that_was_open_before_is_not_copied(folder: Path, stack: ExitStack) -> None:
    """A log of many gigabytes would fill the disk in each dry run."""
    log = stack.enter_context((folder / "best.pt").open("ab", buffering=0))

    def attack(seal: Seal) -> str:
        with suppress(OSError):
            log.write(b"x")
        return str([path.name for path in Path(tempfile.gettempdir()).rglob("best.pt")])

    assert in_seal("landlock", attack) == (0, "[]")

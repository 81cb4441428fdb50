"""A PostgreSQL of our own: found on the machine, started once, stopped at the end."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


class Postgres:
    """One server in a folder of its own, reached by a Unix socket in it. Holds nothing dear, so it syncs nothing."""

    def __init__(self, binaries: Path, folder: Path, user: str | None) -> None:
        self._binaries = binaries
        self._folder = folder
        self._user = user
        self._port = _free_port()
        self._run("initdb", "--pgdata", str(folder / "data"), "--username", "perfguard", "--auth", "trust", "--no-sync")
        self.start()

    def start(self) -> None:
        options = f"-k {self._folder} -h '' -p {self._port} -c fsync=off -c max_connections=60"
        log = str(self._folder / "server.log")
        self._run("pg_ctl", "--pgdata", str(self._folder / "data"), "--wait", "--log", log, "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "--pgdata", str(self._folder / "data"), "--wait", "--mode", "fast", "stop")

    def new_database(self) -> str:
        """The URL of an empty database."""
        import psycopg

        name = f"log_{uuid.uuid4().hex}"
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return f"postgresql+psycopg://perfguard@/{name}?host={self._folder}&port={self._port}"

    def _conninfo(self, database: str) -> str:
        return f"host={self._folder} port={self._port} user=perfguard dbname={database}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), *arguments]
        if self._user is not None:  # PostgreSQL refuses to run as root
            command = ["runuser", "-u", self._user, "--", *command]
        done = subprocess.run(
            command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout.decode()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    user = _other_user() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="perfguard-pg-"))  # short: the path of a Unix socket has at most 107 bytes
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = Postgres(binaries, folder, user)
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    return postgres.new_database()


def _binaries() -> Path | None:
    """The folder of the newest server; Debian keeps it off the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    found = shutil.which("initdb")
    folders += [Path(found).resolve().parent] if found else []
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def _other_user() -> str:
    if shutil.which("runuser") is None:
        pytest.skip("we are root and there is no runuser, and PostgreSQL refuses to run as root")
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in known), "nobody")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""A dry run that maps the files of large weights holds none of them, and is not ended for its memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from perfguard.capture.held import held_bytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the pages of files apart")
def test_pages_of_a_mapped_file_are_not_held_and_own_pages_are(tmp_path: Path) -> None:
    size = 64 * 2**20
    (tmp_path / "weights").write_bytes(b"")
    os.truncate(tmp_path / "weights", size)
    before = held_bytes(os.getpid())
    with (tmp_path / "weights").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[at] for at in range(0, size, 4096)) == 0
        assert held_bytes(os.getpid()) - before < size // 2
    own = bytearray(os.urandom(1)) * size
    assert held_bytes(os.getpid()) - before > size // 2
    assert len(own) == size


def test_a_process_that_has_ended_holds_nothing() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert held_bytes(child) == 0

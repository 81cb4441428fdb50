"""The memory of the host that a process holds: its own pages. The system can drop those of files that are only mapped."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_OWN = ("RssAnon:", "RssShmem:")
"""Lines of /proc/PID/status (proc(5)). A third, RssFile, has the pages of files."""


def held_bytes(process: int) -> int:
    """Return the bytes that a process holds. 0: it has ended. Where the system does not tell files apart, these count, too."""
    with suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith(_OWN)]
        if lines:
            return sum(int(number) for _, number, _ in lines) * 1024
    try:
        return int(psutil.Process(process).memory_info().rss)
    except psutil.Error:
        return 0

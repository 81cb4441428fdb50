"""Where the user's own measurement log is. To know it, nothing is imported that takes long."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_directory() -> Path:
    """The user's data directory by the convention of the platform."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "perfguard"


def default_location() -> str:
    """The path or URL in the environment variable PERFGUARD_LOG, else the file of the user's own log."""
    return os.environ.get("PERFGUARD_LOG") or str(data_directory() / "log.db")

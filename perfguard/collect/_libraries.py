"""What networks of vision and text are made with. The fork server imports this, so that no process has to pay for it again."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from perfguard.tables._networks import ARCHITECTURES

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
with suppress(Exception):  # the choice of spaces has reported what is missing or broken
    importlib.import_module("timm")
with suppress(Exception):
    for name in ARCHITECTURES.values():
        getattr(importlib.import_module("transformers"), name)

"""Imports the libraries of vision and text networks. The fork server imports this module, so that no process repeats it."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from perfguard_research.tables.networks import ARCHITECTURES

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
with suppress(Exception):  # the choice of spaces has reported what is missing or broken
    importlib.import_module("timm")
with suppress(Exception):
    for name in ARCHITECTURES.values():
        getattr(importlib.import_module("transformers"), name)

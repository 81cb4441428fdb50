"""Imports the libraries of vision and text networks into the server that workers are forked from.

Else the first row of each process would be charged for their memory.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from perfguard_research.collect.spaces import TEXT

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
for name in ("timm", "torchvision.models"):
    with suppress(Exception):  # the choice of spaces has said what is missing or broken
        importlib.import_module(name)
with suppress(Exception):
    for name in TEXT.values():
        getattr(importlib.import_module("transformers"), name)

"""Why a dry run has shown nothing, where it matters to who has asked for it."""

from __future__ import annotations

from perfguard.exceptions import CaptureError


class SelfEnded(CaptureError):
    """The objective ends the trial before its first step, as it may with these parameters and not with others."""


class LeftOutError(CaptureError):
    """An error of an objective that may come from a micro-batch that was left out: it has looked at what only a model does."""

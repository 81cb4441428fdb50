"""What a trial would run, seen by a dry run of its own objective."""

from perfguard.capture.trial import CapturedTrial, capture

__all__ = ["CapturedTrial", "capture"]

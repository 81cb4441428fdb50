"""Deprecated: see `perfguard.learning`."""

from perfguard._deprecated import moved

__getattr__ = moved("perfguard.online", "perfguard.learning", {"LearnerProcess": "FineTuneProcess"})

"""Deprecated: see `perfguard.learning`."""

from perfguard._deprecated import moved

__getattr__ = moved("perfguard.evidence", "perfguard.learning", {"weigh": "assess_log", "Evidence": "LogAssessment"})

"""What a trial would run, seen by a dry run of its own objective."""

from perfguard.capture.child import Answer, Ask, SelfEnded
from perfguard.capture.dry_runs import DryRuns

__all__ = ["Answer", "Ask", "DryRuns", "SelfEnded"]

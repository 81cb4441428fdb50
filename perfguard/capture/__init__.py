"""What a trial would run, seen by a dry run of its own objective."""

from perfguard.capture.child import Answer, Ask
from perfguard.capture.dry_runs import DryRuns
from perfguard.capture.errors import SelfEnded

__all__ = ["Answer", "Ask", "DryRuns", "SelfEnded"]

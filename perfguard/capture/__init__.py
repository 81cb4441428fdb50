"""What a trial would run, seen by a dry run of its own objective."""

from perfguard.capture.dry_runs import Answer, Ask, DryRuns, SelfEnded, seen

__all__ = ["Answer", "Ask", "DryRuns", "SelfEnded", "seen"]

"""Learning from the measurement log.

after every run    `assess_log` finds which readings can be believed. `LogSync` conditions the predictor on them.
now and then       `OnlineTrainer` fine-tunes weights, judges them, and promotes them in the log if they are better.
                   `FineTuneProcess` runs it beside a study, and `perfguard learn` runs it beside a cluster.
"""

from perfguard.learning.assessment import LogAssessment, assess_log
from perfguard.learning.change_point import Drift
from perfguard.learning.config import AssessmentConfig
from perfguard.learning.process import FineTuneProcess
from perfguard.learning.quarantine import Quarantined
from perfguard.learning.sync import LogSync
from perfguard.learning.trainer import LEASE, Generation, OnlineTrainer, TrainerConfig

__all__ = [
    "LEASE",
    "AssessmentConfig",
    "Drift",
    "FineTuneProcess",
    "Generation",
    "LogAssessment",
    "LogSync",
    "OnlineTrainer",
    "Quarantined",
    "TrainerConfig",
    "assess_log",
]

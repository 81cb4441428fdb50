"""Architecture search under limits of the deployed network."""

from perfguard.nas._constraint import LatencyConstraint
from perfguard.nas._protocols import ConstrainedTrial
from perfguard.nas._space import ElasticSpace

__all__ = ["ConstrainedTrial", "ElasticSpace", "LatencyConstraint"]

"""Tables of measured runs: reading them, and holding a predictor against them."""

from perfguard.tables._evaluate import PREDICTED, Evaluated, Score, evaluate, report
from perfguard.tables._workloads import COLUMNS, WorkloadRow, read_table, workload_of, workload_row
from perfguard.tables._zoo import prepare_torchvision, timm_model

__all__ = [
    "COLUMNS",
    "PREDICTED",
    "Evaluated",
    "Score",
    "WorkloadRow",
    "evaluate",
    "prepare_torchvision",
    "read_table",
    "report",
    "timm_model",
    "workload_of",
    "workload_row",
]

"""Tables of measured runs: reading them, and holding a predictor against them."""

from perfguard.tables._collected import CollectedRow
from perfguard.tables._csv import read_table
from perfguard.tables._evaluate import PREDICTED, Evaluated, Score, evaluate, predicted_columns, report
from perfguard.tables._kinds import kind_of_table, parser_of
from perfguard.tables._operators import OperatorRow
from perfguard.tables._rows import MeasuredRow, model_on_meta
from perfguard.tables._runs import RunRow, run_row
from perfguard.tables._workloads import COLUMNS, WorkloadRow, workload_row
from perfguard.tables._zoo import timm_model

__all__ = [
    "COLUMNS",
    "PREDICTED",
    "CollectedRow",
    "Evaluated",
    "MeasuredRow",
    "OperatorRow",
    "RunRow",
    "Score",
    "WorkloadRow",
    "evaluate",
    "kind_of_table",
    "model_on_meta",
    "parser_of",
    "predicted_columns",
    "read_table",
    "report",
    "run_row",
    "timm_model",
    "workload_row",
]

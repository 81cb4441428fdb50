"""Tables of measured runs: reading them, and holding a predictor against them."""

from perfguard_research.tables.collected import CollectedRow
from perfguard_research.tables.csv import read_table
from perfguard_research.tables.kinds import kind_of_table, parser_of
from perfguard_research.tables.operators import OperatorRow
from perfguard_research.tables.rows import MeasuredRow, model_on_meta
from perfguard_research.tables.runs import RunRow, run_row
from perfguard_research.tables.workloads import COLUMNS, WorkloadRow, workload_row
from perfguard_research.tables.zoo import timm_model

__all__ = [
    "COLUMNS",
    "CollectedRow",
    "MeasuredRow",
    "OperatorRow",
    "RunRow",
    "WorkloadRow",
    "kind_of_table",
    "model_on_meta",
    "parser_of",
    "read_table",
    "run_row",
    "timm_model",
    "workload_row",
]

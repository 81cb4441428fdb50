"""The report of a guarded study or of a measurement log: one HTML file that needs no network.

Example:
    >>> from perfguard.report import write_report
    >>> write_report(study, "report.html")                                                          # doctest: +SKIP

Integrations read their host's trials into a :class:`Report`. The page is the same for all.
"""

from perfguard.report._data import OUTCOMES, History, Outcome, Report, ReportTrial
from perfguard.report._log_reader import device_names, history_of, report_of_log, trials_of_rows
from perfguard.report._page import page_of
from perfguard.report._source import READERS_GROUP, read_report, tables_in, write_report

__all__ = [
    "OUTCOMES",
    "READERS_GROUP",
    "History",
    "Outcome",
    "Report",
    "ReportTrial",
    "device_names",
    "history_of",
    "page_of",
    "read_report",
    "report_of_log",
    "tables_in",
    "trials_of_rows",
    "write_report",
]

"""A report on results: one page that says what was found, and its figures and tables as files for a paper."""

from engram.experiments.report.page import Report, make_report
from engram.experiments.report.reading import read

__all__ = ["Report", "make_report", "read"]

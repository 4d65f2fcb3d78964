"""The report as a notebook shows it: a table with inline style, for light grounds and dark ones."""

from __future__ import annotations

from gact_graph.api.report.data import ReportData
from gact_graph.api.report.lines import LEFT, columns_of, lines_of, total_of
from gact_graph.api.report.templates import template


def render(report: ReportData) -> str:
    """HTML without a script, and without colors of its own for letters."""
    return template("notebook.html").render(
        report=report,
        nothing_yet=report.why_empty,
        lines=[*lines_of(report), total_of(report)],
        columns=columns_of(report),
        left=LEFT,
    )

"""The report as a bar chart for a paper, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from gact_graph.api.report.data import ReportData

_SHOWN = 20
"""Contexts with bars of their own, the largest."""


def plot(report: ReportData, path: str | Path) -> None:
    """Writes the chart; see :meth:`gact_graph.Report.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib for a plot (got none): pip install matplotlib"
        ) from error
    report.check_not_empty()
    rows = report.largest_first[:_SHOWN][::-1]
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    for shift, name, color in ((0.2, "raw", "#9aa5b1"), (-0.2, "stored", "#d1495b")):
        widths = [getattr(row, f"{name}_bytes") / 2**20 for row in rows]
        axes.barh([p + shift for p in places], widths, height=0.4, label=name, color=color)
    # Matplotlib reads a pair of dollars as mathematics.
    labels = [row.slot.replace("$", r"\$") for row in rows]
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.set_xlabel("MiB saved for backward")
    axes.set_title(report.headline, fontsize=10)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)

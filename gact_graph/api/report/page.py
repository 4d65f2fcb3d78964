"""The report as one HTML page that needs no network."""

from __future__ import annotations

from pathlib import Path

from gact_graph.api.report.areas import areas
from gact_graph.api.report.curve import curve
from gact_graph.api.report.data import ReportData
from gact_graph.api.report.layers import label_of, layer_of
from gact_graph.api.report.templates import template
from gact_graph.api.report.units import format_bytes

_ENDINGS = (".html", ".htm")
_ROLES = ("node", "edge", "mask", "index", "other")


def save(report: ReportData, path: str | Path) -> None:
    """Writes the page; see :meth:`gact_graph.Report.save`."""
    path = Path(path)
    if path.suffix.lower() not in _ENDINGS:
        raise ValueError(
            f"Expected a file name that ends in .html (got {path.name!r}); "
            "for a picture take report.plot"
        )
    report.check_not_empty()
    page = render(report)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Expected a folder that exists (got {str(path.parent)!r}); make it first"
        )
    path.write_text(page, encoding="utf-8")


def render(report: ReportData) -> str:
    """The page as text.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("Expected plotly for a page (got none): pip install plotly") from error
    drawn = {"step": curve(report)}
    for name, field in (("stock", "raw_bytes"), ("now", "stored_bytes")):
        if getattr(report, field):
            drawn[name] = areas(report, field)
    return template("page.html").render(
        report=report,
        figures=drawn,
        roles=[role for role in _ROLES if any(row.role == role for row in report.contexts)],
        rows=[
            (row, label_of(layer_of(row.slot)))
            for row in sorted(report.contexts, key=lambda row: -row.raw_bytes)
        ],
        plotly_js=get_plotlyjs(),
        bytes=format_bytes,
    )

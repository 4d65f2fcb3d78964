"""The report as HTML: a page of its own, and a table in a notebook. Templates escape all names."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from gact_graph.api.report.figures import curve, treemap
from gact_graph.api.report.names import format_bytes, label_of, layer_of
from gact_graph.api.report.table import LEFT, columns_of, lines_of

if TYPE_CHECKING:
    from jinja2 import Template

    from gact_graph.api.report.report import Report

_ROLES = ("node", "edge", "mask", "index", "other")


@functools.cache
def _template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("gact_graph.api.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)


def render(report: Report) -> str:
    """Return the page.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("Expected plotly for a page (got none): pip install plotly") from error
    figures = {"step": curve(report)}
    for name, field in (("stock", "raw_bytes"), ("now", "stored_bytes")):
        if getattr(report, field):
            figures[name] = treemap(report, field)
    return _template("page.html").render(
        report=report,
        figures=figures,
        roles=[role for role in _ROLES if any(row.role == role for row in report.contexts)],
        rows=[
            (row, label_of(layer_of(row.slot)))
            for row in sorted(report.contexts, key=lambda row: -row.raw_bytes)
        ],
        plotly_js=get_plotlyjs(),
        bytes=format_bytes,
    )


def render_notebook(report: Report) -> str:
    """Return the table without scripts, in the notebook's colors of text and background."""
    return _template("notebook.html").render(
        report=report, lines=lines_of(report), columns=columns_of(report), left=LEFT
    )

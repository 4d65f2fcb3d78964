"""HTML: a page for a report, and tables for pages and notebooks. Templates escape all names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from gact_graph.api.report.figures import curve, treemap
from gact_graph.api.report.names import format_bytes, label_of, layer_of
from gact_graph.api.report.sheet import LEFT, Sheet

if TYPE_CHECKING:
    from jinja2 import Template

    from gact_graph.api.report.report import Report

ENDINGS = ".html", ".htm"

_ROLES = ("node", "edge", "mask", "index", "other")

_COLORS = {"stock": "#84909c", "now": "#d1495b", "now-device": "#b26a00"}
"""The colors of curves, which are visible on light and on dark ground."""


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


def render_sheet(sheet: Sheet, name: str = "notebook.html") -> str:
    """Return a sheet without scripts, in the reader's colors of text and background.

    Args:
        sheet: The sheet.
        name: The template: ``"notebook.html"`` for a notebook, ``"sheet.html"`` for a page.
    """
    most = max([1, *(curve.most for curve in sheet.curves)])
    return _template(name).render(
        sheet=sheet,
        left=LEFT,
        colors=_COLORS,
        # A budget far above the curves would flatten them.
        top=max(most, sheet.limit if sheet.limit < 2 * most else 0),
        bytes=format_bytes,
    )


def check_ending(path: str | Path, remedy: str = "") -> None:
    """Raise ValueError unless a path has the ending of a page.

    Args:
        path: The path.
        remedy: The end of the message: the way to other files.
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise ValueError(
            f"Expected a file name that ends in .html (got {Path(path).name!r}){remedy}"
        )


def write(path: str | Path, text: str) -> None:
    """Write a page.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    check_folder(path)
    Path(path).write_text(text, encoding="utf-8")


def check_folder(path: str | Path) -> None:
    """Raise FileNotFoundError unless the folder of a file exists."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"Expected a folder that exists (got {str(folder)!r}); create it first"
        )

"""The report as a table for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gact_graph.api.report.data import ReportData
from gact_graph.api.report.lines import LEFT, columns_of, lines_of, total_of
from gact_graph.api.report.names import shorten

_NAME = 32
"""Columns give way to names until these have this width."""

_DISPENSABLE = ("sensitivity", "role", "contexts", "share", "codec", "bits")
"""Columns that are left out where the terminal is narrow, the first one first."""

_GAP = 3
"""Characters between two columns: the padding of both, and the line of the box."""


def render(report: ReportData, width: int) -> Iterator[RenderableType]:
    """The table, and the remarks below it.

    Args:
        report: The numbers.
        width: Of the terminal, in characters.
    """
    if report.empty:
        yield report.why_empty
        return
    yield _table(report, width)
    if report.costs:
        yield Text("; ".join(f"{name}: {value}" for name, value in report.costs.items()))
    for remark in report.remarks:
        yield Text(remark)


def _table(report: ReportData, width: int) -> Table:
    lines, total, columns = lines_of(report), total_of(report), columns_of(report)
    longest = max(cell_len(line.name) + 2 * line.level for line in [*lines, total])

    def room() -> int:
        widths = [max(len(line.cells.get(c, "")) for line in [*lines, total]) for c in columns]
        named = (max(len(c), w) for c, w in zip(columns, widths, strict=True))
        return width - sum(n + _GAP for n in named)

    for column in _DISPENSABLE:
        if column in columns and room() < min(longest, _NAME):
            columns.remove(column)
    place = max(3, min(longest, room()))
    table = Table(
        title=report.headline,
        caption="saved for backward in the last forward",
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        show_footer=True,
    )
    for column in (report.by, *columns):
        footer = total.name if column == report.by else total.cells.get(column, "")
        table.add_column(
            column,
            Text(footer),
            justify="left" if column in LEFT else "right",
            no_wrap=True,
        )
    for line in lines:
        indent = 2 * line.level
        name = shorten(line.name, place - indent) if line.is_name else line.name
        cells = [" " * indent + name, *(line.cells.get(column, "") for column in columns)]
        table.add_row(*map(Text, cells), style="bold" if line.heads else None)
    return table

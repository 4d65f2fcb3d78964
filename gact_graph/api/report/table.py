"""The report as a table, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gact_graph.api.report.contexts import Contexts, by_layer
from gact_graph.api.report.names import counted, format_bytes, shorten

if TYPE_CHECKING:
    from gact_graph.api.report.report import Report

SHOWN = 20
"""Contexts with rows of their own, the largest."""

LEFT = ("slot", "layer", "role", "codec")
"""Columns of words, which are aligned to the left; the other columns have numbers."""

_NAME = 32
"""Columns are dropped until names have this width."""

_DISPENSABLE = ("sensitivity", "role", "contexts", "share", "codec", "bits")
"""Columns to drop in a narrow terminal, the first one first."""

_GAP = 3
"""Characters between two columns: the padding of both, and the line of the box."""


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        name: The text of the first column.
        cells: The texts of the other columns by title.
        level: 1 for a part of the row above.
        is_sum: Whether the next rows are parts of this row.
        can_shorten: Whether the name is a path, to be shortened in a narrow terminal.
    """

    name: str
    cells: dict[str, str]
    level: int = 0
    is_sum: bool = False
    can_shorten: bool = True


def columns_of(report: Report) -> list[str]:
    """Return the titles of the columns after the first."""
    if report.by == "layer":
        return ["contexts", "bits", "raw", "stored", "share"]
    measured = any(row.sensitivity is not None for row in report.contexts)
    return ["role", "codec", *["sensitivity"] * measured, "bits", "raw", "stored", "share"]


def lines_of(report: Report) -> list[Line]:
    """Return the rows by slot or by layer, and the total as the last row."""
    lines = _by_slot(report)
    if report.by == "layer":
        layers = by_layer(report.contexts)
        lines = (Line(layer.label, _averages(layer, report)) for layer in layers)
    return [*lines, Line("total", _averages(report, report))]


def _by_slot(report: Report) -> Iterator[Line]:
    """Yield the largest contexts, grouped by layer below the sum of the layer."""
    rows = report.largest_first
    layers = {layer.name: layer for layer in by_layer(report.contexts)}
    for shown in by_layer(rows[:SHOWN]):
        grouped = len(shown.contexts) > 1
        if grouped:
            yield Line(shown.label, _sums(layers[shown.name], report), is_sum=True)
        for row in shown.contexts:
            cells = _sums(Contexts([row]), report) | {
                "role": row.role,
                "codec": row.codec,
                "sensitivity": "" if row.sensitivity is None else f"{row.sensitivity:.2g}",
                "bits": "" if row.bits is None else f"{row.bits:g}",
            }
            yield Line(row.slot, cells, level=int(grouped))
    if rows[SHOWN:]:
        name = counted(len(rows) - SHOWN, "smaller context")
        yield Line(name, _sums(Contexts(rows[SHOWN:]), report), can_shorten=False)


def _sums(part: Contexts, report: Report) -> dict[str, str]:
    share = part.stored_bytes / report.stored_bytes if report.stored_bytes else 0.0
    return {
        "raw": format_bytes(part.raw_bytes),
        "stored": format_bytes(part.stored_bytes),
        "share": f"{share:.1%}",
    }


def _averages(part: Contexts, report: Report) -> dict[str, str]:
    bits = part.average_bits
    return _sums(part, report) | {
        "contexts": str(len(part.contexts)),
        "bits": "" if bits is None else f"{bits:.2f}",
    }


def render(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield the table and the lines below it.

    Args:
        report: The numbers.
        width: The width of the terminal in characters.
    """
    if report.empty:
        yield report.why_empty
        return
    yield _table(report, width)
    if report.costs:
        yield Text("; ".join(f"{name}: {value}" for name, value in report.costs.items()))
    yield from map(Text, report.remarks)


def _table(report: Report, width: int) -> Table:
    lines = lines_of(report)
    longest = max(cell_len(line.name) + 2 * line.level for line in lines)
    widths = {
        column: _GAP + max(len(column), *(len(line.cells.get(column, "")) for line in lines))
        for column in columns_of(report)
    }
    for column in _DISPENSABLE:
        if width - sum(widths.values()) < min(longest, _NAME):
            widths.pop(column, None)
    room = max(3, min(longest, width - sum(widths.values())))
    table = Table(
        title=report.headline,
        caption="saved for backward in the last forward",
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        show_footer=True,
    )
    *lines, total = lines
    for column in (report.by, *widths):
        table.add_column(
            column,
            Text(total.name if column == report.by else total.cells.get(column, "")),
            justify="left" if column in LEFT else "right",
            no_wrap=True,
        )
    for line in lines:
        indent = 2 * line.level
        name = shorten(line.name, room - indent) if line.can_shorten else line.name
        cells = [" " * indent + name, *(line.cells.get(column, "") for column in widths)]
        table.add_row(*map(Text, cells), style="bold" if line.is_sum else None)
    return table

"""Tables with columns that are declared once, for a terminal and for Markdown."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

Column = tuple[str, "str | Callable[[Any], str]"]
"""A head, and a format string of the entries of a row or a function of the row."""


class Table(NamedTuple):
    """The head and the rows of a table, as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table in Markdown; a bar inside a cell is escaped."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )


class _Cells(string.Formatter):
    """Format strings with the unit ``MB``, and with a text for None after a bar."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        spec, _, missing = format_spec.partition("|")
        if value is None:
            return missing
        if spec.endswith("MB"):
            value, spec = value / 1e6, f",.{spec[:-2] or 0}f"
        return format(value, spec)


def cell(template: str, row: Row) -> str:
    """Fill in a format string.

    >>> cell("{peak:MB} of {all[b]:.1f}, {x:.2f|none}", {"peak": 2e9, "all": {"b": 1}, "x": None})
    '2,000 of 1.0, none'
    """
    return _Cells().vformat(template, (), row)


def table(spec: Iterable[Column], rows: Iterable[Row]) -> Table:
    """Return a table of one line for each row.

    Args:
        spec: The columns. A format string takes ``:MB`` for bytes in megabytes (``:1MB`` with a
            digit), and after a bar the text of an entry that is None.
        rows: The entries; those with a ``reason`` for their absence show it.
    """
    spec = [*spec]

    def line(row: Row) -> tuple[str, ...]:
        shown = spec[:1] if "reason" in row else spec
        cells = [cell(of, row) if isinstance(of, str) else of(row) for _, of in shown]
        if "reason" in row:
            cells += [row["reason"], *[""] * (len(spec) - 2)]
        return tuple(cells)

    return Table([head for head, _ in spec], [line(row) for row in rows])

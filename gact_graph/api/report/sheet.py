"""A table with a title, bars, curves and notes, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gact_graph.api.report.curves import Curve, plot
from gact_graph.api.report.names import shorten

LEFT = ("slot", "layer", "strategy", "role", "codec", "tensors", "fits")
"""Columns of words, which are aligned to the left; the other columns have numbers."""

_NAME = 32
"""Columns are dropped until names have this width."""

_WORDS = 24
"""The width from which a list of words is broken into lines."""

_GAP = 3
"""Characters between two columns: the padding of both, and the line of the box."""

_BAR = 5, 24
"""The least and the greatest width of a bar; there are no bars in a narrower terminal."""


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        name: The text of the first column.
        cells: The texts of the other columns by title.
        level: 1 for a part of the row above.
        is_sum: Whether the next rows are parts of this row.
        can_shorten: Whether the name is a path, to be shortened in a narrow terminal.
        bars: The lengths of bars by title, relative to the longest of the column.
    """

    name: str
    cells: Mapping[str, str]
    level: int = 0
    is_sum: bool = False
    can_shorten: bool = True
    bars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sheet:
    """A table, and what belongs to it.

    Attributes:
        title: The line above.
        columns: The titles of the columns.
        lines: The rows.
        total: The last row, which is set apart.
        caption: What the title is about.
        dispensable: Columns to drop in a narrow terminal, the first one first.
        curves: Curves below the table: stock, then others.
        limit: Bytes to mark beside the curves.
        notes: Sentences below.
    """

    title: str
    columns: Sequence[str] = ()
    lines: Sequence[Line] = ()
    total: Line | None = None
    caption: str = ""
    dispensable: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    limit: int = 0
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[Line]:
        """The rows with the last."""
        return [*self.lines, *([] if self.total is None else [self.total])]

    @property
    def barred(self) -> list[str]:
        """The titles of columns with bars."""
        return [*dict.fromkeys(title for line in self.lines for title in line.bars)]

    def as_text(self, width: int) -> str:
        """Return the table as text without colors, for lines of a number of characters."""
        console = Console(width=width, force_terminal=False, color_system=None)
        with console.capture() as captured:
            console.print(Group(*self.render(console.options)))
        return captured.get().rstrip("\n")

    def render(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the table, the curves and the notes."""
        if self.rows:
            yield self._table(options.max_width, options.ascii_only)
        if self.curves:
            yield from plot(self.curves, self.limit, options.max_width, options.ascii_only)
        yield from map(Text, self.notes)

    def _table(self, width: int, ascii_only: bool) -> Table:
        first, *others = self.columns
        longest = max(cell_len(line.name) + 2 * line.level for line in self.rows)
        widths = {
            title: _GAP + max(len(title), *(self._width(line, title) for line in self.rows))
            for title in others
        }
        for title in self.dispensable:
            if width - sum(widths.values()) < min(longest, _NAME):
                widths.pop(title, None)
        mark = "..." if ascii_only else "…"
        room = max(3, min(longest, width - sum(widths.values())))
        barred = [title for title in widths if title in self.barred]
        spare = (width - sum(widths.values()) - longest) // max(1, len(barred)) - _GAP
        if spare < _BAR[0]:
            barred = []
        table = Table(
            title=self.title,
            min_width=min(cell_len(self.title), width),
            caption=self.caption,
            box=box.SIMPLE,
            show_edge=False,
            pad_edge=False,
            show_footer=self.total is not None,
        )
        for title in (first, *widths):
            table.add_column(
                title,
                "" if self.total is None else Text(self._cell(self.total, title, room, mark)),
                justify="left" if title in LEFT else "right",
                no_wrap=title != "tensors",
                overflow="crop" if ascii_only else "ellipsis",
            )
            if title in barred:
                table.add_column()
        for line in self.lines:
            cells: list[RenderableType] = []
            for title in (first, *widths):
                cells.append(Text(self._cell(line, title, room, mark)))
                if title in barred:
                    cells.append(_bar(line.bars.get(title, 0.0), min(spare, _BAR[1])))
            table.add_row(*cells, style="bold" if line.is_sum else None)
        return table

    def _cell(self, line: Line, title: str, room: int, mark: str) -> str:
        if title != self.columns[0]:
            return line.cells.get(title, "")
        indent = 2 * line.level
        name = shorten(line.name, room - indent, mark) if line.can_shorten else line.name
        return " " * indent + name

    @staticmethod
    def _width(line: Line, title: str) -> int:
        width = len(line.cells.get(title, ""))
        return min(width, _WORDS) if title == "tensors" else width


def _bar(length: float, width: int) -> ProgressBar:
    return ProgressBar(1.0, length, width=width, style="none", finished_style="bar.complete")

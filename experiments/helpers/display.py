"""Lines, tables and progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from datasets.memory import format_bytes
from experiments.helpers import summary
from experiments.helpers.results import Results

_LONGEST_WORD = 30
_LOG_WIDTH = 100  # columns, where the output is a file or a pipe and has none of its own


def make_console(quiet: bool = False) -> Console:
    """Return a console on standard output, as wide as the terminal; a quiet one prints nothing."""
    width = None if sys.stdout.isatty() else _LOG_WIDTH
    return Console(width=width, highlight=False, quiet=quiet)


def say(console: Console, text: str) -> None:
    """Print one line without markup (a path may hold brackets) and without breaks."""
    console.print(text, markup=False, soft_wrap=True)


def show(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; see :func:`make_table`."""
    console.print(make_table(title, head, rows))


class SeedProgress:
    """One bar a seed, with loss, validation score and the peak of memory so far."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._epochs = epochs
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> SeedProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def follow(self, seed: int) -> Callable[[int, float, float, int | None], None]:
        """Start a seed's bar; return the function that moves it."""
        bar = self._bars.add_task(f"seed {seed}", total=self._epochs, state="")

        def show(epoch: int, loss: float, val_score: float, peak_bytes: int | None) -> None:
            state = f"loss {loss:.4f}  val {100 * val_score:.2f} %"
            if peak_bytes is not None:
                state += f"  memory {format_bytes(peak_bytes)}"
            self._bars.update(bar, completed=epoch, state=state)

        return show


def show_result(console: Console, results: Results, report: Any) -> None:
    """Print the result over the seeds, and the library's report of where the memory went."""
    rows = summary.table(results)
    console.print(make_table(summary.title(results.config), ("", "over the seeds"), rows))
    if report is not None:
        console.print(report)
    else:
        say(console, "Nothing was trained now; where the memory went is in report.md.")


def make_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column is text and the others numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    # Where the table is too wide, names break between words, and never within one.
    words = [word for row in rows for word in row[0].split()]
    narrowest = max(map(len, words), default=0)
    for number, name in enumerate(head):
        if number:
            table.add_column(name, justify="right")
        else:
            table.add_column(name, min_width=min(narrowest, _LONGEST_WORD))
    for row in rows:
        table.add_row(*row)
    return table

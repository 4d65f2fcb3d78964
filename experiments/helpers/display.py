"""Lines, tables and progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from datasets.memory import format_bytes
from experiments.helpers.tables import Table

_LONGEST_WORD = 30
_LOG_WIDTH = 100  # columns, where the output is a file or a pipe and has none of its own


def make_console(quiet: bool = False) -> Console:
    """Return a console on standard output, as wide as the terminal; a quiet one prints nothing."""
    width = None if sys.stdout.isatty() else _LOG_WIDTH
    return Console(width=width, highlight=False, quiet=quiet)


def say(console: Console, text: str) -> None:
    """Print one line without markup (a path may hold brackets) and without breaks."""
    console.print(text, markup=False, soft_wrap=True)


def show(console: Console, title: str, table: Table) -> None:
    """Print a table whose first column is text and the others numbers, without markup."""
    shown = RichTable(
        title=escape(title), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    # If the table is too wide, names break between words, and never within a word.
    words = [word for row in table.rows for word in row[0].split()]
    narrowest = max(map(len, words), default=0)
    for number, name in enumerate(map(escape, table.head)):
        if number:
            shown.add_column(name, justify="right")
        else:
            shown.add_column(name, min_width=min(narrowest, _LONGEST_WORD))
    for row in table.rows:
        shown.add_row(*map(escape, row))
    console.print(shown)


class SeedProgress(progress.Progress):
    """One bar per seed, with loss, validation score and the peak of memory so far."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._epochs = epochs
        super().__init__(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[state]}"),
            progress.TimeElapsedColumn(),
            console=console,
        )

    def follow(self, seed: int) -> Callable[[int, float, float, int | None], None]:
        """Start a seed's bar; return the function that updates it."""
        bar = self.add_task(f"seed {seed}", total=self._epochs, state="")

        def show(epoch: int, loss: float, val_score: float, peak_bytes: int | None) -> None:
            state = f"loss {loss:.4f}  val {100 * val_score:.2f} %"
            if peak_bytes is not None:
                state += f"  memory {format_bytes(peak_bytes)}"
            self.update(bar, completed=epoch, state=state)

        return show

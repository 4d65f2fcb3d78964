"""Progress and lines on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from experiments.helpers.display import SeedProgress, say, show
from experiments.helpers.tables import Table


def console() -> Console:
    return Console(file=io.StringIO(), width=100, highlight=False)


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_progress_shows_loss_score_and_memory() -> None:
    target = console()
    with SeedProgress(target, epochs=4) as progress:
        progress.follow(7)(4, 0.12345, 0.9, 2_500_000)
    text = printed(target)
    for words in ("seed 7", "4/4", "loss 0.1235", "val 90.00 %", "memory 2.5 MB"):
        assert words in text


def test_progress_without_a_known_peak() -> None:
    target = console()
    with SeedProgress(target, epochs=4) as progress:
        progress.follow(7)(1, 1.0, 0.5, None)
    assert "val 50.00 %" in printed(target)
    assert "memory" not in printed(target)


def test_a_table_is_shown_as_it_is() -> None:
    target = console()
    show(target, "[title]", Table(("[head]", "n"), [("[cell]", "[/]")]))
    assert {"[title]", "[head]", "[cell]", "[/]"} <= {*printed(target).split()}


def test_said_lines_are_left_as_they_are() -> None:
    target = console()
    line = "[bold]a path[/bold] " + "x" * 200
    say(target, line)
    assert printed(target) == line + "\n"

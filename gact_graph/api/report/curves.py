"""Bytes over a training step as curves, for a page, a notebook or a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from rich.text import Text

from gact_graph.api.report.contexts import Contexts
from gact_graph.api.report.names import format_bytes, layer_of

if TYPE_CHECKING:
    from gact_graph.api.report.report import Report

_ROWS = 8
"""The height of a plot in a terminal."""

_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curve:
    """The bytes of a training step.

    Attributes:
        name: The displayed name.
        color: The name of the color: ``"stock"``, ``"now"`` or ``"now-device"``.
        points: Places and bytes: 0 is the start of forward, 0.5 that of backward, and 1 its end.
    """

    name: str
    color: str
    points: Sequence[tuple[float, int]]

    @property
    def most(self) -> int:
        """The most bytes."""
        return max(count for _, count in self.points)

    def sampled(self, number: int) -> list[int]:
        """Return the most bytes in each of ``number`` equal parts of the step."""
        parts: list[list[int]] = [[] for _ in range(number)]
        for place, count in self.points:
            parts[min(number - 1, int(place * number))].append(count)
        last, most = 0, []
        for part in parts:
            most.append(max(part, default=last))
            last = part[-1] if part else last
        return most


def layers_in_order(report: Report) -> list[tuple[str, Contexts]]:
    """Return the runs of contexts that one layer saves, in the order of forward."""
    runs = groupby(report.contexts, lambda row: layer_of(row.slot))
    return [(name, Contexts([*rows])) for name, rows in runs]


def curves_of(report: Report) -> list[Curve]:
    """Return the bytes that autograd holds: forward adds contexts, backward frees them.

    A point is a run of contexts that one layer saves. A storage that several contexts share counts
    with the first context, which backward frees last, so backward mirrors forward.
    """
    runs = [run for _, run in layers_in_order(report)]
    curves = [
        (report.baseline, "stock", [run.raw_bytes for run in runs]),
        ("now", "now", [run.stored_bytes for run in runs]),
    ]
    if report.host_bytes:
        on_device = [run.stored_bytes - run.host_bytes for run in runs]
        curves.append(("now, on the device", "now-device", on_device))
    found = []
    for name, color, added in curves:
        held = [*accumulate(added)]
        held = [0, *held, *held[-2::-1], 0]  # backward starts from the peak
        places = [place / (len(held) - 1) for place in range(len(held))]
        found.append(Curve(name, color, [*zip(places, held, strict=True)]))
    return found


def plot(curves: Sequence[Curve], limit: int, width: int, ascii_only: bool) -> Iterator[Text]:
    """Yield the lines of a plot for a terminal: a curve, in front of another one.

    Args:
        curves: The curve behind, and that in front.
        limit: Bytes to mark by a line, unless both curves remain below half of it.
        width: The width of the terminal.
        ascii_only: Whether the terminal has ASCII characters only.
    """
    most = max(curve.most for curve in curves)
    top = max(most, limit if limit < 2 * most else 0, 1)
    labels = [format_bytes(top), *[""] * (_ROWS - 2), "0 B"]
    indent = max(map(len, labels)) + 1
    number = max(8, min(width, 100) - indent)
    behind, front = ([_ROWS * count / top for count in curve.sampled(number)] for curve in curves)
    shade, rule, blocks = (":", "-", " #") if ascii_only else ("░", "┄", _BLOCKS)
    for row in range(_ROWS - 1, -1, -1):
        text = Text(labels[_ROWS - 1 - row].rjust(indent - 1) + " ", no_wrap=True)
        marked = limit <= top and row == min(_ROWS - 1, limit * _ROWS // top)
        for low, high in zip(front, behind, strict=True):
            block = blocks[round(min(1.0, max(0.0, low - row)) * (len(blocks) - 1))]
            if block != " ":
                text.append(block, "red")
            elif high - row >= 0.5:
                text.append(shade, "bright_black")
            else:
                text.append(rule if marked else " ", "cyan")
        yield text
    yield Text(" " * indent + "forward".ljust(number // 2) + "backward", no_wrap=True)
    legend = [(shade, "bright_black", curves[0].name), (blocks[-1], "red", curves[1].name)]
    if top >= limit:
        legend.append((rule, "cyan", "budget"))
    text = Text(" " * indent)
    for mark, style, name in legend:
        text.append(2 * mark, style).append(f" {name}  ")
    yield text

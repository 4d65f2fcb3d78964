"""The ways to train, what a step takes in each, and the first that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from gact_graph.api.budget.miniature import GraphSize
from gact_graph.api.report import format_bytes

MOST_BITS, LEAST_BITS = 8, 2

_MARGIN, _MARGIN_BYTES = 0.04, 4 << 20
"""What a budget leaves free: of the peak, and for what does not grow with it."""


class Way(NamedTuple):
    """One way to train.

    Attributes:
        level: As :func:`gact_graph.wrap` takes it; None: the model runs uncompressed.
        bits: Average bits of an element of a quantized context; 32 where nothing is quantized.
        blocks: Whether message passing runs in blocks.
    """

    level: str | None
    bits: int = 32
    blocks: bool = True

    @property
    def name(self) -> str:
        """What tables and messages call it."""
        if self.level is None:
            return "stock"
        if self.bits == 32:
            return f"{self.level} + blocks" if self.blocks else self.level
        return f"{self.level}, {self.bits} bits"

    @property
    def options(self) -> dict[str, Any]:
        """What to pass to :func:`gact_graph.wrap`."""
        blocks = "auto" if self.blocks else False
        return {"bits": self.bits, "level": self.level, "blocks": blocks}


STOCK, LOSSLESS, BLOCKS = Way(None, blocks=False), Way("lossless", blocks=False), Way("lossless")


def quantizing(device_type: str) -> tuple[str, ...]:
    """The levels that quantize and are worth a trial on such a device."""
    return ("L1", "L2", "CB2") if device_type == "cuda" else ("L1", "CB2")


def ways(device_type: str) -> list[Way]:
    """All of them, the least lossy first, and of equally lossy ones the faster first, as a rule."""
    widths = range(MOST_BITS, LEAST_BITS - 1, -1)
    coded = [Way(level, bits) for bits in widths for level in quantizing(device_type)]
    return [STOCK, LOSSLESS, BLOCKS, *coded]


class Line(NamedTuple):
    """Something that grows with the graph: ``fixed + growing * share`` for a share of it."""

    fixed: float
    growing: float

    def at(self, share: float) -> float:
        """Its value for a share."""
        return self.fixed + self.growing * share

    def times(self, factor: float) -> Line:
        """So many times it."""
        return Line(self.fixed * factor, self.growing * factor)

    def plus(self, other: Line | float) -> Line:
        """The sum of both."""
        fixed, growing = other if isinstance(other, Line) else (other, 0.0)
        return Line(self.fixed + fixed, self.growing + growing)


@dataclass(frozen=True)
class Cost:
    """What a step takes in bytes, by the share of the graph.

    Attributes:
        peak: The most at once, gradients included.
        saved: What is saved for backward.
    """

    peak: Line
    saved: Line


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        way: Its name.
        level: As ``gact_graph.wrap`` takes it; None: the model runs uncompressed.
        bits: As ``wrap`` takes it; 32 where nothing is quantized.
        blocks: Whether message passing runs in blocks.
        peak_bytes: The most that a step adds to what is there before the first one.
        saved_bytes: What is saved for backward.
        fits: Whether the peak is within the budget, with a margin for the error of the estimate;
            None without a budget.
    """

    way: str
    level: str | None
    bits: int
    blocks: bool
    peak_bytes: int
    saved_bytes: int
    fits: bool | None = None


class Estimate:
    """What a training step takes in each way: print it, or take ``to_dict()``.

    A peak is what a step adds to what the device holds before the first one: saved and temporary
    tensors, gradients, and two tensors for each parameter, which Adam keeps. On a CPU it includes
    what the process loads at its first steps, as far as it had not before. The parameters, the
    inputs, and what the training loop makes besides a loss for classes do not count.

    Attributes:
        ways: The least lossy first.
        rows: What each of them takes.
        size: The graph that they are for.
        memory: The budget in bytes; None without one.
        standing: The part of each peak that does not depend on the way.
    """

    def __init__(
        self, costs: Mapping[Way, Cost], size: GraphSize, memory: int | None, standing: int = 0
    ) -> None:
        self._costs = costs
        self.standing = standing
        self.size = size
        self.memory = memory
        self.ways = [*costs]
        self.rows = [self._row(way) for way in self.ways]

    def within(self, memory: int) -> Estimate:
        """The same for another budget, in bytes."""
        return Estimate(self._costs, self.size, memory, self.standing)

    def choose(self) -> Way | None:
        """The first way that fits; None if none does."""
        return next((way for way in self.ways if self._fits(self.peak_of(way))), None)

    def smallest(self) -> tuple[Way, float]:
        """The way with the lowest peak, and that peak in bytes."""
        way = min(self.ways, key=self.peak_of)
        return way, self.peak_of(way)

    def smallest_as_text(self) -> str:
        """Which way has the lowest peak, and the budget that it asks for, as a clause."""
        way, peak = self.smallest()
        needed = format_bytes(self.budget_for(peak))
        return f"the smallest, {way.name}, takes {format_bytes(round(peak))} and asks for {needed}"

    def peak_of(self, way: Way, share: float = 1.0) -> float:
        """Its peak in bytes, for a share of the graph."""
        return self.standing + self._costs[way].peak.at(share)

    def fits(self, way: Way, size: GraphSize) -> bool:
        """Whether a way keeps to the budget on another graph; False if it was not tried.

        Args:
            way: The way.
            size: Of a graph with about the same number of edges a node.
        """
        nodes = size.nodes / max(1, self.size.nodes)
        edges = size.edges / max(1, self.size.edges)
        return way in self._costs and self._fits(self.peak_of(way, max(nodes, edges)))

    @staticmethod
    def budget_for(peak: float) -> int:
        """The least budget in bytes for a peak: more than that, for an estimate may be off."""
        return math.ceil(peak * (1 + _MARGIN)) + _MARGIN_BYTES

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers: ``nodes``, ``edges``, ``memory`` and the ``ways``."""
        return {**asdict(self.size), "memory": self.memory, "ways": [asdict(r) for r in self.rows]}

    def _fits(self, peak: float) -> bool:
        assert self.memory is not None
        return self.budget_for(peak) <= self.memory

    def _row(self, way: Way) -> Row:
        peak, saved = self.peak_of(way), self._costs[way].saved.at(1.0)
        fits = None if self.memory is None else self._fits(peak)
        return Row(way.name, *way, peak_bytes=round(peak), saved_bytes=round(saved), fits=fits)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = f"one step: {self.size.nodes:,} nodes, {self.size.edges:,} edges"
        if self.memory is not None:
            title += f", memory {format_bytes(self.memory)}"
        table = Table(title=title, min_width=len(title))
        table.add_column("way")
        for head in ("peak", "saved"):
            table.add_column(head, justify="right")
        if self.memory is not None:
            table.add_column("fits")
        for row in self.rows:
            cells = [row.way, format_bytes(row.peak_bytes), format_bytes(row.saved_bytes)]
            if row.fits is not None:
                cells.append("yes" if row.fits else "no")
            table.add_row(*cells)
        yield table

    def __str__(self) -> str:
        console = Console(width=80, force_terminal=False, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    __repr__ = __str__

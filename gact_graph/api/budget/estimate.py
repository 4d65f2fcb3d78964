"""What a step would take in each way: a table, and the way to choose by it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from gact_graph.api.budget.growth import Growth
from gact_graph.api.budget.miniature import GraphSize
from gact_graph.api.budget.ways import STOCK, Way
from gact_graph.api.report import format_bytes

_MARGIN, _MARGIN_BYTES = 0.04, 4 << 20
"""What a budget leaves free: of the peak, and for what does not grow with it."""


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        way: Its name.
        level: As ``gact_graph.wrap`` takes it; None: the model as it is.
        bits: As ``wrap`` takes it; 32 where nothing is quantized.
        blocks: Whether message passing runs in blocks.
        peak_bytes: The most that a step holds over what is there at its start, with its gradients.
        saved_bytes: What is saved for backward.
        time: Of a step, over that of a step of the model as it is.
        fits: Whether the peak is within the budget, with a margin for what an estimate cannot
            know; None without a budget.
    """

    way: str
    level: str | None
    bits: int
    blocks: bool
    peak_bytes: int
    saved_bytes: int
    time: float
    fits: bool | None = None


class Estimate:
    """What a step takes in each way: print it, or take ``to_dict()``.

    Attributes:
        ways: The least lossy first, and of equally lossy ones the fastest first.
        rows: What each of them takes.
        size: The graph that they are for.
        memory: The budget in bytes; None without one.
    """

    def __init__(self, grown: dict[Way, Growth], size: GraphSize, memory: int | None) -> None:
        self._grown = grown
        self.size = size
        self.memory = memory
        order = {way: index for index, way in enumerate(grown)}
        by_loss = sorted(grown, key=lambda way: (_loss_rank(way, order), self._time(way)))
        self.rows = [self._row(way) for way in by_loss]
        self.ways = by_loss

    def within(self, memory: int) -> Estimate:
        """The same for another budget, in bytes."""
        return Estimate(self._grown, self.size, memory)

    def choose(self) -> Way | None:
        """The first way that fits; None if none does."""
        return next((way for way in self.ways if self._fits(self.peak_of(way))), None)

    def smallest(self) -> tuple[Way, float]:
        """The way with the lowest peak, and that peak in bytes."""
        peak, index = min((self.peak_of(way), i) for i, way in enumerate(self.ways))
        return self.ways[index], peak

    def peak_of(self, way: Way, share: float = 1.0) -> float:
        """Its peak in bytes, for a share of the graph."""
        return self._grown[way].peak.at(share)

    def fits(self, way: Way, size: GraphSize) -> bool:
        """Whether a way keeps to the budget on another graph.

        Args:
            way: The way.
            size: Of a graph with about the same number of edges a node.
        """
        nodes = size.nodes / max(1, self.size.nodes)
        edges = size.edges / max(1, self.size.edges)
        return self._fits(self.peak_of(way, max(nodes, edges)))

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

    def _time(self, way: Way) -> float:
        return self._grown[way].seconds.at(1.0)

    def _row(self, way: Way) -> Row:
        grown = self._grown[way]
        peak = round(grown.peak.at(1.0))
        return Row(
            way.name,
            way.level,
            way.bits,
            way.blocks,
            peak,
            round(grown.saved.at(1.0)),
            self._time(way) / self._time(STOCK),
            None if self.memory is None else self._fits(peak),
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = f"one step: {self.size.nodes:,} nodes, {self.size.edges:,} edges"
        if self.memory is not None:
            title += f", memory {format_bytes(self.memory)}"
        table = Table(title=title)
        table.add_column("way")
        for head in ("peak", "saved", "time / stock"):
            table.add_column(head, justify="right")
        if self.memory is not None:
            table.add_column("fits")
        for row in self.rows:
            cells = [row.way, format_bytes(row.peak_bytes), format_bytes(row.saved_bytes)]
            cells.append(f"{row.time:.2f}")
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


def _loss_rank(way: Way, order: dict[Way, int]) -> int:
    """Exact ways in their order, then by bits."""
    return order[way] if way.bits == 32 else len(order) - way.bits

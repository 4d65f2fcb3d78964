"""Strategies for training, their costs in memory, and the first that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from gact_graph.api.budget.miniature import GraphSize
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config

MOST_BITS, LEAST_BITS = 8, 2

QUARTER = 0.25
"""The step of averages of bits, where slots and groups share them out."""

_MARGIN, _MARGIN_BYTES = 0.04, 4 << 20
"""The free part of a budget, relative to the peak and in bytes, for the error of an estimate."""


class Strategy(NamedTuple):
    """A choice of level, bits and blocks.

    Attributes:
        level: The ``level`` of :func:`gact_graph.wrap`; None for an uncompressed model.
        bits: Average bits of an element of a quantized context, with :data:`QUARTER` between two
            strategies; 32 if nothing is quantized.
        blocks: Whether message passing runs in blocks.
    """

    level: str | None
    bits: float = 32
    blocks: bool = True

    @property
    def name(self) -> str:
        """The name in tables and messages."""
        if self.level is None:
            return "stock"
        if self.bits == 32:
            return f"{self.level} + blocks" if self.blocks else self.level
        return f"{self.level}, {self.bits:g} bits"

    def config(self, base: Config) -> Config:
        """Return the settings of this strategy; every call is compressed, however small."""
        blocks = "auto" if self.blocks else False
        own = {"bits": self.bits, "level": self.level, "blocks": blocks, "min_bytes": 0}
        return Config(**vars(base) | own)


STOCK = Strategy(None, blocks=False)
LOSSLESS = Strategy("lossless", blocks=False)
BLOCKS = Strategy("lossless")


_FASTEST = "L1"
"""The first of the levels that quantize, on every device."""


def quantizing(device_type: str) -> tuple[str, ...]:
    """Return the levels that quantize, the faster first."""
    return ("L1", "L2", "CB2") if device_type == "cuda" else ("L1", "CB2")


def strategies(device_type: str) -> list[Strategy]:
    """Return the strategies of whole bits, the most precise and of these the fastest first."""
    widths = range(MOST_BITS, LEAST_BITS - 1, -1)
    coded = [Strategy(level, bits) for bits in widths for level in quantizing(device_type)]
    return [STOCK, LOSSLESS, BLOCKS, *coded]


def is_strategy(strategy: Strategy, device_type: str) -> bool:
    """Return whether a strategy is one of :func:`strategies`, or between two of them in bits."""
    bits = strategy.bits
    if isinstance(bits, bool) or not isinstance(bits, (int, float)):
        return False
    known = strategies(device_type)
    return float(bits / QUARTER).is_integer() and all(s in known for s in _whole(strategy))


def _whole(strategy: Strategy) -> tuple[Strategy, Strategy]:
    """Return the strategies of whole bits around a strategy: the narrower and the wider."""
    widths = math.floor(strategy.bits), math.ceil(strategy.bits)
    return strategy._replace(bits=widths[0]), strategy._replace(bits=widths[1])


class Line(NamedTuple):
    """Bytes as a linear function of the share of the graph: ``fixed + growing * share``."""

    fixed: float
    growing: float

    def at(self, share: float) -> float:
        """Return the bytes for a share."""
        return self.fixed + self.growing * share

    def times(self, factor: float) -> Line:
        """Return the product with a number."""
        return Line(self.fixed * factor, self.growing * factor)

    def plus(self, other: Line) -> Line:
        """Return the sum of two lines."""
        return Line(self.fixed + other.fixed, self.growing + other.growing)


@dataclass(frozen=True)
class Cost:
    """The memory of a training step.

    Attributes:
        peak: The peak, including gradients.
        saved: The tensors saved for backward.
    """

    peak: Line
    saved: Line


@dataclass(frozen=True)
class Row:
    """A row of the table of an :class:`Estimate`.

    Attributes:
        strategy: The name of the strategy.
        level: The ``level`` of ``gact_graph.wrap``; None for an uncompressed model.
        bits: The ``bits`` of ``wrap``; 32 if nothing is quantized.
        blocks: Whether message passing runs in blocks.
        peak_bytes: The peak of a step above the memory in use before the first step.
        saved_bytes: The tensors saved for backward.
        fits: Whether the peak fits the budget, with a margin for the error of the estimate;
            None without a budget.
    """

    strategy: str
    level: str | None
    bits: float
    blocks: bool
    peak_bytes: int
    saved_bytes: int
    fits: bool | None = None


class Estimate:
    """The memory of a training step under each strategy: print it, or take ``to_dict()``.

    A peak is the memory that a step adds to the memory in use before the first one: saved and
    temporary tensors, gradients, and the two tensors per parameter that Adam keeps. On a CPU it
    includes libraries that the process loads in its first steps. Parameters, inputs, and tensors of
    the training loop besides a classification loss are not included.

    Attributes:
        strategies: The strategies of whole bits by increasing loss of precision.
        rows: The row of each of these.
        size: The size of the graph.
        memory: The budget in bytes; None without a budget.
        standing: The part of each peak that does not depend on the strategy, in bytes.
    """

    def __init__(
        self,
        costs: Mapping[Strategy, Cost],
        size: GraphSize,
        memory: int | None,
        standing: int = 0,
        quarters: bool = False,
    ) -> None:
        self._costs, self._quarters = costs, quarters
        self.standing = standing
        self.size = size
        self.memory = memory
        self.strategies = [*costs]
        self.rows = [self._row(strategy) for strategy in self.strategies]

    def within(self, memory: int) -> Estimate:
        """Return the same estimate for another budget, in bytes."""
        return Estimate(self._costs, self.size, memory, self.standing, self._quarters)

    def choose(self) -> Strategy | None:
        """Return the first strategy that fits; None if there is none.

        Where averages of bits may be fractions, the fastest level has those that fill the budget.
        """
        found = next((s for s in self.strategies if self._fits(self.peak_of(s))), None)
        # Slower levels have whole bits: else more memory could mean fewer bits, in a faster level.
        if found is None or not self._quarters or found.level != _FASTEST:
            return found
        while self.fits(wider := found._replace(bits=found.bits + QUARTER), self.size):
            found = wider
        return found

    def smallest(self) -> tuple[Strategy, float]:
        """Return the strategy with the lowest peak, and its peak in bytes."""
        strategy = min(self.strategies, key=self.peak_of)
        return strategy, self.peak_of(strategy)

    def smallest_as_text(self) -> str:
        """Return a clause on the strategy with the lowest peak, and the budget that it needs."""
        strategy, peak = self.smallest()
        taken, budget = format_bytes(round(peak)), format_bytes(self.budget_for(peak))
        return f"the smallest, {strategy.name}, takes {taken} and needs a budget of {budget}"

    def peak_of(self, strategy: Strategy, share: float = 1.0) -> float:
        """Return the peak of a strategy in bytes, for a share of the graph."""
        narrow, wide = _whole(strategy)
        between = strategy.bits - narrow.bits
        least, most = (self._costs[s].peak.at(share) for s in (narrow, wide))
        return self.standing + least + between * (most - least)

    def fits(self, strategy: Strategy, size: GraphSize) -> bool:
        """Return whether a strategy fits the budget; False if its cost is unknown.

        Args:
            strategy: The strategy.
            size: The size of a graph with a similar number of edges per node.
        """
        nodes = size.nodes / max(1, self.size.nodes)
        edges = size.edges / max(1, self.size.edges)
        known = all(s in self._costs for s in _whole(strategy))
        return known and self._fits(self.peak_of(strategy, max(nodes, edges)))

    @staticmethod
    def budget_for(peak: float) -> int:
        """Return the least budget for a peak in bytes, which leaves a margin for errors."""
        return math.ceil(peak * (1 + _MARGIN)) + _MARGIN_BYTES

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers: ``nodes``, ``edges``, ``memory`` and ``strategies``."""
        rows = [asdict(row) for row in self.rows]
        return {**asdict(self.size), "memory": self.memory, "strategies": rows}

    def _fits(self, peak: float) -> bool:
        assert self.memory is not None
        return self.budget_for(peak) <= self.memory

    def _row(self, strategy: Strategy) -> Row:
        peak, saved = self.peak_of(strategy), self._costs[strategy].saved.at(1.0)
        fits = None if self.memory is None else self._fits(peak)
        return Row(strategy.name, *strategy, round(peak), round(saved), fits)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = f"one step: {self.size.nodes:,} nodes, {self.size.edges:,} edges"
        if self.memory is not None:
            title += f", memory {format_bytes(self.memory)}"
        table = Table(title=title, min_width=len(title))
        table.add_column("strategy")
        for head in ("peak", "saved"):
            table.add_column(head, justify="right")
        if self.memory is not None:
            table.add_column("fits")
        for row in self.rows:
            cells = [row.strategy, format_bytes(row.peak_bytes), format_bytes(row.saved_bytes)]
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

"""Strategies for training, their costs in memory, and the first that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult

from gact_graph.api.budget.miniature import GraphSize
from gact_graph.api.report import format_bytes, page
from gact_graph.api.report.names import format_error
from gact_graph.api.report.sheet import Line as TableLine
from gact_graph.api.report.sheet import Sheet
from gact_graph.capture.config import Config

MOST_BITS, LEAST_BITS = 8, 2

_MARGIN, _MARGIN_BYTES = 0.04, 4 << 20
"""The free part of a budget, relative to the peak and in bytes, for the error of an estimate."""


class Strategy(NamedTuple):
    """A choice of level, bits and blocks, and of a width for each saved tensor.

    Attributes:
        level: The ``level`` of :func:`gact_graph.wrap`; None for an uncompressed model.
        bits: Average bits of an element of a quantized context; 32 if nothing is quantized.
        blocks: Whether message passing runs in blocks.
        widths: Slots with bits of their own, in alphabetical order; those at 32 are exact.
        offloaded: Slots whose tensors wait for backward in host memory, or for a CPU in files, in
            alphabetical order; empty at level ``"L2"``, which offloads all.
        measures: Whether steps measure sensitivities, if the model is adaptive. If not, the bits
            remain those of :attr:`widths`.
        keep_results: Whether results that take long to compute again are kept: matrix products
            until backward, and sums over neighbors of constant rows until the next step.
    """

    level: str | None
    bits: float = 32
    blocks: bool = True
    widths: tuple[tuple[str, float], ...] = ()
    measures: bool = True
    keep_results: bool = False
    offloaded: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in tables and messages."""
        if self.level is None:
            return "stock"
        away = f", {len(self.offloaded)} offloaded" if self.offloaded else ""
        if self.bits == 32:
            blocks = " + blocks" if self.level == "lossless" and self.blocks else ""
            kept = " + kept results" if self.keep_results else ""
            return f"{self.level}{blocks}{kept}{away}"
        exact = sum(width == 32 for _, width in self.widths)
        return f"{self.level}, {self.bits:g} bits{f', {exact} exact' if exact else ''}{away}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**self._asdict(), "widths": dict(self.widths), "offloaded": [*self.offloaded]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Strategy:
        """Return the strategy of :meth:`to_dict`; version 0.7.0 had no forms of slots."""
        widths = tuple(sorted(values.get("widths", {}).items()))
        offloaded = tuple(sorted(values.get("offloaded", ())))
        return cls(**{**values, "widths": widths, "offloaded": offloaded})

    def renamed(self, change: Callable[[str], str]) -> Strategy:
        """Return the strategy with another name for each slot."""
        widths = tuple(sorted((change(slot), width) for slot, width in self.widths))
        return self._replace(widths=widths, offloaded=tuple(sorted(map(change, self.offloaded))))

    def config(self, base: Config) -> Config:
        """Return the settings of this strategy; every call is compressed, however small."""
        own = {"bits": self.bits, "level": self.level or "L0", "blocks": self.blocks}
        own |= {"min_bytes": 0, "keep_results": self.keep_results}
        own |= {"offloaded": frozenset(self.offloaded)}
        if self.widths:
            adaptive = base.adaptive and self.measures
            bits = self.bits if adaptive else int(self.bits)
            own |= {"widths": dict(self.widths), "adaptive": adaptive, "bits": bits}
        return Config(**vars(base) | own)


STOCK = Strategy(None, blocks=False)
LOSSLESS = Strategy("lossless", blocks=False)
BLOCKS = Strategy("lossless")
FAST = BLOCKS._replace(keep_results=True)

QUANTIZING = "L1", "L2", "CB2"
"""The levels that quantize: in memory, off the device, and with layers that run again."""


def strategies() -> list[Strategy]:
    """Return the strategies with the same bits for all, the most precise and of these the fastest
    first."""
    widths = range(MOST_BITS, LEAST_BITS - 1, -1)
    coded = [Strategy(level, bits) for bits in widths for level in QUANTIZING]
    return [STOCK, LOSSLESS, BLOCKS, *coded]


def is_strategy(strategy: Strategy) -> bool:
    """Return whether a model can train with a strategy."""
    if strategy._replace(offloaded=()) in (FAST, BLOCKS):
        return True
    if strategy._replace(widths=(), measures=True, offloaded=()) in strategies():
        return strategy.measures or bool(strategy.widths)
    has_widths = bool(strategy.widths) or strategy.bits == 32
    return strategy.level in QUANTIZING and strategy.blocks and has_widths


class Line(NamedTuple):
    """Bytes as a linear function of the share of the graph: ``fixed + growing * share``.

    Neither is negative.
    """

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

    @classmethod
    def through(cls, low: float, high: float, shares: tuple[float, float]) -> Line:
        """Return the line through the bytes at two shares; through zero if they are the same."""
        first, second = shares
        if second <= first:
            return cls(0.0, high / second)
        growing = max(0.0, (high - low) / (second - first))
        return cls(max(0.0, high - growing * second), growing)


class Peak(NamedTuple):
    """The peak of a part of a step, from one saved or released tensor to the next.

    Attributes:
        slot: The tensor that is saved or released when the part ends; empty at the end of a step.
        released: Whether the tensor is released, in backward.
        line: The peak in bytes, including gradients.
    """

    slot: str
    released: bool
    line: Line


@dataclass(frozen=True)
class Cost:
    """The cost of a strategy.

    Attributes:
        peaks: The peak of each part of the first steps.
        saved: The tensors saved for backward.
        error: Expected squared error of the gradient, relative to its square; None if unknown.
    """

    peaks: Sequence[Peak]
    saved: Line
    error: float | None = None

    @property
    def peak(self) -> float:
        """The peak of the step in bytes."""
        return max(peak.line.at(1.0) for peak in self.peaks)


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
        error: Expected squared error of the gradient, relative to its square, with the same bits
            for all tensors; 0 if nothing is quantized, None if no sensitivities were measured.
        fits: Whether the peak fits the budget, with a margin for the error of the estimate;
            None without a budget.
    """

    strategy: str
    level: str | None
    bits: float
    blocks: bool
    peak_bytes: int
    saved_bytes: int
    error: float | None
    fits: bool | None = None


class Estimate:
    """The memory of a training step under each strategy: print it, or take ``to_dict()``.

    A peak is the memory that a step adds to the memory in use before the first one: saved and
    temporary tensors, gradients, and the two tensors per parameter that Adam keeps. On a CPU it
    includes libraries that the process loads in its first steps. Parameters, inputs, and tensors of
    the training loop besides a classification loss are not included.

    Attributes:
        strategies: The strategies, from the preferred to the last.
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
    ) -> None:
        self._costs = costs
        self.standing = standing
        self.size = size
        self.memory = memory
        self.strategies: list[Strategy] = [*costs]
        self.rows: list[Row] = [self._row(strategy) for strategy in self.strategies]

    def within(self, memory: int) -> Estimate:
        """Return the same estimate for another budget, in bytes."""
        return Estimate(self._costs, self.size, memory, self.standing)

    def choose(self) -> Strategy | None:
        """Return the first strategy that fits; None if there is none."""
        return next((s for s in self._costs if self._fits(self.peak_of(s))), None)

    def smallest(self) -> tuple[Strategy, float]:
        """Return the strategy with the lowest peak, and its peak in bytes."""
        strategy = min(self.strategies, key=self.peak_of)
        return strategy, self.peak_of(strategy)

    def smallest_as_text(self) -> str:
        """Return a clause on the strategy with the lowest peak, and the budget that it needs."""
        strategy, peak = self.smallest()
        taken, budget = format_bytes(round(peak)), format_bytes(self.budget_for(peak))
        return f"the smallest, {strategy.name}, takes {taken} and needs a budget of {budget}"

    def peak_of(self, strategy: Strategy) -> float:
        """Return the peak of a strategy in bytes."""
        return self.standing + self._costs[strategy].peak

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
        error = self._costs[strategy].error
        return Row(strategy.name, *strategy[:3], round(peak), round(saved), error, fits)

    @property
    def _sheet(self) -> Sheet:
        title = f"one step: {self.size.nodes:,} nodes, {self.size.edges:,} edges"
        columns = ["strategy", "peak", "saved", "error"]
        if self.memory is not None:
            title += f", memory {format_bytes(self.memory)}"
            columns.append("fits")
        most = max(row.peak_bytes for row in self.rows)
        worst = max((min(1.0, row.error or 0.0) for row in self.rows), default=0.0) ** 0.5
        lines = []
        for row in self.rows:
            cells = {
                "peak": format_bytes(row.peak_bytes),
                "saved": format_bytes(row.saved_bytes),
                "fits": "yes" if row.fits else "no",
            }
            bars = {"peak": row.peak_bytes / max(1, most)}
            if row.error is not None:
                cells["error"] = format_error(row.error) if row.error else "0"
                bars["error"] = min(1.0, row.error) ** 0.5 / (worst or 1.0)
            lines.append(TableLine(row.strategy, cells, can_shorten=False, bars=bars))
        return Sheet(title, columns, lines, dispensable=["saved"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._sheet.render(options)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return page.render_sheet(self._sheet)

    def save(self, path: str | Path) -> None:
        """Write the table as an HTML page.

        Args:
            path: A file that ends in ``.html`` or ``.htm``; an existing file is replaced.

        Raises:
            ValueError: If ``path`` has another ending.
            FileNotFoundError: If the folder of ``path`` does not exist.
        """
        page.check_ending(path)
        page.write(path, page.render_sheet(self._sheet, "sheet.html"))

    def __str__(self) -> str:
        return self._sheet.as_text(80)

    __repr__ = __str__

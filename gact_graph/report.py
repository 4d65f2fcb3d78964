"""Where the memory went: the contexts of the last compressed forward, slot by slot."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

_SHOWN = 20
"""Contexts that the table and the plot name one by one, the largest first."""


@dataclass
class Row:
    """One context: what stock autograd would hold for it and what is held instead, in bytes.

    ``host_bytes`` are those of ``stored_bytes`` that were swapped to host memory.
    """

    slot: str
    role: str
    codec: str
    shape: tuple[int, ...]
    numel: int
    bits: int | None
    raw_bytes: int
    stored_bytes: int
    sensitivity: float | None = None
    host_bytes: int = 0


@dataclass(frozen=True)
class LayerRow:
    """What became of one layer, or of one call in it.

    Attributes:
        slot: Its name.
        way: ``blocks``, ``recomputed``, or ``stock`` where neither could be had.
        blocks: How many.
        reason: Why it ran as stock.
    """

    slot: str
    way: str
    blocks: int | None
    reason: str | None


@dataclass(frozen=True)
class Report:
    """The account of one forward. ``print`` it, or take :meth:`to_dict` or :meth:`plot`.

    ``raw_bytes`` are the unique storages that stock autograd would keep for backward, without
    parameters, buffers and the inputs of forward; ``stored_bytes`` are those kept now, of which
    ``host_bytes`` lie in host memory until backward reads them.
    """

    contexts: list[Row] = field(default_factory=list)
    empty: bool = False
    variance_ratio: float | None = None
    """What compression adds to the gradient's variance, over the gradient's mean square."""
    passes: int = 0
    """Forwards with their backwards that measuring has taken since the model was wrapped."""

    layers: list[LayerRow] = field(default_factory=list)
    """Message passing layers; empty where neither blocks nor recomputing was asked for."""
    order_bytes: int = 0
    """What the sorted arcs of the graphs in use take."""
    order_seconds: float = 0.0
    """Spent on sorting arcs, and on finding those sorted before, since the model was wrapped."""
    swaps_from: int | None = None
    """Bytes from which on an encoded context leaves a CUDA device; None where none is to leave."""

    @property
    def raw_bytes(self) -> int:
        return sum(row.raw_bytes for row in self.contexts)

    @property
    def stored_bytes(self) -> int:
        return sum(row.stored_bytes for row in self.contexts)

    @property
    def host_bytes(self) -> int:
        return sum(row.host_bytes for row in self.contexts)

    @property
    def rate(self) -> float | None:
        """raw_bytes / stored_bytes; None where nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    def average_bits(self) -> float | None:
        """Bits an element over the quantized contexts; None where there is none."""
        widths = [(row.bits, row.numel) for row in self.contexts if row.bits is not None]
        numel = sum(n for _, n in widths)
        return sum(bits * n for bits, n in widths) / numel if numel else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, ready for JSON."""
        counts = ("raw_bytes", "stored_bytes", "host_bytes")
        keys = ("slot", "role", "codec", "bits", "sensitivity", *counts)
        return {
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "host_bytes": self.host_bytes,
            "rate": self.rate,
            "average_bits": self.average_bits,
            "variance_ratio": self.variance_ratio,
            "passes": self.passes,
            "layers": [dataclasses.asdict(row) for row in self.layers],
            "order_bytes": self.order_bytes,
            "order_seconds": self.order_seconds,
            "contexts": [
                {key: getattr(row, key) for key in keys} | {"shape": list(row.shape)}
                for row in self.contexts
            ],
        }

    def log(self, writer: Any, step: int | None = None) -> None:
        """Hands four scalars over: rate, stored MB (10^6 bytes), average bits, variance ratio.

        Args:
            writer: TensorBoard's ``SummaryWriter``, or whatever has ``add_scalar(name, value,
                step)``; or a callable that takes these three.
            step: The number of the step.

        Raises:
            TypeError: ``writer`` is neither.

        What is not known (the ratio before anything was measured) is left out.
        """
        add = getattr(writer, "add_scalar", writer)
        if not callable(add):
            raise TypeError(
                f"Expected a writer with add_scalar, or a callable (got {type(writer).__name__})"
            )
        scalars = {
            "rate": self.rate,
            "stored_mb": self.stored_bytes / 1e6,
            "average_bits": self.average_bits,
            "variance_ratio": self.variance_ratio,
        }
        for name, value in scalars.items():
            if value is not None:
                add(f"gact_graph/{name}", value, step)

    def plot(self, path: str | Path) -> None:
        """Writes a bar chart of raw and stored bytes by slot; the suffix tells the format."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "Expected matplotlib for a plot (got none): pip install matplotlib"
            ) from error
        if not self.contexts:
            raise ValueError(f"Expected a report with contexts (got none). {_NOTHING_YET}")
        rows = self._largest()[:_SHOWN][::-1]
        figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(rows))
        for shift, name, color in ((0.2, "raw", "#9aa5b1"), (-0.2, "stored", "#d1495b")):
            widths = [getattr(row, f"{name}_bytes") / 2**20 for row in rows]
            axes.barh([p + shift for p in places], widths, height=0.4, label=name, color=color)
        # Matplotlib reads a pair of dollars as mathematics.
        labels = [row.slot.replace("$", r"\$") for row in rows]
        axes.set_yticks(list(places), labels, fontsize=8)
        axes.set_xlabel("MiB saved for backward")
        axes.set_title(self._headline(), fontsize=10)
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=120)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue().rstrip("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.empty:
            yield _NOTHING_YET
            return
        table = Table(title=self._headline(), caption="saved for backward in the last forward")
        for name in ("slot", "role", "codec"):
            table.add_column(name, overflow="fold")
        rows = self._largest()
        measured = any(row.sensitivity is not None for row in rows)
        names = ("sensitivity",) if measured else ()
        for name in (*names, "bits", "raw", "stored", "share"):
            table.add_column(name, justify="right")
        for row in rows[:_SHOWN]:
            bits = "" if row.bits is None else str(row.bits)
            found = "" if row.sensitivity is None else f"{row.sensitivity:.2g}"
            cells = (found, bits) if measured else (bits,)
            table.add_row(escape(row.slot), row.role, row.codec, *cells, *self._bytes([row]))
        if rows[_SHOWN:]:
            label = f"{len(rows) - _SHOWN} smaller contexts"
            table.add_row(label, *[""] * (3 + measured), *self._bytes(rows[_SHOWN:]))
        table.add_section()
        bits = "" if self.average_bits is None else f"{self.average_bits:.2f}"
        table.add_row("total", *[""] * (2 + measured), bits, *self._bytes(rows))
        yield table
        yield from self._lines()

    def _lines(self) -> Iterator[str]:
        """What else there is to know, one line each."""
        if self.host_bytes:
            stays = format_bytes(self.stored_bytes - self.host_bytes)
            yield f"{format_bytes(self.host_bytes)} lie in host memory, {stays} stay on the device"
        elif self.swaps_from is not None:
            yield (
                "L2 equals L1 here: no context on a CUDA device takes "
                f"{format_bytes(self.swaps_from)} or more once it is encoded"
            )
        cut = [row.blocks for row in self.layers if row.blocks is not None]
        if cut:
            yield (
                f"{len(cut)} calls of message passing in {sum(cut)} blocks; arcs sorted in "
                f"{self.order_seconds:.2f} s so far, {format_bytes(self.order_bytes)}"
            )
        for row in self.layers:
            if row.way == "stock":
                yield f"{escape(row.slot)} runs as PyG has it: it {escape(str(row.reason))}"

    def _largest(self) -> list[Row]:
        return sorted(self.contexts, key=lambda row: -max(row.raw_bytes, row.stored_bytes))

    def _bytes(self, rows: list[Row]) -> tuple[str, str, str]:
        raw, stored = sum(r.raw_bytes for r in rows), sum(r.stored_bytes for r in rows)
        share = stored / self.stored_bytes if self.stored_bytes else 0.0
        return format_bytes(raw), format_bytes(stored), f"{share:.1%}"

    def _headline(self) -> str:
        rate = "" if self.rate is None else f" ({self.rate:.1f}x less)"
        return f"{format_bytes(self.raw_bytes)} -> {format_bytes(self.stored_bytes)}{rate}"


_NOTHING_YET = (
    "No forward was compressed yet: call the model once in training mode with gradients enabled."
)


def format_bytes(count: int) -> str:
    """Bytes in the unit that fits, 1 KiB being 1024 bytes."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"

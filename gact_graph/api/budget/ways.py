"""The ways to train that a memory budget chooses among."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_BITS, LEAST_BITS = 8, 2


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        level: As :func:`gact_graph.wrap` takes it; None: the model as it is.
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
        """What to pass to :func:`gact_graph.wrap`.

        Raises:
            ValueError: The model would stay as it is.
        """
        if self.level is None:
            raise ValueError("Expected a way that wraps the model (got stock)")
        return {
            "bits": self.bits,
            "level": self.level,
            "blocks": "auto" if self.blocks else False,
        }


STOCK = Way(None, blocks=False)
EXACT = (STOCK, Way("lossless", blocks=False), Way("lossless"))


def quantizing(device_type: str) -> tuple[str, ...]:
    """The levels that quantize and are worth a try on such a device."""
    return ("L1", "L2", "CB2") if device_type == "cuda" else ("L1", "CB2")


def ways(device_type: str) -> list[Way]:
    """All of them, the least lossy first, and of equally lossy ones the faster first, as a rule."""
    widths = range(MOST_BITS, LEAST_BITS - 1, -1)
    coded = [Way(level, bits) for bits in widths for level in quantizing(device_type)]
    return [*EXACT, *coded]

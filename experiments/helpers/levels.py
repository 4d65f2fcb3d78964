"""The library's levels by name, and the function by which measurements wrap a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

import gact_graph
from experiments.helpers.values import FP32_BITS
from gact_graph.capture.config import BlockSize, LevelName

EXACT_LEVELS = ("L0", "lossless")
"""Levels that quantize nothing."""

LEVELS = (*EXACT_LEVELS, "L1", "L2", "CB2")


def label(level: str, bits: int) -> str:
    """Return the name of a level with its bits.

    >>> label("lossless", 4), label("L1", 4)
    ('lossless', 'L1 4 bit')
    """
    return level if level in EXACT_LEVELS else f"{level} {bits} bit"


@dataclass(frozen=True)
class Level:
    """A level of the library.

    Attributes:
        level: As :func:`gact_graph.wrap` takes it.
        blocks: The same.
        bits: Bits per element; None takes those of the case.
        adaptive: Whether bits are spent by sensitivity; None takes that of the case.
        prefetch: Whether ``L2`` brings tensors back before they are needed.
        memory: A memory budget in place of all of these.
    """

    level: str
    blocks: BlockSize | None = False
    bits: int | None = None
    adaptive: bool | None = None
    prefetch: bool = True
    memory: str | None = None

    @property
    def label(self) -> str:
        """Return the name in tables."""
        if self.memory is not None:
            return f'`memory="{self.memory}"`'
        bits = f" {self.bits} bit" if self.bits else ""
        blocks = ", blocks" if self.blocks else ""
        if self.level == "CB2":  # whose default are blocks
            blocks = "" if self.blocks else ", no blocks"
        return f"`{self.level}`{bits}{blocks}" + ("" if self.prefetch else " without prefetch")

    def wrap(
        self, model: nn.Module, bits: int = 4, adaptive: bool = False, **more: Any
    ) -> nn.Module:
        """Wrap a model, small tensors included; bits and adaptive are for levels that quantize."""
        if self.memory is not None:
            return gact_graph.wrap(model, memory=self.memory, **more)
        exact = self.level in EXACT_LEVELS
        gact_graph.wrap(
            model,
            bits=FP32_BITS if exact else self.bits or bits,
            level=cast(LevelName, self.level),
            adaptive=(adaptive if self.adaptive is None else self.adaptive) and not exact,
            blocks=self.blocks,
            min_bytes=0,
            **more,
        )
        if not self.prefetch:
            swapping = vars(model)["forward"].controller.swapping
            if swapping is not None:
                swapping.prefetch = False
        return model


LEVELS_BY_NAME = {
    "8GB": Level("lossless", memory="8 GB"),
    "lossless": Level("lossless"),
    "lossless+blocks": Level("lossless", "auto"),
    "L1": Level("L1"),
    "L1+blocks": Level("L1", "auto"),
    "L1-4+blocks": Level("L1", "auto", 4),
    "L1-2+blocks": Level("L1", "auto", 2),
    "L2": Level("L2"),
    "L2-no-prefetch": Level("L2", prefetch=False),
    "CB2": Level("CB2", "auto"),
    "CB2-no-blocks": Level("CB2"),
}
"""The library's levels, with blocks or without, by the names of
:data:`experiments.helpers.strategies.STRATEGIES`."""

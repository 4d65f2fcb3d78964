"""Sums over contexts."""

from __future__ import annotations

from dataclasses import dataclass, field

from gact_graph.support.rows import Row


@dataclass(frozen=True)
class Contexts:
    """Some contexts, in the order in which they were saved."""

    contexts: list[Row] = field(default_factory=list)

    @property
    def raw_bytes(self) -> int:
        """What stock autograd would keep."""
        return sum(row.raw_bytes for row in self.contexts)

    @property
    def stored_bytes(self) -> int:
        """What is kept now."""
        return sum(row.stored_bytes for row in self.contexts)

    @property
    def host_bytes(self) -> int:
        """The part of ``stored_bytes`` that lies in host memory."""
        return sum(row.host_bytes for row in self.contexts)

    @property
    def rate(self) -> float | None:
        """raw_bytes / stored_bytes; None where nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    def average_bits(self) -> float | None:
        """Bits per element on average over the quantized tensors; None where there are none."""
        widths = [(row.bits, row.numel) for row in self.contexts if row.bits is not None]
        numel = sum(n for _, n in widths)
        return sum(bits * n for bits, n in widths) / numel if numel else None

    @property
    def largest_first(self) -> list[Row]:
        """The contexts by what they take, now or in stock."""
        return sorted(self.contexts, key=lambda row: -max(row.raw_bytes, row.stored_bytes))

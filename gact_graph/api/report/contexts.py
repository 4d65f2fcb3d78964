"""Sums over contexts, by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gact_graph.api.report.names import label_of, layer_of
from gact_graph.support.rows import Row


@dataclass(frozen=True)
class Contexts:
    """Contexts in the order in which they were saved."""

    contexts: list[Row] = field(default_factory=list)

    @property
    def raw_bytes(self) -> int:
        """Bytes that stock autograd would keep."""
        return sum(row.raw_bytes for row in self.contexts)

    @property
    def stored_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(row.stored_bytes for row in self.contexts)

    @property
    def host_bytes(self) -> int:
        """The part of ``stored_bytes`` in host memory."""
        return sum(row.host_bytes for row in self.contexts)

    @property
    def rate(self) -> float | None:
        """``raw_bytes / stored_bytes``; None if nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    def average_bits(self) -> float | None:
        """Mean bits per element of the quantized contexts; None without any."""
        quantized = [(row.bits, row.numel) for row in self.contexts if row.bits is not None]
        numel = sum(n for _, n in quantized)
        return sum(bits * n for bits, n in quantized) / numel if numel else None

    @property
    def largest_first(self) -> list[Row]:
        """The contexts by their bytes, raw or stored."""
        return sorted(self.contexts, key=lambda row: -max(row.raw_bytes, row.stored_bytes))


@dataclass(frozen=True)
class Layer(Contexts):
    """The contexts of one layer.

    Attributes:
        name: The name; empty for operations in the forward of the model itself.
    """

    name: str = ""

    @property
    def label(self) -> str:
        """The displayed name."""
        return label_of(self.name)

    @property
    def kind(self) -> str:
        """The name without the number at its end."""
        return self.name.rstrip("0123456789").rstrip(".")


def by_layer(rows: Iterable[Row]) -> list[Layer]:
    """Group contexts by layer, in the order of the first context of each layer."""
    layers: dict[str, Layer] = {}
    for row in rows:
        name = layer_of(row.slot)
        layers.setdefault(name, Layer(name=name)).contexts.append(row)
    return [*layers.values()]

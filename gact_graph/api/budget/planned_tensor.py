"""The form of a saved tensor in a plan, with its memory, time and error."""

from __future__ import annotations

from dataclasses import dataclass

from gact_graph.adaptive.allocator import noise
from gact_graph.codecs import Kept
from gact_graph.support.rows import Row


@dataclass(frozen=True)
class PlannedTensor:
    """A saved tensor.

    Attributes:
        slot: The slot.
        choice: ``"exact"``, a number of bits as in ``"4 bits"``, or another codec of the report;
            ``", offloaded"`` follows for a tensor that waits off the device.
        stock_bytes: The bytes that stock PyG would hold.
        bytes: The bytes that are held on the device.
        error: Expected squared error of the gradient, relative to its square.
        seconds: Time to encode, decode and offload, on the machine that made the plan.
    """

    slot: str
    choice: str
    stock_bytes: int
    bytes: int
    error: float
    seconds: float

    @classmethod
    def of(
        cls,
        row: Row,
        bits: float | None,
        sensitivity: float,
        share: float,
        of_element: float,
        of_byte: float,
    ) -> PlannedTensor:
        """Return a tensor of the whole graph.

        Args:
            row: The row of a trial on a part of the graph.
            bits: The planned bits; None for other codecs than codes.
            sensitivity: The sensitivity of the gradient.
            share: The part, as a share of the graph.
            of_element: The seconds to encode and decode an element.
            of_byte: The seconds to offload and to fetch a byte.
        """
        stored, error, choice, seconds = float(row.stored_bytes), 0.0, row.codec, 0.0
        if bits is not None:
            stored += (bits - (row.bits or bits)) * row.numel / 8
            choice, error = f"{bits:g} bits", sensitivity * noise(bits)
            seconds = row.numel * of_element
        elif row.codec == Kept.codec:
            choice = "exact"
        if row.host_bytes:
            choice, seconds, stored = f"{choice}, offloaded", seconds + stored * of_byte, 0.0
        return cls(
            slot=row.slot,
            choice=choice,
            stock_bytes=round(row.raw_bytes / share),
            bytes=round(stored / share),
            error=error,
            seconds=seconds / share,
        )

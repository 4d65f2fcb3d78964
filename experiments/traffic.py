"""Bytes that a device has to move for a job of the quantizer, by count, and speeds from them."""

from __future__ import annotations

from gact_graph.kernels.reference import TILE

_WORD = 8  # bytes of one bit plane of a tile
_STATS = 4  # bytes of a group's lo and step


def packed_bytes(elements: int, bits: int, group_size: int) -> int:
    """Codes and stats of a packed tensor."""
    return -(-elements // TILE) * bits * _WORD + -(-elements // group_size) * _STATS


def pack_bytes(elements: int, itemsize: int, bits: int, group_size: int) -> int:
    """The tensor read once, codes and stats written once."""
    return elements * itemsize + packed_bytes(elements, bits, group_size)


def unpack_bytes(elements: int, itemsize: int, bits: int, group_size: int) -> int:
    """Codes and stats read once, the tensor written once: as many bytes as packing moves."""
    return pack_bytes(elements, itemsize, bits, group_size)


def copy_bytes(nbytes: int) -> int:
    """A copy of ``nbytes`` reads and writes them."""
    return 2 * nbytes


def gigabytes_per_second(nbytes: int, milliseconds: float) -> float:
    """Speed in GB/s, of 10^9 bytes.

    >>> gigabytes_per_second(4_000_000, 2.0)
    2.0
    """
    return nbytes / milliseconds / 1e6

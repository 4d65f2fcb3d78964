"""Bytes in units that people read."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Bytes in the unit that fits, 1 KiB being 1024 bytes."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def unit_for(most: int) -> tuple[str, int]:
    """The unit of an axis that ends at ``most`` bytes, and how many bytes it is."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return name, size
    return "B", 1

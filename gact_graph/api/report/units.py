"""Bytes in units that people read and write."""

from __future__ import annotations

import re

_UNITS = {
    unit: factor
    for power, prefix in enumerate("kmgt", start=1)
    for unit, factor in ((f"{prefix}b", 1000**power), (f"{prefix}ib", 1024**power))
} | {"b": 1}


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


def parse_bytes(memory: object) -> int:
    """A number of bytes, from that number or from a text such as ``"8 GB"`` or ``"512 MiB"``.

    Raises:
        TypeError: ``memory`` is neither.
        ValueError: It is not positive or no whole number, or the text is of another form.
    """
    if isinstance(memory, bool) or not isinstance(memory, (int, float, str)):
        raise TypeError(
            "Expected memory to be a number of bytes or a text such as '8 GB' "
            f"(got {type(memory).__name__})"
        )
    found: float = 0
    if isinstance(memory, (int, float)):
        found = memory if memory % 1 == 0 else 0  # 8e9 is a whole number; inf and nan are none
    elif match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", memory):
        found = float(match[1]) * _UNITS.get(match[2].lower(), 0)
    if found < 1:
        raise ValueError(
            f"Expected memory as a number of bytes or a text such as '8 GB' (got {memory!r})"
        )
    return int(found)

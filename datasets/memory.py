"""Checks that a graph fits in the memory of this machine, before it is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from datasets.errors import DatasetError

_MEMINFO = Path("/proc/meminfo")
# The limit of a container, in version 2 and in version 1 of Linux's control groups.
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def available_bytes() -> int | None:
    """Return an upper bound on the free bytes of main memory and swap; None if unknown.

    The limit of a container counts whole, also what its processes have taken of it. On systems
    other than Linux, the installed memory counts.
    """
    found = [_of_machine(), *map(_number_in, _LIMITS)]
    return min((number for number in found if number is not None), default=None)


def check_fits(what: str, needed: int, way_out: str) -> None:
    """Raise DatasetError if fewer than :obj:`needed` bytes of main memory are free.

    Args:
        what (str): The object that needs these bytes, as the subject of a sentence.
        needed (int): Bytes, a lower bound.
        way_out (str): Advice for the user.
    """
    available = available_bytes()
    if available is not None and needed > available:
        raise DatasetError(
            f"Expected {what} to fit into the {format_bytes(available)} of memory that are free "
            f"(got at least {format_bytes(needed)}); {way_out}"
        )


def format_bytes(size: float) -> str:
    """Return bytes in decimal units.

    >>> format_bytes(5_944_000_000), format_bytes(12)
    ('5.9 GB', '12 B')
    """
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            value = size / unit
            return f"{value:.1f} {name}" if value < 10_000 else f"{value:.0e} {name}"
    return f"{size:.0f} B"


def _of_machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return sum(int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError):
        pass
    try:  # Not Linux: the installed memory.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" stands for no limit
        return None

"""The bytes that torch's CPU allocator hands out: an exact count, the same at every run.

The resident set of a process is no such count: objects of the interpreter come and go by a few MB,
and freed memory stays for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gact_graph.ops import cpu


class Allocations:
    """The peak memory of CPU tensors since the last :meth:`restart`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def restart(self) -> None:
        """Count from the memory that tensors hold now."""
        self._library.restart_watch()

    @property
    def most_bytes(self) -> int:
        """The peak, less the memory that tensors held at the start."""
        peak: int = self._library.most_watched()
        return peak


@contextmanager
def watching_allocations() -> Iterator[Allocations | None]:
    """Watch the allocations of this thread, and of the backward passes that it calls.

    Yields:
        The allocations; None if there are no compiled kernels, or a profiler of torch is active.
    """
    library = cpu.load()
    if library is None or not library.start_watch():
        yield None
        return
    try:
        yield Allocations(library)
    finally:
        library.end_watch()

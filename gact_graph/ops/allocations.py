"""What torch's CPU allocator hands out: exact, and the same at every run.

The resident set of a process holds whatever else it does: objects of the interpreter come and go by
a few MB, and freed memory stays for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gact_graph.ops import cpu


class Allocations:
    """The most that tensors on the CPU held at once, since ``restart``."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def restart(self) -> None:
        """What tensors hold now is the new start."""
        self._library.restart_watch()

    @property
    def most_bytes(self) -> int:
        """The most since the start, over what was held then."""
        found: int = self._library.most_watched()
        return found


@contextmanager
def watching_allocations() -> Iterator[Allocations | None]:
    """Watches this thread inside, and the backward passes that it calls.

    Yields:
        What is held; None where it cannot be told: no compiler has built the kernels, or one of
        torch's profilers is at work.
    """
    library = cpu.load()
    if library is None or not library.start_watch():
        yield None
        return
    try:
        yield Allocations(library)
    finally:
        library.end_watch()

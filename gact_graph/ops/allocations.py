"""Bytes handed out by torch's CPU allocator: exact and reproducible.

The resident set of a process also includes objects of the interpreter, which vary by a few MB, and
freed memory that has not returned to the system yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gact_graph.ops import allocator


class Watch(NamedTuple):
    """The bytes of tensors on one device, above those at the start.

    Attributes:
        peak: Returns the peak in bytes since the start.
        mark: Returns the peak in bytes since the last mark, or since the start.
    """

    peak: Callable[[], int]
    mark: Callable[[], int]


@contextmanager
def watching_allocations() -> Iterator[Watch | None]:
    """Watch this thread inside the context, and the backward passes that it calls.

    Yields:
        The watch; None without a library for this torch (see
        :mod:`gact_graph.ops.allocator`), or under a profiler of torch.
    """
    library = allocator.load()
    if library is None or not library.start_watch():
        yield None
        return
    try:
        yield Watch(library.most_watched, library.mark_watch)
    finally:
        library.end_watch()

"""Bytes handed out by torch's CPU allocator: exact and reproducible.

The resident set of a process also includes objects of the interpreter, which vary by a few MB, and
freed memory that has not returned to the system yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gact_graph.ops import cpu


@contextmanager
def watching_allocations() -> Iterator[Callable[[], int] | None]:
    """Watch this thread inside the context, and the backward passes that it calls.

    Yields:
        A function that returns the peak of CPU tensors in bytes, above the bytes at the start; None
        without compiled kernels or under a profiler of torch.
    """
    library = cpu.load()
    if library is None or not library.start_watch():
        yield None
        return
    try:
        yield library.most_watched
    finally:
        library.end_watch()

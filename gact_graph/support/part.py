"""Sizes of pieces and thresholds, which shrink with a part of a graph that stands for the whole.

A trial on a part of a graph is to work as training on the whole does: in as many pieces, and with
the same treatment of each tensor. Only then is its memory a share of that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_share = 1.0


def in_proportion(count: int) -> int:
    """Return a number of bytes, elements or rows; of a part, the same share of it, at least 1."""
    return max(1, round(count * _share))


@contextmanager
def part_of_graph(share: float) -> Iterator[None]:
    """Work on a part of a graph inside the context.

    Backward may run on another thread, so this holds for all threads. Sizes decide how work is
    divided, not what it computes.

    Args:
        share: The part, as a share of the graph.
    """
    global _share
    before, _share = _share, share
    try:
        yield
    finally:
        _share = before

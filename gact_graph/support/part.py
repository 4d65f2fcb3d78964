"""Sizes of pieces and thresholds, scaled down while a trial runs on a part of the graph.

A trial on a part of a graph is to work as training on the whole does: in as many pieces, and with
the same treatment of each tensor. Only then is its memory a share of that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_share = 1.0

_ON_DEVICE = 16
"""How much larger a piece is on a GPU: 32 MB in place of the 2 MB that the cache of a CPU holds.

On an H200, a step of a GCN on arxiv_graph launched 806 kernels in pieces of 2 MB, and 273 now."""


def in_proportion(count: int) -> int:
    """Return a number of bytes, elements or rows; of a part, the same share of it, at least 1."""
    return max(1, round(count * _share))


def piece(count: int, device: torch.device) -> int:
    """Return how much of a tensor to process at a time, which a part of a graph shrinks.

    Args:
        count: Bytes, elements or rows that stay in the cache of a CPU.
        device: The tensor's device: a launch on a GPU processes more, to keep it busy.
    """
    return in_proportion(count if device.type == "cpu" else _ON_DEVICE * count)


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

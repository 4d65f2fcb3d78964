"""Edges that are sorted by row, where the edges of row r begin at ``starts[r] - starts[0]``."""

from __future__ import annotations

import torch
from torch import Tensor


def owners_of(starts: Tensor, edges: int) -> Tensor:
    """The row [E] of each of E edges.

    Args:
        starts: int64 [R + 1].
        edges: E.
    """
    return torch.repeat_interleave(starts.diff(), output_size=edges)

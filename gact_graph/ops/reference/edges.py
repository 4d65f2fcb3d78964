"""Edges sorted by row: the edges of row r begin at ``starts[r] - starts[0]``."""

from __future__ import annotations

import torch
from torch import Tensor


def owners_of(starts: Tensor, edges: int) -> Tensor:
    """Return the row of each edge, int64 [E].

    Args:
        starts: The first edge of each row, int64 [R + 1].
        edges: The number of edges E.
    """
    return torch.repeat_interleave(starts.diff(), output_size=edges)

"""Thousands of steps on changing graphs: neither objects nor memory grow, at any level."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from beside import amount, small_storages_count
from torch import Tensor, nn

import gact_graph

STEPS, TRACED, PARTS = amount(1200, 2000), amount(500, 900), 10

WAYS: dict[str, dict[str, Any]] = {
    "L0": {"level": "L0"},
    "lossless": {"level": "lossless"},
    "lossless in blocks": {"level": "lossless", "blocks": 64},
    "L1": {"level": "L1", "blocks": False},
    "L1 in blocks": {"level": "L1", "blocks": 64},
    "L2": {"level": "L2"},
    "CB2, no blocks": {"level": "CB2", "blocks": False},
    "CB2": {"level": "CB2", "blocks": 64},
}


class Net(nn.Module):
    """Sums of weighted rows, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gcn, self.gat = pyg.GCNConv(8, 8), pyg.GATConv(8, 4, heads=2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.dropout(self.gcn(x, edges).relu(), 0.3, self.training)
        return self.gat(x, edges)


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore")  # that a few bits are few is not the point here
def test_nothing_grows(name: str) -> None:
    torch.manual_seed(0)
    # What waits to be measured is there at each look, or at none.
    model = gact_graph.wrap(Net(), adapt_interval=50, min_bytes=0, **WAYS[name])

    def steps(start: int, end: int) -> tuple[int, int, int]:
        for step in range(start, end):
            made = torch.Generator().manual_seed(step)
            nodes, count = 20 + step % 13, 60 + step % 37
            edges = torch.randint(nodes, (2, count), generator=made)
            model(torch.randn(nodes, 8, generator=made), edges).square().sum().backward()
            model.zero_grad()
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0
        return len(gc.get_objects()), traced, _resident()

    with small_storages_count():
        # Until caches are full: torch's, PyG's and the interpreter's.
        objects, _, resident = steps(0, STEPS // 2)
        after, _, resident_after = steps(STEPS // 2, STEPS - TRACED)
        tracemalloc.start()  # which takes time
        try:
            # Traced objects first take the place of older ones, which were not traced.
            start = STEPS - TRACED
            traced = [
                steps(begin, begin + TRACED // PARTS)[1]
                for begin in range(start, STEPS, TRACED // PARTS)
            ]
        finally:
            tracemalloc.stop()
    assert after - objects < 0.5 * (STEPS - TRACED - STEPS // 2)
    # What every step leaves behind grows in each part, and what fills a cache once in one.
    growths = [after - before for before, after in itertools.pairwise(traced)]
    assert min(growths) < 60 * TRACED // PARTS  # bytes
    assert resident_after - resident < 8 << 20

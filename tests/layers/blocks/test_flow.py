"""Messages from targets to sources: a layer in blocks reads pairs of tensors as PyG does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import gact_graph

W = 8
REVERSED = {"flow": "target_to_source"}
CONVS: dict[str, Callable[[], nn.Module]] = {
    "GAT": lambda: pyg.GATConv(W, W, add_self_loops=False, **REVERSED),
    "GAT with a residual": lambda: pyg.GATConv(W, W, residual=True, **REVERSED),
    "GATv2": lambda: pyg.GATv2Conv(W, W, add_self_loops=False, **REVERSED),
    "Transformer": lambda: pyg.TransformerConv(W, W, **REVERSED),
    "SAGE": lambda: pyg.SAGEConv(W, W, aggr="max", **REVERSED),
    "gated": lambda: pyg.ResGatedGraphConv(W, W, **REVERSED),
    "FiLM": lambda: pyg.FiLMConv(W, W, **REVERSED),
    "GEN": lambda: pyg.GENConv(W, W, **REVERSED),
}


def _normal(seed: int, *shape: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made, dtype=torch.float64)


EDGES = torch.randint(30, (2, 120), generator=torch.Generator().manual_seed(0))


CASES = [(name, pair) for name in CONVS for pair in (False, True)]
CASES.remove(("GAT with a residual", True))  # makes self-loops, which a pair has none of


@pytest.mark.parametrize(("name", "pair"), CASES)
def test_as_stock(name: str, pair: bool) -> None:
    def run(blocks: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        conv = CONVS[name]().double()
        if blocks is not None:
            gact_graph.wrap(
                conv, level="lossless", bits=32, adaptive=False, blocks=blocks, min_bytes=0
            )
        x = _normal(1, 30, W).requires_grad_()
        out = conv((x, x.flip(0) * 2.0) if pair else x, EDGES)
        out.backward(_normal(2, *out.shape))
        if blocks is not None:
            assert all(row.blocks for row in gact_graph.report(conv).layers)
        return [out.detach(), x.grad, *(p.grad for p in conv.parameters() if p.grad is not None)]

    for got, expected in zip(run(16), run(None), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_pairs_of_two_sizes_stay_stock() -> None:
    """PyG then takes the number of results from the first tensor and x_i from the second."""
    conv = pyg.GATv2Conv(W, W, add_self_loops=False, **REVERSED).double()
    x, y = _normal(1, 30, W), _normal(2, 40, W)
    expected = conv((x, y), EDGES)
    gact_graph.wrap(conv, level="lossless", bits=32, adaptive=False, blocks=16, min_bytes=0)
    torch.testing.assert_close(conv((x, y), EDGES), expected)
    ways = {row.way for row in gact_graph.report(conv).layers}
    assert ways == {"stock"}

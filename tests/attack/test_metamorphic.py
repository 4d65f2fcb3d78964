"""Relations between results: permuted nodes, joined graphs, split edges, scaled losses, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside import small_storages_count
from samples import distance, equal, gradients, make, one_thread, seeded  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GraphConv, SAGEConv, TransformerConv

import gact_graph

NODES, EDGES, WIDTH = 60, 400, 16
FIXED: dict[str, Any] = {"adaptive": False, "bits": 32}
EXACT: dict[str, dict[str, Any]] = {
    "lossless": {"level": "lossless"} | FIXED,
    "lossless in blocks": {"level": "lossless", "blocks": 64} | FIXED,
    "L1 at 32 bits": {"level": "L1", "blocks": False} | FIXED,
    "CB2 at 32 bits": {"level": "CB2", "blocks": 64} | FIXED,
}


class TwoAggregates(SAGEConv):
    """The layer in a class of its own.

    PyTorch Geometric decides by the first layer of a class whether all of them may fuse messages.
    """


CONVS = {
    "GraphConv": lambda: GraphConv(WIDTH, WIDTH),
    "GraphConv max": lambda: GraphConv(WIDTH, WIDTH, aggr="max"),
    "SAGE": lambda: TwoAggregates(WIDTH, WIDTH, aggr=["mean", "std"]),
    "GAT": lambda: GATConv(WIDTH, WIDTH // 2, heads=2, add_self_loops=False),
    "GATv2": lambda: GATv2Conv(WIDTH, WIDTH // 2, heads=2, add_self_loops=False),
    "Transformer": lambda: TransformerConv(WIDTH, WIDTH // 2, heads=2),
}
# A different order of float64 sums changes the last bits, and nothing more.
CLOSE = 1e-10

X = torch.randn(NODES, WIDTH, generator=seeded(0), dtype=torch.float64)
EDGE_INDEX = torch.randint(NODES, (2, EDGES), generator=seeded(1))
WEIGHT = torch.rand(EDGES, generator=seeded(2), dtype=torch.float64) + 0.1
GRADIENT = torch.randn(NODES, 5, generator=seeded(3), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, conv: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.convs = nn.ModuleList([CONVS[conv](), CONVS[conv]()])

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = conv(x, edge_index, *([] if weight is None else [weight])).tanh()
        return self.last(x)


def _run(
    conv: str, options: dict[str, Any], gradient: Tensor, *inputs: Tensor, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the features and the parameters."""
    model = make(lambda: Net(conv)).to(dtype)
    if options:
        gact_graph.wrap(model, min_bytes=0, **options)
    x = inputs[0].detach().to(dtype, copy=True).requires_grad_()
    out = model(x, *(t.to(dtype) if t.is_floating_point() else t for t in inputs[1:]))
    out.backward(gradient.to(dtype))
    assert x.grad is not None
    return out.detach(), [x.grad, *gradients(model)]


def _double(*args: Any) -> tuple[Tensor, list[Tensor]]:
    return _run(*args, dtype=torch.float64)


both = pytest.mark.parametrize("level", EXACT)
each = pytest.mark.parametrize("conv", CONVS)


@both
@each
def test_permuted_nodes(conv: str, level: str) -> None:
    out, (of_x, *of_weights) = _double(conv, EXACT[level], GRADIENT, X, EDGE_INDEX)
    new = torch.randperm(NODES, generator=seeded(4))  # node i becomes new[i]
    old = new.argsort()
    edges = new[EDGE_INDEX][:, torch.randperm(EDGES, generator=seeded(5))]
    got, (got_x, *got_weights) = _double(conv, EXACT[level], GRADIENT[old], X[old], edges)
    assert distance([got, got_x], [out[old], of_x[old]]) < CLOSE
    assert distance(got_weights, of_weights) < CLOSE


@both
@each
def test_two_graphs_in_one(conv: str, level: str) -> None:
    """Outputs and gradients of features are side by side; those of parameters add up."""
    other_x, other_edges = X[:25] * 2 + 1, EDGE_INDEX[:, (EDGE_INDEX < 25).all(0)]
    first = _double(conv, EXACT[level], GRADIENT, X, EDGE_INDEX)
    second = _double(conv, EXACT[level], GRADIENT[:25], other_x, other_edges)
    edges = torch.cat([EDGE_INDEX, other_edges + NODES], 1)
    gradient, x = torch.cat([GRADIENT, GRADIENT[:25]]), torch.cat([X, other_x])
    out, (of_x, *of_weights) = _double(conv, EXACT[level], gradient, x, edges)
    assert distance([out], [torch.cat([first[0], second[0]])]) < CLOSE
    assert distance([of_x], [torch.cat([first[1][0], second[1][0]])]) < CLOSE
    sums = [a + b for a, b in zip(first[1][1:], second[1][1:], strict=True)]
    assert distance(of_weights, sums) < CLOSE


@both
def test_an_edge_split_in_two(level: str) -> None:
    """A sum does not see whether an edge is there once or twice with half its weight."""
    expected = _double("GraphConv", EXACT[level], GRADIENT, X, EDGE_INDEX, WEIGHT)
    share = torch.ones(EDGES, dtype=torch.float64)
    share[::3] = 0.25
    edges = torch.cat([EDGE_INDEX, EDGE_INDEX[:, ::3]], 1)
    weight = torch.cat([WEIGHT * share, 0.75 * WEIGHT[::3]])
    got = _double("GraphConv", EXACT[level], GRADIENT, X, edges, weight)
    assert distance([got[0], *got[1]], [expected[0], *expected[1]]) < CLOSE


@both
@each
@pytest.mark.parametrize("power", [7])
def test_a_scaled_loss_to_the_bit(conv: str, level: str, power: int) -> None:
    """A power of two changes no mantissa, so gradients in float32 are scaled to the bit."""
    inputs = X, EDGE_INDEX
    _, expected = _run(conv, EXACT[level], GRADIENT, *inputs, dtype=torch.float32)
    _, got = _run(conv, EXACT[level], GRADIENT * 2.0**power, *inputs, dtype=torch.float32)
    assert all(torch.equal(a, b * 2.0**power) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("level", ["L1", "CB2"])
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.filterwarnings("ignore:.*bits")
def test_a_scaled_loss_where_tensors_are_coded(level: str, bits: int) -> None:
    """Noise depends on the seed, not on the gradient."""

    def run(bits: int, scale: float) -> list[Tensor]:
        model = make(lambda: Net("GAT")).float()
        gact_graph.wrap(model, min_bytes=0, level=level, bits=bits, adaptive=False, blocks=64)
        model(X.float(), EDGE_INDEX).backward(GRADIENT.float() * scale)
        return gradients(model)

    with small_storages_count():
        expected, got = run(bits, 1.0), run(bits, 4.0)
        assert not equal(expected, run(32, 1.0))
    assert all(torch.equal(a, b * 4.0) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("level", ["L1", "CB2"])
@pytest.mark.filterwarnings("ignore:.*bits")
def test_more_bits_never_hold_less(level: str) -> None:
    def stored(bits: float) -> int:
        model = make(lambda: Net("GAT"))
        gact_graph.wrap(model, level=level, bits=bits, adaptive=False, min_bytes=0)
        model(X.float(), EDGE_INDEX).sum().backward()
        return gact_graph.report(model).stored_bytes

    with small_storages_count():
        held = [stored(bits) for bits in (1, 2, 4, 8, 32)]
    assert held == sorted(held) and held[0] < held[-1]

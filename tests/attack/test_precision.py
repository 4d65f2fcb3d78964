"""Errors in blocks and by the operators, beside float64: at most twice those of stock's float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocked import Alone
from samples import gradients, make, one_thread, seeded  # noqa: F401
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GraphConv, SAGEConv, TransformerConv

import gact_graph

WIDTH = 16
LAYERS = {  # with the operator that computes them
    "weighted_sum": lambda: GCNConv(WIDTH, WIDTH),
    "weighted_sum, mean": lambda: SAGEConv(WIDTH, WIDTH),
    "attention": lambda: GATConv(WIDTH, WIDTH // 2, heads=2),
    "leaky_attention": lambda: GATv2Conv(WIDTH, WIDTH // 2, heads=2),
    "dot_attention": lambda: TransformerConv(WIDTH, WIDTH // 2, heads=2),
    "blocks alone": lambda: GraphConv(WIDTH, WIDTH, aggr="max"),
    "blocks alone, several": lambda: SAGEConv(WIDTH, WIDTH, aggr=["std", "softmax"]),
}


def _graph(seed: int) -> tuple[Tensor, Tensor]:
    """Features of some magnitude, and edges of which a node may have many."""
    generator = seeded(seed)
    nodes, edges = 80, 1200
    source = torch.randint(nodes, (edges,), generator=generator)
    destination = (torch.rand(edges, generator=generator) ** (1 + seed) * nodes).long()
    x = torch.randn(nodes, WIDTH, generator=generator) * 3.0**seed
    return x + seed, torch.stack([source, destination])


def _run(net: Any, seed: int, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    x, edges = _graph(seed)
    holder = make(lambda: Alone(net())).to(dtype)
    if options:
        gact_graph.wrap(holder, min_bytes=0, **options)
    leaf = x.to(dtype, copy=True).requires_grad_()
    out = holder(leaf, edges)
    out.backward(torch.randn(out.shape, generator=seeded(9)).to(dtype))
    assert leaf.grad is not None
    return [out.detach(), leaf.grad, *gradients(holder)]


@pytest.mark.parametrize("name", LAYERS)
def test_lossless_in_blocks(name: str) -> None:
    """The geometric mean over graphs: on one alone, the error of a few sums is a matter of luck."""
    net, ratios = LAYERS[name], []
    for seed in range(4):
        exact = _run(net, seed, torch.float64)
        stock = _run(net, seed, torch.float32)
        got = _run(net, seed, torch.float32, level="lossless", bits=32, adaptive=False, blocks=128)
        # Where a gradient cancels, its rounding is that of what it is the sum of.
        largest = max(float(t.abs().max()) for t in exact[1:])
        ratios.append([])
        for a, b, right in zip(got, stock, exact, strict=True):
            floor = 2.0**-24 * (float(right.norm()) + 1e-3 * largest)
            ours, theirs = float((a - right).norm()), float((b - right).norm())
            ratios[-1].append((ours + floor) / (theirs + floor))
    means = torch.tensor(ratios).log().mean(0).exp()
    assert means.max() <= 2, means

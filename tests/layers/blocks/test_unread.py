"""What backward of a layer in blocks does not read is not saved."""

from __future__ import annotations

import pytest
import torch
from blocked import trained
from samples import GraphNet, distance, graph, make, one_thread  # noqa: F401
from torch import nn
from torch_geometric.nn import GraphConv, MessagePassing

import gact_graph

X, EDGES = graph()
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}


class Weighted(nn.Module):
    """A conv on what a linear layer gives, which that layer does not save."""

    def __init__(self, learn, aggr="sum"):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.weight = nn.Parameter(torch.rand(EDGES.size(1)), requires_grad=learn)
        self.conv = GraphConv(64, 8, aggr=aggr)

    def forward(self, x, edges):
        return self.conv(self.first(x), edges, self.weight * 1)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "softmax"])
@pytest.mark.parametrize("learn", [True, False])
def test_what_backward_does_not_read_is_not_saved(learn, aggr):
    stock = trained(make(lambda: Weighted(learn, aggr)))
    model = gact_graph.wrap(make(lambda: Weighted(learn, aggr)), blocks=256, **EXACT)
    assert distance(trained(model), stock) < 1e-5
    slots = [c.slot for c in gact_graph.report(model).contexts]
    read = learn or aggr not in ("sum", "mean")
    assert ("conv/propagate.x.0" in slots) == read, slots


def test_a_constant_weight_spares_the_features():
    """Of GCN's messages in blocks the weights alone are saved, and for the features nothing."""
    model = gact_graph.wrap(make(lambda: GraphNet("gcn")), blocks=256, **EXACT)
    model(X, EDGES).sum().backward()
    saved = [c for c in gact_graph.report(model).contexts if c.codec != "blocks"]
    slots = [c.slot for c in saved if "propagate" in c.slot]
    assert slots == ["convs.1/propagate.edge_weight"]


class Scaled(MessagePassing):
    """Messages that an operation in place makes of the rows that its own gradient reads."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x, edges):
        return self.propagate(edges, x=x)

    def message(self, x_j):
        return x_j.clone().mul_(self.scale)


def test_a_copy_that_autograd_makes_of_a_row_is_read():
    stock = trained(make(Scaled))
    assert distance(trained(gact_graph.wrap(make(Scaled), blocks=256, **EXACT)), stock) < 1e-5

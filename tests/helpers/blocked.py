"""Nets and training that the tests of blocks share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from samples import graph, labels
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GraphConv, TransformerConv


class Alone(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, *args, **kwargs):
        return self.conv(*args, **kwargs)


class Wide(nn.Module):
    """A conv of 96 channels between linear layers."""

    def __init__(self, conv):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(32, 96), conv, nn.Linear(96, 5)

    def forward(self, x, edge_index):
        return self.last(F.elu(self.conv(F.elu(self.first(x)), edge_index)))


WIDE = {
    "transformer": lambda: TransformerConv(96, 48, heads=2),
    "gatv2": lambda: GATv2Conv(96, 48, heads=2, dropout=0.3),
    "gat": lambda: GATConv(96, 48, heads=2),
    "max": lambda: GraphConv(96, 96, aggr="max"),
}


def trained(model, steps: int = 3) -> list[Tensor]:
    """The parameters after some steps."""
    # Adam would make much of gradients that are zero but for rounding: biases before a norm.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(*graph()), labels()).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]

"""Edges and features that change behind autograd's back: blocks do with them what PyG does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from blocked import Alone
from samples import distance, gradients, make, one_thread, seeded  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, GCNConv, GINEConv, GraphConv, SAGEConv

import gact_graph

EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}
X = torch.randn(300, 32, generator=seeded(0))
EDGES = torch.randint(300, (2, 1000), generator=seeded(1))
OTHERS = torch.randint(300, (2, 1000), generator=seeded(2))
LEVELS = [
    {"blocks": 64},
    {"level": "CB2", "blocks": False},
    {"level": "CB2"},
    {"level": "CB2", "blocks": 64},
]


class Net(nn.Module):
    """A linear layer and a conv that is handed edge_index as it is."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.first, self.conv = nn.Linear(32, 32), conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.first(x), edge_index)
        return out


def _refill(edge_index: Tensor, buffer: Any, to: Tensor) -> None:
    buffer[:] = to.numpy()


def _data(edge_index: Tensor, buffer: Any, to: Tensor) -> None:
    edge_index.data.copy_(to)


def _swap_two(edge_index: Tensor, buffer: Any, to: Tensor) -> None:
    buffer[:, [0, 700]] = buffer[:, [700, 0]]


@pytest.mark.parametrize("edit", [_refill, _data, _swap_two])
@pytest.mark.parametrize("options", LEVELS, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_an_edge_index_that_changes_between_forwards(
    training: bool, options: dict[str, Any], edit: Callable[..., None]
) -> None:
    stock = make(lambda: Net(GATv2Conv(32, 8, add_self_loops=False))).train(training)
    model = gact_graph.wrap(copy.deepcopy(stock).train(training), **(EXACT | options))
    buffer = EDGES.numpy().copy()
    edge_index = torch.from_numpy(buffer)
    for to in (OTHERS, EDGES, OTHERS):
        for net in (stock, model):
            net.zero_grad()
            net(X, edge_index).square().sum().backward()
        assert distance(gradients(model), gradients(stock)) < 1e-6
        edit(edge_index, buffer, to)


def test_layers_that_are_called_past_the_model() -> None:
    stock = make(lambda: Net(GATv2Conv(32, 8, add_self_loops=False)))
    model = gact_graph.wrap(copy.deepcopy(stock), blocks=64, **EXACT)
    edge_index = EDGES.clone()
    for to in (OTHERS, EDGES):
        assert distance([model.conv(X, edge_index)], [stock.conv(X, edge_index)]) < 1e-6
        edge_index.data.copy_(to)


@pytest.mark.parametrize("conv", [SAGEConv, GraphConv, GCNConv], ids=["sage", "graph", "gcn"])
@pytest.mark.parametrize("options", LEVELS, ids=str)
def test_features_that_are_refilled_before_backward(options: dict[str, Any], conv: Any) -> None:
    """In PyG what autograd saved by reference changes; what is computed again raises."""
    found = []
    for wrapped in (False, True):
        buffer = X.numpy().copy()
        net = make(lambda: Alone(conv(32, 8)))
        if wrapped:
            gact_graph.wrap(net, **(EXACT | options))
        out = net(torch.from_numpy(buffer), EDGES)
        buffer[:] = numpy.flip(buffer, 0)
        if wrapped and "level" in options:
            with pytest.raises(RuntimeError, match="has other values than in forward"):
                out.square().sum().backward()
            return
        out.square().sum().backward()
        found.append(gradients(net))
    assert distance(*found) < 1e-6


@pytest.mark.parametrize("level", ["lossless", "CB2"])
def test_edge_features_that_are_refilled_before_backward(level: str) -> None:
    """PyG saves the messages' ReLU; blocks compute it again from the user's features."""
    conv = make(lambda: GINEConv(nn.Linear(32, 8), edge_dim=4))
    gact_graph.wrap(conv, **(EXACT | {"level": level, "blocks": 64}))
    features = torch.randn(1000, 4, generator=seeded(3))
    out = conv(X, EDGES, features)
    features.data.neg_()
    with pytest.raises(RuntimeError, match="has other values than in forward"):
        out.square().sum().backward()

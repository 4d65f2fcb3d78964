"""Results that CB2 does not compute once more: those after the last tensor that is saved."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from samples import distance, graph, make, one_thread, train_step  # noqa: F401
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)

import gact_graph
from gact_graph.layers.blocks.call import BlockedCall

X, EDGES = graph()
CB2 = {"level": "CB2", "bits": 32, "adaptive": False, "blocks": 100, "min_bytes": 0}


class Net(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(32, 32), conv, nn.Linear(32, 5)

    def forward(self, x, edge_index):
        return self.last(torch.tanh(self.conv(torch.tanh(self.first(x)), edge_index)))


class Own(MessagePassing):
    """Does to the sum of its neighbors what ``after`` says."""

    def __init__(self, after):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 32))
        self.after = after

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x * self.weight)
        return self.after(self, out, x, edge_index)

    def message(self, x_j):
        return F.dropout(x_j, 0.3, self.training)


def _in_place(conv, out, x, edge_index):
    out += x
    return out


def _random(conv, out, x, edge_index):
    return F.dropout(x, 0.5) + out


def _twice(conv, out, x, edge_index):
    return conv.propagate(edge_index, x=x + out) + out


NOT_NEEDED = {
    "gat": lambda: GATConv(32, 16, heads=2, dropout=0.3),
    "gatv2": lambda: GATv2Conv(32, 16, heads=2, dropout=0.3),
    "transformer": lambda: TransformerConv(32, 16, heads=2, dropout=0.3),
    "gcn": lambda: GCNConv(32, 32),
    "in place": lambda: Own(_in_place),
    "the last of two": lambda: Own(_twice),
}
NEEDED = {
    "a random number after it": lambda: Own(_random),
    "a linear layer": lambda: SAGEConv(32, 32, aggr="max"),
    "layers": lambda: GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))),
    "a gate": lambda: Own(lambda conv, out, x, edge_index: out.sigmoid() * x),
    "an operator's gate": lambda: TransformerConv(32, 16, heads=2, beta=True),
    "its square": lambda: Own(lambda conv, out, x, edge_index: out * out),
}


@pytest.fixture
def computed(monkeypatch):
    """Grows with each call of edge work whose result is computed; by whether it is of edges."""
    calls, run = [], BlockedCall.forward

    def counted(call, tensors, shape_only=False, product=None):
        if not shape_only:
            calls.append(call.outputs[0].of_edges)
        return run(call, tensors, shape_only, product)

    monkeypatch.setattr(BlockedCall, "forward", counted)
    return calls


@pytest.mark.parametrize("kind", [*NOT_NEEDED, *NEEDED])
def test_gradients_are_those_of_a_layer_that_is_not_computed_again(kind):
    net = make(lambda: Net((NOT_NEEDED | NEEDED)[kind]()))
    other = gact_graph.wrap(copy.deepcopy(net), **CB2 | {"level": "lossless"})
    gact_graph.wrap(net, **CB2)
    for seed in range(3):
        found, expected = (train_step(one, X, EDGES, seed=seed) for one in (net, other))
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("kind", [*NOT_NEEDED, *NEEDED])
def test_sums_are_computed_once_unless_a_tensor_is_saved_after_them(kind, computed):
    """In forward; else also when the layer runs again."""
    net = make(lambda: Net((NOT_NEEDED | NEEDED)[kind]()))
    gact_graph.wrap(net, **CB2)
    train_step(net, X, EDGES, seed=0)
    computed.clear()
    train_step(net, X, EDGES, seed=1)
    sums = computed.count(False)
    if kind == "the last of two":
        assert sums == 3  # two calls, and only the first one twice
    else:
        assert sums == (1 if kind in NOT_NEEDED else 2)


def test_random_numbers_after_the_layer_go_on_as_without():
    states = []
    for level in ("CB2", "lossless"):
        net = make(lambda: Net(GATConv(32, 16, heads=2, dropout=0.3)))
        gact_graph.wrap(net, **CB2 | {"level": level})
        for seed in range(2):
            train_step(net, X, EDGES, seed=seed)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(("edges", "times"), [(1500, 1), (6000, 2)])
def test_attention_is_saved_where_it_is_small(edges, times, computed):
    """Less than half of the layer's inputs: then it is not computed when the layer runs again."""
    x, edges = graph(edges=edges)
    net = make(lambda: Net(GATv2Conv(32, 16, heads=2, dropout=0.3)))
    other = gact_graph.wrap(copy.deepcopy(net), **CB2 | {"level": "lossless"})
    gact_graph.wrap(net, **CB2)
    train_step(net, x, edges, seed=0)
    train_step(other, x, edges, seed=0)
    computed.clear()
    found = train_step(net, x, edges, seed=1)
    assert computed.count(True) == times
    slots = [row.slot for row in gact_graph.report(net).contexts]
    assert any(slot.endswith("forward.edges.0") for slot in slots) == (times == 1)
    assert distance(found, train_step(other, x, edges, seed=1)) < 1e-5

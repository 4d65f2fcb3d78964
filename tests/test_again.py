"""What CB2 does not compute again: results that no gradient reads, and only those."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from samples import distance, equal, graph, make, one_thread, train_step  # noqa: F401
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
from gact_graph import again
from gact_graph.blocks.run import Run

X, EDGES = graph()
CB2 = {"level": "CB2", "bits": 32, "adaptive": False, "blocks": 100}


class Net(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(32, 32), conv, nn.Linear(32, 5)

    def forward(self, x, edge_index):
        return self.last(torch.tanh(self.conv(torch.tanh(self.first(x)), edge_index)))


class Own(MessagePassing):
    """Does to the sum of its neighbours what ``after`` says."""

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


def _again(conv, out, x, edge_index):
    return conv.propagate(edge_index, x=x + out) + out


UNREAD = {
    "gat": lambda: GATConv(32, 16, heads=2, dropout=0.3),
    "gatv2": lambda: GATv2Conv(32, 16, heads=2, dropout=0.3),
    "transformer": lambda: TransformerConv(32, 16, heads=2, dropout=0.3),
    "gcn": lambda: GCNConv(32, 32),
    "a random number after it": lambda: Own(_random),
    "the last of two": lambda: Own(_again),
}
READ = {
    "a linear layer": lambda: SAGEConv(32, 32, aggr="max"),
    "layers": lambda: GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))),
    "a gate": lambda: TransformerConv(32, 16, heads=2, beta=True),
    "its square": lambda: Own(lambda conv, out, x, edge_index: out * out),
    "in place": lambda: Own(_in_place),
}


@pytest.fixture
def shapes_only(monkeypatch):
    """Of each run of the edge work, whether it was let off with the shape."""
    seen = []
    forward = Run.forward

    def watch(run, tensors, shapes_only=False):
        seen.append(shapes_only)
        return forward(run, tensors, shapes_only)

    monkeypatch.setattr(Run, "forward", watch)
    return seen


@pytest.mark.parametrize("kind", [*UNREAD, *READ])
def test_the_same_gradients_as_with_all_computed(kind, shapes_only, monkeypatch):
    net = make(lambda: Net((UNREAD | READ)[kind]()))
    other = gact_graph.wrap(copy.deepcopy(net), **CB2)
    gact_graph.wrap(net, **CB2)
    found = [train_step(net, X, EDGES, seed=seed) for seed in range(3)]
    # Once to find out, and once in each backward.
    tried = {"the last of two": 2, "gat": 2, "gatv2": 2}.get(kind, 1)
    assert sum(shapes_only) == tried + (3 if kind in UNREAD else 0)
    monkeypatch.setattr(again.Calls, "find_unread", lambda calls, outputs: frozenset())
    shapes_only.clear()
    expected = [train_step(other, X, EDGES, seed=seed) for seed in range(3)]
    assert sum(shapes_only) == tried
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))


def test_random_numbers_after_the_layer_go_on_as_without():
    states = []
    for level in ("CB2", "lossless"):
        net = make(lambda: Net(GATConv(32, 16, heads=2, dropout=0.3)))
        gact_graph.wrap(net, **CB2 | {"level": level})
        for seed in range(2):
            train_step(net, X, EDGES, seed=seed)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(("arcs", "computed"), [(1500, 1), (6000, 2)])
def test_attention_is_saved_where_it_is_small(arcs, computed, monkeypatch):
    """Less than half of the layer's inputs: then it is computed in forward alone."""
    x, edges = graph(arcs=arcs)
    net = make(lambda: Net(GATConv(32, 16, heads=2, dropout=0.3)))
    other = gact_graph.wrap(copy.deepcopy(net), **CB2 | {"level": "lossless"})
    gact_graph.wrap(net, **CB2)
    train_step(net, x, edges, seed=0)
    train_step(other, x, edges, seed=0)
    seen = []
    forward = Run.forward
    monkeypatch.setattr(
        Run, "forward", lambda run, *given: seen.append(run.of_edges) or forward(run, *given)
    )
    found = train_step(net, x, edges, seed=1)
    assert sum(seen) == computed
    slots = [row.slot for row in gact_graph.report(net).contexts]
    assert any(slot.endswith("forward.edges.0") for slot in slots) == (computed == 1)
    assert distance(found, train_step(other, x, edges, seed=1)) < 1e-5

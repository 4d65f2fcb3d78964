"""What CB2 does not compute once more: results that no gradient reads, and only those."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from samples import Calls, distance, graph, make, one_thread, train_step  # noqa: F401
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

X, EDGES = graph()
CB2 = {"level": "CB2", "bits": 32, "adaptive": False, "blocks": 100, "min_bytes": 0}


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


def _twice(conv, out, x, edge_index):
    return conv.propagate(edge_index, x=x + out) + out


NOT_NEEDED = {
    "gat": lambda: GATConv(32, 16, heads=2, dropout=0.3),
    "gatv2": lambda: GATv2Conv(32, 16, heads=2, dropout=0.3),
    "transformer": lambda: TransformerConv(32, 16, heads=2, dropout=0.3),
    "gcn": lambda: GCNConv(32, 32),
    "a random number after it": lambda: Own(_random),
    "the last of two": lambda: Own(_twice),
}
NEEDED = {
    "a linear layer": lambda: SAGEConv(32, 32, aggr="max"),
    "layers": lambda: GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))),
    "a gate": lambda: Own(lambda conv, out, x, edge_index: out.sigmoid() * x),
    "an operator's gate": lambda: TransformerConv(32, 16, heads=2, beta=True),
    "its square": lambda: Own(lambda conv, out, x, edge_index: out * out),
    "in place": lambda: Own(_in_place),
}


def count_calls(module, method, monkeypatch):
    """A list that grows with each call of a method of this module or of its replicas."""
    calls, run = Calls(), getattr(module, method)

    def counted(*args, **kwargs):
        calls.append(method)
        return run(*args, **kwargs)

    counted.__signature__ = inspect.signature(run)
    monkeypatch.setattr(module, method, counted)
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
def test_messages_are_made_twice_at_most_unless_a_gradient_needs_their_sum(kind, monkeypatch):
    """In forward and in the backward of each block; else also when the layer runs again. Where the
    weights of a sum are given, or an operator finds them, none are made but those of a block that
    is compared."""
    net = make(lambda: Net((NOT_NEEDED | NEEDED)[kind]()))
    messages = count_calls(net.conv, "message", monkeypatch)
    gact_graph.wrap(net, **CB2)
    train_step(net, X, EDGES, seed=0)
    messages.clear()
    train_step(net, X, EDGES, seed=1)
    [row] = [row for row in gact_graph.report(net).layers if row.slot == "conv/propagate"]
    passes = len(messages) / row.blocks
    if kind == "the last of two":
        assert passes == pytest.approx(5, abs=0.2)  # two calls, and only the first one thrice
    elif kind in NOT_NEEDED:
        assert passes < 2.5
    elif kind == "an operator's gate":
        assert passes < 1
    else:
        assert passes == pytest.approx(3, abs=0.2)


def test_random_numbers_after_the_layer_go_on_as_without():
    states = []
    for level in ("CB2", "lossless"):
        net = make(lambda: Net(GATConv(32, 16, heads=2, dropout=0.3)))
        gact_graph.wrap(net, **CB2 | {"level": level})
        for seed in range(2):
            train_step(net, X, EDGES, seed=seed)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(("edges", "times"), [(1500, 2), (6000, 3)])
def test_attention_is_saved_where_it_is_small(edges, times, monkeypatch):
    """Less than half of the layer's inputs: then it is not computed when the layer runs again."""
    x, edges = graph(edges=edges)
    net = make(lambda: Net(GATv2Conv(32, 16, heads=2, dropout=0.3)))
    other = gact_graph.wrap(copy.deepcopy(net), **CB2 | {"level": "lossless"})
    # What counts is none of the layer's own functions, so no operator takes its place in either.
    attention = count_calls(net.conv, "edge_update", monkeypatch)
    count_calls(other.conv, "edge_update", monkeypatch)
    gact_graph.wrap(net, **CB2)
    train_step(net, x, edges, seed=0)
    train_step(other, x, edges, seed=0)
    attention.clear()
    found = train_step(net, x, edges, seed=1)
    [row] = [row for row in gact_graph.report(net).layers if row.slot == "conv/edge_updater"]
    assert len(attention) / row.blocks == pytest.approx(times, abs=0.2)
    slots = [row.slot for row in gact_graph.report(net).contexts]
    assert any(slot.endswith("forward.edges.0") for slot in slots) == (times == 2)
    assert distance(found, train_step(other, x, edges, seed=1)) < 1e-5

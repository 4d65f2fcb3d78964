"""Layers that PyG does not have: they run on parts if they are local, which a trial finds out."""

from __future__ import annotations

import pytest
import torch
from partitioned import PARTS
from ranks import run_ranks
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing, SAGEConv
from torch_geometric.utils import degree

import gact_graph

NODES = 60
EDGES = torch.randint(NODES, (2, 400), generator=torch.Generator().manual_seed(0))
X = torch.randn(NODES, 4, generator=torch.Generator().manual_seed(1))


class Sums(MessagePassing):
    """Local."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x, edge_index):
        return self.dropout(self.norm(self.lin(self.propagate(edge_index, x=x))))

    def message(self, x_j):
        return x_j


class Nested(Sums):
    def __init__(self):
        super().__init__()
        self.inner = Sums()

    def forward(self, x, edge_index):
        return super().forward(self.inner(x, edge_index), edge_index)


class Centered(Sums):
    def forward(self, x, edge_index):
        return super().forward(x - x.mean(dim=0), edge_index)


class OverSources(Sums):
    def forward(self, x, edge_index):
        count = degree(edge_index[1], x.size(0)).clamp(min=1)
        return self.propagate(edge_index, x=self.lin(x), weight=1 / count[edge_index[0]])

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j


class OverLeaving(OverSources):
    def forward(self, x, edge_index):
        count = degree(edge_index[0])
        return self.propagate(edge_index, x=self.lin(x), weight=1 / count[edge_index[0]])


class NormOfEdges(Sums):
    def message(self, x_j):
        return self.norm(x_j)


class Backwards(Sums):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) + self.propagate(edge_index.flip(0), x=x)


class TwoGraphs(Sums):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index[0]) + super().forward(x, edge_index[1])


class Residual(Sums):
    def update(self, inputs, x):
        return inputs + x


class OwnRows(Sums):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, own=x)

    def update(self, inputs, own):
        return inputs + own


def on_one_part(layer, edges=EDGES, **options):
    [part] = gact_graph.distributed.partition(Data(x=X, edge_index=edges), 1)
    return gact_graph.wrap(layer, partition=part, min_bytes=0, **options)


@pytest.mark.parametrize("kind", [Sums, Nested, NormOfEdges])
def test_a_trial_leaves_no_trace(kind):
    torch.manual_seed(0)
    stock = kind()
    torch.manual_seed(0)
    layer = on_one_part(kind(), level="lossless", bits=32)
    for _ in range(2):
        torch.manual_seed(1)
        expected = stock(X, EDGES)
        torch.manual_seed(1)
        torch.testing.assert_close(layer(X, EDGES), expected)
    torch.testing.assert_close(layer.state_dict(), stock.state_dict())
    assert all(module.training for module in layer.modules())
    torch.testing.assert_close(gact_graph.unwrap(layer).eval()(X, EDGES), stock.eval()(X, EDGES))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Centered, "Centered gives another result at a node without the edges to other nodes"),
        (OverSources, "OverSources fails on some of its nodes: index .* is out of bounds"),
        (OverLeaving, "OverLeaving gives another result at a node without"),
        (Backwards, "Backwards fails on some of its nodes"),
    ],
)
def test_what_reads_more_refuses(layer, words):
    layer = on_one_part(layer())
    for _ in range(2):  # not the first time alone
        with pytest.raises(ValueError, match=f"Expected a model that can run on a part.*{words}"):
            layer(X, EDGES)


RING = torch.stack([torch.arange(NODES), torch.arange(NODES).roll(1)])
STAR = torch.stack([torch.arange(1, NODES), torch.zeros(NODES - 1, dtype=torch.int64)])


@pytest.mark.parametrize("edges", [RING, STAR], ids=["ring", "star"])
def test_a_part_that_cannot_decide_refuses(edges):
    layer = on_one_part(Centered(), edges)
    for _ in range(2):
        with pytest.raises(ValueError, match="Centered cannot be tried on a part with 60 nodes"):
            layer(X, edges)


def test_rows_of_the_halo_under_a_name_of_own_rows():
    with pytest.raises(ValueError, match="it takes x beside x_j"):
        on_one_part(Residual())
    layer = on_one_part(OwnRows(), level="L0", bits=32)
    torch.testing.assert_close(layer(X, EDGES), OwnRows()(X, EDGES))


def test_edges_must_be_known():
    layer = on_one_part(TwoGraphs())
    with pytest.raises(
        ValueError, match=r"TwoGraphs was called with 2 tensors edge_index \[2, E\]"
    ):
        layer(X, (EDGES, EDGES.flip(0)))


def test_known_layers_are_not_tried():
    layer, calls = on_one_part(SAGEConv(4, 4), level="L0", bits=32), []
    layer.register_message_forward_hook(lambda *_: calls.append(1))
    layer(X, EDGES)
    assert calls == [1]


OWN = """
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, softmax

class Bonds(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.edge = nn.Linear(3, W)
        self.nn = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.ReLU(), nn.Linear(W, W))
    def forward(self, x, edge_index, edge_attr):
        return self.nn(x + self.propagate(edge_index, x=x, edge_attr=self.edge(edge_attr)))
    def message(self, x_j, edge_attr):
        return (x_j + edge_attr).relu()

class Hops(MessagePassing):
    def forward(self, x, edge_index):
        edge_index, norm = gcn_norm(edge_index, num_nodes=x.size(0), dtype=x.dtype)
        for _ in range(2):
            x = self.propagate(edge_index, x=x, norm=norm)
        return x
    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j

class Attention(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.key, self.value = nn.Linear(W, 1), nn.Linear(W, W)
    def forward(self, x, edge_index):
        alpha = self.edge_updater(edge_index, k=self.key(x))
        return self.propagate(edge_index, x=self.value(x), alpha=alpha)
    def edge_update(self, k_i, k_j, index, ptr, size_i):
        return softmax((k_i + k_j).tanh(), index, ptr, size_i)
    def message(self, x_j, alpha):
        return alpha * x_j

class Relu(pyg.SAGEConv):
    def message(self, x_j):
        return x_j.relu()

for make, extra in ((Bonds, "attr"), (Hops, None), (Attention, None), (lambda: Relu(W, W), None)):
    for _, model in as_the_whole(make, extra):
        first = gact_graph.report(model).halo_bytes
        step(model, part)
        assert gact_graph.report(model).halo_bytes == first > 0
    # What the trial fetches is not kept for a step that runs again to measure.
    model = built(make, extra, partition=part, bits=4)
    for _ in range(2):
        step(model, part)
    assert gact_graph.report(model).measurements > 0

class OverSources(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x / degree(edge_index[1], len(x))[edge_index[0]].mean())

try:
    step(built(OverSources, partition=part), part)
except ValueError as error:
    assert "OverSources looks up sources outside of propagate: index" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.long
def test_layers_of_ones_own_on_two_parts(tmp_path):
    run_ranks(PARTS + OWN, tmp_path)

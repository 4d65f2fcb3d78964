"""The report's raw bytes are those of stock PyTorch, where layers run in blocks, too."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GCNConv,
    GINEConv,
    MetaLayer,
    PNAConv,
    SAGEConv,
    TransformerConv,
)

import gact_graph
from gact_graph.api.report.figures import treemap

N, E = 300, 5000
X, EDGES, ATTR = torch.randn(N, 16), torch.randint(N, (2, E)), torch.randn(E, 8)
DEGREES = torch.bincount(torch.bincount(EDGES[1], minlength=N))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))


class Net(nn.Module):
    """Two layers, between operations that save tensors too."""

    def __init__(self, make, edges=False):
        super().__init__()
        self.lin = nn.Linear(16, 32)
        self.lin_edge = nn.Linear(8, 8) if edges else None
        self.convs = nn.ModuleList(make(32, 32) for _ in range(2))

    def forward(self, x, edge_index, edge_attr):
        h = self.lin(x).relu()
        given = {} if self.lin_edge is None else {"edge_attr": self.lin_edge(edge_attr)}
        for conv in self.convs:
            h = conv(h, edge_index, **given).relu()
        return h


class EdgeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = mlp(2 * 16 + 8, 8)

    def forward(self, src, dst, edge_attr, u, batch):
        return self.mlp(torch.cat([src, dst, edge_attr], -1)).tanh()


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.layers = nn.ModuleList(MetaLayer(EdgeModel()) for _ in range(2))

    def forward(self, x, edge_index, edge_attr):
        x = self.lin(x)
        for layer in self.layers:
            x, edge_attr, _ = layer(x, edge_index, edge_attr)
        return edge_attr


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.mlp = nn.Linear(16, 16), mlp(2 * 16 + 8, 16)

    def message(self, x_i, x_j, e):
        return self.mlp(torch.cat([x_i, x_j, e], -1))

    def forward(self, x, edge_index, edge_attr):
        x = self.lin(x)
        for _ in range(2):
            x = gact_graph.message_passing(self.message, x, edge_index, edge_attr, reduce="mean")
        return x


MODELS = {
    "GCN": lambda: Net(GCNConv),
    "SAGE, max": lambda: Net(lambda i, o: SAGEConv(i, o, aggr="max")),
    "GAT": lambda: Net(lambda i, o: GATConv(i, o // 4, heads=4, dropout=0.2)),
    "Transformer": lambda: Net(lambda i, o: TransformerConv(i, o // 4, heads=4, edge_dim=8), True),
    "GINE": lambda: Net(lambda i, o: GINEConv(mlp(i, o), edge_dim=8), True),
    "PNA": lambda: Net(
        lambda i, o: PNAConv(i, o, ["mean", "max", "std"], ["identity"], DEGREES, edge_dim=8), True
    ),
    "Edge": lambda: Net(lambda i, o: EdgeConv(mlp(2 * i, o))),
    "Meta": Meta,
    "by hand": ByHand,
}


def report(model, **settings):
    wrapped = gact_graph.wrap(copy.deepcopy(model), min_bytes=0, adaptive=False, **settings)
    wrapped(X, EDGES, ATTR).sum().backward()
    return gact_graph.report(wrapped)


@pytest.mark.parametrize("name", MODELS)
def test_raw_bytes_are_those_of_stock(name, monkeypatch):
    monkeypatch.setattr("gact_graph.layers.blocks.functional.LEAST_EDGES", E)
    torch.manual_seed(0)
    model = MODELS[name]()
    stock = report(model, level="L0", blocks=False)
    assert {row.codec for row in stock.contexts} == {"keep"}
    monkeypatch.undo()
    for level in ("lossless", "L1"):
        now = report(model, level=level, blocks=2048)
        assert {row.way for row in now.layers} == {"blocks"}
        assert now.raw_bytes == stock.raw_bytes
        assert now.baseline == "stock"


def test_messages_are_parts_of_their_layer():
    torch.manual_seed(0)
    now = report(MODELS["GAT"](), blocks=2048)
    trace = treemap(now, "raw_bytes")["data"][0]
    by_id = dict(zip(trace["ids"], trace["values"], strict=True))
    stock = report(MODELS["GAT"](), level="L0", blocks=False)
    layer = sum(row.raw_bytes for row in stock.contexts if row.slot.startswith("convs.1/"))
    assert by_id["layer convs.1"] == layer
    messages = [row for row in now.contexts if row.codec == "blocks"]
    assert {"convs.0/edge_updater.messages", "convs.1/propagate.messages"} <= {
        row.slot for row in messages
    }
    assert not any(row.stored_bytes for row in messages)


def test_a_layer_that_is_computed_again_is_named():
    torch.manual_seed(0)
    now = report(MODELS["GCN"](), level="CB2", blocks=2048)
    assert now.not_counted == ["convs.0", "convs.1"]
    assert "inside convs.0, convs.1: their size is unknown" in " ".join(str(now).split())


def test_a_frozen_layer_saves_less():
    torch.manual_seed(0)
    model = MODELS["GAT"]()
    model.requires_grad_(False)
    model.convs[1].requires_grad_(True)
    stock = report(model, level="L0", blocks=False)
    assert report(model, blocks=2048).raw_bytes == stock.raw_bytes

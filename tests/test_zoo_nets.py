"""Parts around the convs: pooling, jumping knowledge, attention, types, and no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from old_pyg import needs_to_hetero
from samples import distance, equal, gradients, make, one_thread  # noqa: F401
from torch import Tensor, nn
from zoo import BATCH, BOUND, EDGES, NODES, WIDTH, X

import gact_graph

W = WIDTH
KINDS = [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")]


class Pooled(nn.Module):
    """A conv, a pooling layer that picks nodes, another conv, and a readout."""

    def __init__(self, pool: nn.Module, readout: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.pool, self.second = pyg.GraphConv(W, W), pool, pyg.GATConv(W, W)
        self.readout = readout

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.first(x, edges).relu()
        x, edges, _, batch, *_ = self.pool(x, edges, None, BATCH)
        return self.readout(self.second(x, edges).relu(), batch)


class Jumping(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.SAGEConv(W, W) for _ in range(3))
        self.jump = pyg.JumpingKnowledge(mode, W, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        layers = []
        for conv in self.convs:
            x = F.dropout(F.elu(conv(x, edges)), 0.3, self.training)
            layers.append(x)
        return self.jump(layers)


class Readout(nn.Module):
    """Convs, and an aggregation over the nodes of each graph."""

    def __init__(self, aggregation: nn.Module) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(W, W)
        self.aggregation = aggregation

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.aggregation(self.conv(x, edges).relu(), BATCH)


class Homogeneous(nn.Module):
    """A net that ``to_hetero`` copies for each type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.SAGEConv((W, W), W, aggr="max")
        self.second = pyg.GATConv((W, W), W, add_self_loops=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges)


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        needs_to_hetero()
        self.inner = pyg.to_hetero(Homogeneous(), (["a", "b"], KINDS))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        half = NODES // 2
        kinds = dict.fromkeys(KINDS, edges % half)
        out = self.inner({"a": x[:half], "b": x[half:]}, kinds)
        return torch.cat([out["a"], out["b"]])


class Plain(nn.Module):
    """No graph: the features alone."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.inner(x.view(self.shape))


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 4, 3), nn.Hardtanh(), nn.Flatten(), nn.Dropout(), nn.LazyLinear(5)),
    )


def _built(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        net(X, EDGES)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "TopK": lambda: Pooled(pyg.TopKPooling(W, ratio=0.6), pyg.global_mean_pool),
    "SAG": lambda: Pooled(pyg.SAGPooling(W, ratio=0.6), pyg.global_max_pool),
    "ASA": lambda: Pooled(pyg.ASAPooling(W, ratio=0.6), pyg.global_add_pool),
    "JumpingKnowledge cat": lambda: Jumping("cat"),
    "JumpingKnowledge max": lambda: Jumping("max"),
    "JumpingKnowledge lstm": lambda: Jumping("lstm"),
    "attention": lambda: Readout(
        pyg.AttentionalAggregation(nn.Linear(W, 1), nn.Sequential(nn.Linear(W, W), nn.ReLU()))
    ),
    "Set2Set": lambda: Readout(pyg.Set2Set(W, 2)),
    "SetTransformer": lambda: Readout(pyg.SetTransformerAggregation(W, heads=2)),
    "GraphMultiset": lambda: Readout(pyg.GraphMultisetTransformer(W, k=4, heads=2)),
    "sort": lambda: Readout(pyg.SortAggregation(10)),
    "quantile": lambda: Readout(pyg.QuantileAggregation([0.2, 0.7])),
    "several": lambda: Readout(pyg.MultiAggregation(["mean", "std", "min", "softmax"])),
    "to_hetero": lambda: Typed(),
    "PyG's GAT": lambda: pyg.GAT(W, W, 3, dropout=0.3, v2=True, jk="cat", act="leaky_relu"),
    "PyG's PNA": lambda: pyg.PNA(
        W, W, 2, aggregators=["mean", "max"], scalers=["identity"], deg=torch.ones(9).long()
    ),
    "MLP": lambda: Plain(pyg.MLP([W, 64, 64, 5], dropout=0.3, act="silu"), (NODES, W)),
    "CNN": lambda: _built(Plain(_cnn(), (NODES // 60 * 2, 2, 30, 16))),
    "transformer": lambda: Plain(
        nn.TransformerEncoderLayer(W, 4, 64, dropout=0.2, batch_first=True), (6, NODES // 6, W)
    ),
}


def _gradients(name: str, **options: Any) -> tuple[list[Tensor], nn.Module]:
    model = make(NETS[name])
    if options:
        gact_graph.wrap(model, min_bytes=0, **options)
    torch.manual_seed(7)
    out = model(X, EDGES)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return gradients(model), model


# ASAPooling multiplies sparse matrices, of which torch tells that it does not check them.
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", NETS)
def test_gradients(name: str) -> None:
    stock, _ = _gradients(name)
    assert equal(stock, _gradients(name)[0])
    for options in (
        {"level": "lossless", "bits": 32},
        {"level": "L1", "bits": 32, "blocks": False},
    ):
        assert equal(_gradients(name, **options)[0], stock), options
    assert distance(_gradients(name, level="L1", bits=8, blocks=False)[0], stock) < BOUND


@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer"])
def test_without_a_graph_no_role_is_node_or_edge(name: str) -> None:
    _, model = _gradients(name, level="lossless")
    roles = {row.role for row in gact_graph.report(model).contexts}
    assert roles and roles <= {"mask", "index", "other"}


def test_types_have_slots_of_their_own() -> None:
    _, model = _gradients("to_hetero", level="lossless")
    contexts = gact_graph.report(model).contexts
    assert {"node", "edge"} & {row.role for row in contexts}
    assert any("second.a__to__b/edge_update/softmax" in row.slot for row in contexts)
    assert {row.codec for row in contexts} >= {"gather", "mask", "index"}

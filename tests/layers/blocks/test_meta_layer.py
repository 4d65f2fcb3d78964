"""PyG's MetaLayer: its edge model in blocks, beside stock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from samples import one_thread  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import MetaLayer
from torch_geometric.utils import scatter

import gact_graph

NODES, EDGES = 150, 2000
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(NODES, 6, generator=GENERATOR, dtype=torch.float64)
EDGE_ATTR = torch.randn(EDGES, 4, generator=GENERATOR, dtype=torch.float64)
EDGE_INDEX = torch.randint(NODES, (2, EDGES), generator=GENERATOR)
U = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.arange(NODES) // 50
EXACT: dict[str, Any] = {"level": "lossless", "adaptive": False, "min_bytes": 0}


class EdgeModel(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(6 + 6 + 4 + 2, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64) if norm else nn.Identity()

    def forward(self, src: Any, dest: Any, edge_attr: Any, u: Any, batch: Any) -> Tensor:
        out: Tensor = self.lin(torch.cat([src, dest, edge_attr, u[batch]], dim=1)).tanh()
        return self.norm(out) + edge_attr


class NodeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6 + 4, 6, dtype=torch.float64)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any) -> Tensor:
        given = scatter(edge_attr, edge_index[1], 0, x.size(0), "sum")
        out: Tensor = self.lin(torch.cat([x, given], dim=1)).relu()
        return out + x


class GlobalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6 + 2, 2, dtype=torch.float64)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any) -> Tensor:
        out: Tensor = self.lin(torch.cat([scatter(x, batch, 0, len(u), "mean"), u], dim=1))
        return out


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MetaLayer(EdgeModel(norm), NodeModel(), GlobalModel()) for _ in range(2)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: Tensor) -> Tensor:
        for layer in self.layers:
            x, edge_attr, u = layer(x, edge_index, edge_attr, u, BATCH)
        return x.sum(1) + edge_attr.mean() + u.sum()


def _pair(**kwargs: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock = Net(**kwargs)
    return stock, copy.deepcopy(stock)


def _step(model: nn.Module) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (X, EDGE_ATTR, U)]
    model.zero_grad()
    out = model(leaves[0], EDGE_INDEX, *leaves[1:])
    out.square().sum().backward()
    return [out.detach(), *(t.grad for t in (*leaves, *model.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("options", [EXACT, EXACT | {"level": "CB2", "bits": 32}], ids=str)
def test_the_edge_model_in_blocks_as_stock(options: dict[str, Any]) -> None:
    stock, model = _pair()
    gact_graph.wrap(model, blocks=150, **options)
    expected, found = _step(stock), _step(model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    rows = gact_graph.report(model).layers
    assert [row.slot for row in rows] == ["layers.0/edge_model", "layers.1/edge_model"]
    assert all(row.blocks is not None and row.blocks > 5 for row in rows)
    model.eval()
    with torch.no_grad():
        out, expected_out = (net(X, EDGE_INDEX, EDGE_ATTR, U) for net in (model, stock.eval()))
    torch.testing.assert_close(out, expected_out)
    forwards = [vars(layer).get("forward") for layer in gact_graph.unwrap(model).layers]
    assert forwards == [None, None]


def test_less_is_saved() -> None:
    stored = []
    for blocks in (None, 150):
        _, model = _pair()
        gact_graph.wrap(model, blocks=blocks, **(EXACT | {"level": "L0"}))
        _step(model)
        stored.append(gact_graph.report(model).stored_bytes)
    assert stored[1] < stored[0] / 2


def test_a_norm_over_all_edges_runs_as_pyg_has_it() -> None:
    stock, model = _pair(norm=True)
    gact_graph.wrap(model, blocks=150, **EXACT)
    for one, other in zip(_step(model), _step(stock), strict=True):
        torch.testing.assert_close(one, other)
    assert all("num_batches_tracked" in str(row.reason) for row in gact_graph.report(model).layers)


class Other(MetaLayer):
    """Does more than PyG's, so that it is left alone."""

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any) -> Any:
        x, edge_attr, u = super().forward(x, edge_index, edge_attr, u, batch)
        return x * 2, edge_attr, u


def test_a_forward_of_a_subclass_is_left_alone() -> None:
    stock, model = _pair()
    for net in (stock, model):
        for layer in net.layers:
            layer.__class__ = Other
    gact_graph.wrap(model, blocks=150, **EXACT)
    for one, other in zip(_step(model), _step(stock), strict=True):
        torch.testing.assert_close(one, other)
    assert gact_graph.report(model).layers == []


def test_without_an_edge_model() -> None:
    stock, model = _pair()
    for net in (stock, model):
        for layer in net.layers:
            layer.edge_model = None
    gact_graph.wrap(model, blocks=150, **EXACT)
    for one, other in zip(_step(model), _step(stock), strict=True):
        torch.testing.assert_close(one, other)

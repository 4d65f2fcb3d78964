"""Models of many kinds, to compare the peaks that a memory budget predicts with measured ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn

from datasets import Graph

_HIDDEN, _LAYERS, _HEADS = 64, 3, 2
_EDGE_FEATURES = 16
_TYPES = ("a", "b")
_EDGE_TYPES = (("a", "to", "b"), ("b", "to", "a"))


class Kind(NamedTuple):
    """One kind of model, and the arguments of its forward, both made for a graph."""

    make: Callable[[Graph], nn.Module]
    inputs: Callable[[Graph], tuple[Any, ...]]


class _Convs(nn.Module):
    """Convs with batch norm, relu and dropout between them."""

    def __init__(self, convs: list[nn.Module], i: int, o: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(i, _HIDDEN), nn.Linear(_HIDDEN, o)
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(_HIDDEN) for _ in convs)

    def forward(self, x: Tensor, edge_index: Tensor, *edge_attr: Tensor) -> Tensor:
        x = initial = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            before = (initial,) if isinstance(conv, gnn.GCN2Conv) else ()
            x = conv(x, *before, edge_index, *edge_attr)
            x = nn.functional.dropout(norm(x).relu(), 0.5, self.training)
        return self.last(x)


def _basic(kind: Callable[..., nn.Module], **more: Any) -> Callable[[Graph], nn.Module]:
    options = {"dropout": 0.5, "norm": "batch_norm", **more}
    return lambda g: kind(g.x.size(1), _HIDDEN, _LAYERS, g.num_classes, **options)


def _stack(conv: Callable[[Graph], nn.Module]) -> Callable[[Graph], nn.Module]:
    return lambda g: _Convs([conv(g) for _ in range(_LAYERS)], g.x.size(1), g.num_classes)


def _gine(graph: Graph) -> nn.Module:
    inside = nn.Sequential(nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN))
    return gnn.GINEConv(inside, edge_dim=_EDGE_FEATURES)


def _pna(graph: Graph) -> nn.Module:
    degrees = torch.bincount(torch.bincount(graph.edge_index[1], minlength=graph.num_nodes))
    options = (["mean", "max", "std"], ["identity", "amplification"], degrees)
    return gnn.PNAConv(_HIDDEN, _HIDDEN, *options, edge_dim=_EDGE_FEATURES)


def _hetero_sage(graph: Graph) -> nn.Module:
    model = gnn.GraphSAGE(graph.x.size(1), _HIDDEN, _LAYERS, graph.num_classes)
    return gnn.to_hetero(model, (list(_TYPES), list(_EDGE_TYPES)))


def _plain(graph: Graph) -> tuple[Any, ...]:
    return graph.x, graph.edge_index


def _with_edge_features(graph: Graph) -> tuple[Any, ...]:
    return *_plain(graph), torch.randn(graph.num_edges, _EDGE_FEATURES)


def _by_type(graph: Graph) -> tuple[Any, ...]:
    """Return inputs by type: each type has all nodes, and half of the edges go either way."""
    half = graph.num_edges // 2
    edges = graph.edge_index.split([half, graph.num_edges - half], dim=1)
    by_type = {kind: part.contiguous() for kind, part in zip(_EDGE_TYPES, edges, strict=True)}
    return {kind: graph.x.clone() for kind in _TYPES}, by_type


def _heads(conv: Callable[..., nn.Module]) -> Callable[[Graph], nn.Module]:
    return _stack(lambda _: conv(_HIDDEN, _HIDDEN // _HEADS, _HEADS))


KINDS = {
    "gcn": Kind(_basic(gnn.GCN), _plain),
    "gat": Kind(_basic(gnn.GAT, heads=_HEADS), _plain),
    "gatv2": Kind(_heads(gnn.GATv2Conv), _plain),
    "transformer": Kind(_heads(gnn.TransformerConv), _plain),
    "gcnii": Kind(_stack(lambda _: gnn.GCN2Conv(_HIDDEN, 0.1)), _plain),
    "gine": Kind(_stack(_gine), _with_edge_features),
    "pna": Kind(_stack(_pna), _with_edge_features),
    "hetero-sage": Kind(_hetero_sage, _by_type),
}

"""Models of many kinds, to compare the peaks that a memory budget predicts with measured ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GAT,
    GCN,
    GATv2Conv,
    GCN2Conv,
    GINEConv,
    GraphSAGE,
    PNAConv,
    TransformerConv,
    to_hetero,
)

from datasets import Graph

_HIDDEN, _LAYERS, _HEADS = 64, 3, 2
_EDGE_FEATURES = 16
_TYPES = ("a", "b")
_EDGE_TYPES = (("a", "to", "b"), ("b", "to", "a"))


@dataclass(frozen=True)
class Kind:
    """One kind of model.

    Attributes:
        make: Makes the model for a graph.
        inputs: Makes the arguments of its forward.
    """

    make: Callable[[Graph], nn.Module]
    inputs: Callable[[Graph], tuple[Any, ...]]


class _Convs(nn.Module):
    """Convs with batch norm, relu and dropout between them."""

    def __init__(self, convs: list[nn.Module], first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(_HIDDEN) for _ in convs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = initial = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            before = (initial,) if isinstance(conv, GCN2Conv) else ()
            after = () if edge_attr is None else (edge_attr,)
            x = conv(x, *before, edge_index, *after)
            x = nn.functional.dropout(norm(x).relu(), 0.5, self.training)
        return self.last(x)


def _basic(kind: Callable[..., nn.Module], **more: Any) -> Callable[[Graph], nn.Module]:
    options = {"dropout": 0.5, "norm": "batch_norm", **more}
    return lambda g: kind(g.x.size(1), _HIDDEN, _LAYERS, g.num_classes, **options)


def _stack(conv: Callable[[Graph], nn.Module]) -> Callable[[Graph], nn.Module]:
    def make(graph: Graph) -> nn.Module:
        convs = [conv(graph) for _ in range(_LAYERS)]
        first, last = nn.Linear(graph.x.size(1), _HIDDEN), nn.Linear(_HIDDEN, graph.num_classes)
        return _Convs(convs, first, last)

    return make


def _gine(graph: Graph) -> nn.Module:
    inside = nn.Sequential(nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN))
    return GINEConv(inside, edge_dim=_EDGE_FEATURES)


def _pna(graph: Graph) -> nn.Module:
    degrees = torch.bincount(torch.bincount(graph.edge_index[1], minlength=graph.num_nodes))
    names = ["mean", "max", "std"]
    scalers = ["identity", "amplification"]
    return PNAConv(_HIDDEN, _HIDDEN, names, scalers, degrees, edge_dim=_EDGE_FEATURES)


def _hetero_sage(graph: Graph) -> nn.Module:
    model = GraphSAGE(graph.x.size(1), _HIDDEN, _LAYERS, graph.num_classes)
    return to_hetero(model, (list(_TYPES), list(_EDGE_TYPES)))


def _plain(graph: Graph) -> tuple[Any, ...]:
    return graph.x, graph.edge_index


def _with_edge_features(graph: Graph) -> tuple[Any, ...]:
    return *_plain(graph), torch.randn(graph.num_edges, _EDGE_FEATURES)


def _by_type(graph: Graph) -> tuple[Any, ...]:
    """Each type has all nodes; half of the edges go either way."""
    half = graph.num_edges // 2
    edges = graph.edge_index.split([half, graph.num_edges - half], dim=1)
    return (
        {kind: graph.x.clone() for kind in _TYPES},
        {kind: part.contiguous() for kind, part in zip(_EDGE_TYPES, edges, strict=True)},
    )


KINDS = {
    "gcn": Kind(_basic(GCN), _plain),
    "gat": Kind(_basic(GAT, heads=_HEADS), _plain),
    "gatv2": Kind(_stack(lambda _: GATv2Conv(_HIDDEN, _HIDDEN // _HEADS, _HEADS)), _plain),
    "transformer": Kind(
        _stack(lambda _: TransformerConv(_HIDDEN, _HIDDEN // _HEADS, _HEADS)), _plain
    ),
    "gcnii": Kind(_stack(lambda _: GCN2Conv(_HIDDEN, 0.1)), _plain),
    "gine": Kind(_stack(_gine), _with_edge_features),
    "pna": Kind(_stack(_pna), _with_edge_features),
    "hetero-sage": Kind(_hetero_sage, _by_type),
}

"""The layers of DGL in place of PyG's, with the same weights.

A network keeps its norms, its dropout and the order in which they run. Its layers become DGL's own,
or are built from DGL's message passing if DGL has no such layer.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    PNAConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.nn.models.schnet import CFConv
from torch_geometric.utils import remove_self_loops

VERSION = "1.1.3"


def load() -> ModuleType:
    """Import DGL.

    Raises:
        ImportError: If DGL is not installed.
    """
    # Without this variable, DGL asks once, and writes a file into the home folder.
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import dgl
        import dgl.nn.pytorch
    return dgl


def make_graph(edge_index: Tensor, nodes: int, loops: bool) -> Any:
    """Return the graph, with one self-loop at each node if ``loops`` is true.

    Shapes:
        - **input**: edge_index [2, E] int64
    """
    dgl = load()
    if loops:
        edge_index, _ = remove_self_loops(edge_index)
    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=nodes)
    return dgl.add_self_loop(graph) if loops else graph


def needs_loops(model: nn.Module) -> bool:
    """Return whether the model's layers add self-loops."""
    without = PNAConv, SAGEConv, TransformerConv
    return not any(isinstance(module, without) for module in model.modules())


def replace_layers(model: nn.Module) -> nn.Module:
    """Put DGL's layers in place of those in ``model.convs``, with the same weights.

    Forward then takes a graph of :func:`make_graph` where it took ``edge_index``.

    Raises:
        TypeError: If there is a layer that has no counterpart here.
    """
    convs = model.convs
    assert isinstance(convs, nn.ModuleList)
    for number, conv in enumerate(convs):
        make = _MAKERS.get(type(conv))
        if make is None:
            raise TypeError(f"Expected a layer with a counterpart in DGL (got {type(conv)})")
        convs[number] = make(conv)
    return model


def replace_filters(model: nn.Module) -> None:
    """Let DGL sum the messages of SchNet's convolutions, which are otherwise unchanged.

    Raises:
        TypeError: If the model has none.
    """
    convs = [module for module in model.modules() if isinstance(module, CFConv)]
    if not convs:
        raise TypeError(f"Expected a model with layers of SchNet (got {type(model)})")
    for conv in convs:
        conv.propagate = _filtered
    # The first sum imports more of DGL, which stays in the process.
    _filtered(torch.tensor([[0], [1]]), torch.ones(2, 1), torch.ones(1, 1))


def _filtered(edge_index: Tensor, x: Tensor, W: Tensor) -> Tensor:
    fn = load().function
    graph = vars(edge_index).get("of_dgl")
    if graph is None:  # all layers share it
        graph = make_graph(edge_index, len(x), loops=False)
        edge_index.of_dgl = graph  # type: ignore[attr-defined]
    with graph.local_scope():
        graph.srcdata["x"], graph.edata["filter"] = x, W
        graph.update_all(fn.u_mul_e("x", "filter", "message"), fn.sum("message", "out"))
        out: Tensor = graph.dstdata["out"]
    return out


class _Heads(nn.Module):
    """An attention layer of DGL, with PyG's bias after heads are concatenated or averaged."""

    def __init__(self, conv: nn.Module, concat: bool, bias: nn.Parameter) -> None:
        super().__init__()
        self.conv, self.concat, self.bias = conv, concat, bias

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        out: Tensor = self.conv(graph, x)
        return (out.flatten(1) if self.concat else out.mean(1)) + self.bias


class _Swapped(nn.Module):
    """A layer of DGL that takes its arguments in PyG's order."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, *args: Any, **_: Any) -> Tensor:
        *features, graph = args
        out: Tensor = self.conv(graph, *features)
        return out


class _Unscaled(nn.Module):
    """In place of the norm in DGL's PNA: undoes the division by the root of the nodes before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * math.sqrt(len(x))


class _Transformer(nn.Module):
    """TransformerConv built from DGL's functions, because DGL has no such layer."""

    def __init__(self, conv: TransformerConv) -> None:
        super().__init__()
        self.query, self.key, self.value = conv.lin_query, conv.lin_key, conv.lin_value
        self.skip, self.concat = conv.lin_skip, conv.concat
        self.heads, self.channels = conv.heads, conv.out_channels

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        import dgl.function as fn
        from dgl.nn.functional import edge_softmax

        shape = -1, self.heads, self.channels
        with graph.local_scope():
            graph.dstdata["query"] = self.query(x).view(shape)
            graph.srcdata["key"] = self.key(x).view(shape)
            graph.srcdata["value"] = self.value(x).view(shape)
            graph.apply_edges(fn.v_dot_u("query", "key", "score"))
            scores = graph.edata["score"] / math.sqrt(self.channels)
            graph.edata["weight"] = edge_softmax(graph, scores)
            graph.update_all(fn.u_mul_e("value", "weight", "message"), fn.sum("message", "out"))
            out: Tensor = graph.dstdata["out"]
        out = out.flatten(1) if self.concat else out.mean(1)
        return out + self.skip(x)


def _gcn(conv: GCNConv) -> nn.Module:
    layer = load().nn.pytorch.GraphConv(conv.in_channels, conv.out_channels)
    layer.weight.data, layer.bias.data = conv.lin.weight.data.T.contiguous(), conv.bias.data
    return _Swapped(layer)


def _gat(conv: GATConv) -> nn.Module:
    layer = load().nn.pytorch.GATConv(
        *(conv.in_channels, conv.out_channels, conv.heads, 0.0, conv.dropout),
        negative_slope=conv.negative_slope,
        bias=False,
    )
    layer.fc.weight.data = conv.lin.weight.data
    layer.attn_l.data, layer.attn_r.data = conv.att_src.data, conv.att_dst.data
    return _Heads(layer, conv.concat, conv.bias)


def _gatv2(conv: GATv2Conv) -> nn.Module:
    layer = load().nn.pytorch.GATv2Conv(
        *(conv.in_channels, conv.out_channels, conv.heads, 0.0, conv.dropout),
        negative_slope=conv.negative_slope,
    )
    for ours, theirs in ((layer.fc_src, conv.lin_l), (layer.fc_dst, conv.lin_r)):
        ours.weight.data, ours.bias.data = theirs.weight.data, theirs.bias.data
    layer.attn.data = conv.att.data
    return _Heads(layer, conv.concat, conv.bias)


def _gcn2(conv: GCN2Conv) -> nn.Module:
    # DGL's beta is log(lambda / layer + 1).
    layer = load().nn.pytorch.GCN2Conv(
        conv.channels, 1, alpha=conv.alpha, lambda_=math.exp(conv.beta) - 1, bias=False
    )
    layer.weight1.data = conv.weight1.data
    return _Swapped(layer)


def _sage(conv: SAGEConv) -> nn.Module:
    layer = load().nn.pytorch.SAGEConv(conv.lin_l.in_channels, conv.out_channels, "mean")
    own, neighbors = conv.lin_r, conv.lin_l
    layer.fc_neigh.weight.data = neighbors.weight.data
    layer.fc_self.weight.data, layer.fc_self.bias.data = own.weight.data, neighbors.bias.data
    return _Swapped(layer)


def _pna(conv: PNAConv) -> nn.Module:
    scaled = conv.aggr_module
    layer = load().nn.pytorch.PNAConv(
        *(conv.in_channels, conv.out_channels),
        [type(a).__name__.removesuffix("Aggregation").lower() for a in scaled.aggr.aggrs],
        scaled.scaler,
        float(scaled.avg_deg_log),
        residual=False,
    )
    tower, message = layer.towers[0], conv.pre_nns[0][0]
    tower.U, tower.batchnorm = conv.post_nns[0][0], _Unscaled()
    # PyG has the destination's features first, DGL the source's.
    tower.M.weight.data = message.weight.data.roll(conv.in_channels, 1)
    tower.M.bias.data = message.bias.data
    layer.mixing_layer = conv.lin
    return _Swapped(layer)


_MAKERS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    GCNConv: _gcn,
    GATConv: _gat,
    GATv2Conv: _gatv2,
    GCN2Conv: _gcn2,
    PNAConv: _pna,
    SAGEConv: _sage,
    TransformerConv: _Transformer,
}

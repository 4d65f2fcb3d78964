"""Which layers give on a part of a graph what they give on all of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch_geometric
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing, MetaLayer

from gact_graph.layers.halo.norm import NORMS

LOCAL = (
    *(pyg.AGNNConv, pyg.APPNP, pyg.ARMAConv, pyg.CGConv, pyg.ClusterGCNConv, pyg.DNAConv),
    *(pyg.EdgeConv, pyg.EGConv, pyg.FAConv, pyg.FeaStConv, pyg.FiLMConv, pyg.GATConv),
    *(pyg.GATv2Conv, pyg.GatedGraphConv, pyg.GCNConv, pyg.GCN2Conv, pyg.GENConv, pyg.GeneralConv),
    *(pyg.GINConv, pyg.GINEConv, pyg.GMMConv, pyg.GraphConv, pyg.HEATConv, pyg.LEConv),
    *(pyg.LGConv, pyg.MFConv, pyg.MixHopConv, pyg.NNConv, pyg.PDNConv, pyg.PNAConv),
    *(
        pyg.PointGNNConv,
        pyg.PointNetConv,
        pyg.PointTransformerConv,
        pyg.PPFConv,
        pyg.ResGatedGraphConv,
    ),
    *(pyg.RGATConv, pyg.RGCNConv, pyg.SAGEConv, pyg.SGConv, pyg.SignedConv, pyg.SimpleConv),
    *(pyg.SplineConv, pyg.SSGConv, pyg.TAGConv, pyg.TransformerConv, pyg.WLConvContinuous),
)
"""Layers whose output at a node depends on its edges and their sources, and on nothing else.

Of those that run several hops that holds for each call of ``propagate``, and of those that call
``gcn_norm`` once the halo's degrees are known.
"""

_BY_POSITION = "it finds its neighbours among all nodes, and a process has some"
_BOTH_WAYS = "it reads the edges that leave a node, too, and other processes have some of them"
_TYPES = "it is for several types of nodes, and a part has one"

NOT_LOCAL: dict[type[nn.Module], str] = {
    pyg.ChebConv: "its Laplacian counts the edges that leave a node, which other processes have",
    pyg.DirGNNConv: _BOTH_WAYS,
    pyg.DynamicEdgeConv: _BY_POSITION,
    pyg.FastRGCNConv: "its messages may read the numbers of nodes; RGCNConv computes the same",
    pyg.GPSConv: "each node attends to all nodes, and a process has some",
    pyg.GravNetConv: _BY_POSITION,
    pyg.HANConv: _TYPES,
    pyg.HeteroConv: _TYPES,
    pyg.HGTConv: _TYPES,
    pyg.HypergraphConv: _BOTH_WAYS,
    pyg.MeshCNNConv: "its messages depend on the order of the edges",
    pyg.PANConv: "it multiplies adjacency matrices, of which a process has some rows",
    pyg.SuperGATConv: "in training it draws pairs of nodes that have no edge, from all nodes",
    pyg.WLConv: "each process would number the colours by itself",
    pyg.XConv: _BY_POSITION,
}
"""Why layers cannot run on a part."""

_OVER_A_CONV = (pyg.AntiSymmetricConv,)
"""Modules beside the convs that work node by node around a layer of theirs."""

_ON_NODES: dict[type[nn.Module], tuple[str, ...]] = {
    pyg.CGConv: ("bn",),
    pyg.FiLMConv: ("films", "film_skip"),
    pyg.GENConv: ("mlp",),
    pyg.GINConv: ("nn",),
    pyg.GINEConv: ("nn",),
    pyg.PointGNNConv: ("mlp_g",),
    pyg.PointNetConv: ("global_nn",),
    pyg.PPFConv: ("global_nn",),
}
"""The networks of a layer that work on nodes; its others may work on edges."""

ON_EDGES = "it normalises over edges, which each process may work on in blocks of its own"
"""Why batch norm in a layer's edge work cannot run on a part."""

_ROW_BY_ROW = (pyg.BatchNorm, pyg.MessageNorm, pyg.DiffGroupNorm)
"""Norms of PyG that work row by row, but for a batch norm inside."""

_OVER_NODES = ("norm", "pool", "unpool", "aggr", "attention", "dense")
"""Packages of ``torch_geometric.nn`` whose modules may read all nodes."""


def check_local(model: nn.Module) -> None:
    """Raises ValueError if a part of the model reads more than a node and its edges.

    Batch norm may: :class:`gact_graph.layers.halo.norm.WholeBatchNorm` sees to it.
    """
    inside: set[nn.Module] = set()  # of layers
    of_edges: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing):
            inside.update(module.modules())
            of_edges.update(_on_edges(module))
        reason = _why_not(module, module in inside, module in of_edges)
        if reason is not None:
            raise refusal(name or type(model).__name__, reason)


def refusal(name: str, reason: str) -> ValueError:
    """The error about a part of the model that cannot run on a part of a graph."""
    return ValueError(
        f"Expected a model that can run on a part of a graph (got {name!r}: {reason}); train it on "
        "the whole graph, or with DistributedDataParallel on mini-batches"
    )


def _why_not(module: nn.Module, is_inside: bool, is_of_edges: bool) -> str | None:
    """Why a module cannot run on a part.

    Args:
        module: The module.
        is_inside: Whether it is a message passing layer, or a part of one.
        is_of_edges: Whether it works on edges.
    """
    kind = type(module)
    if any(is_lazy(p) for p in module.parameters(recurse=False)):
        return "its first forward initialises it, in each process by itself; call it once before"
    place = kind.__module__.split(".")
    if kind in NOT_LOCAL:
        return NOT_LOCAL[kind]
    if isinstance(module, MessagePassing):
        return _why_not_layer(module)
    if isinstance(module, _BatchNorm):
        if kind not in NORMS:
            return f"{kind.__name__} is not known to normalise as torch's batch norm does"
        if is_of_edges:
            return ON_EDGES
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
            return "it normalises over a process group of its own; leave process_group out"
        return None
    is_conv = place[:3] == ["torch_geometric", "nn", "conv"] and kind not in _OVER_A_CONV
    if (is_conv and not is_inside) or isinstance(module, MetaLayer):
        return f"{kind.__name__} is not known to read no more than a node's own edges"
    if place[:2] != ["torch_geometric", "nn"] or place[2] not in _OVER_NODES:
        return None
    if kind in _ROW_BY_ROW or place[2:] == ["dense", "linear"]:
        return None
    if is_inside and place[2] == "aggr":
        return None  # over the edges of each node
    if isinstance(module, (pyg.LayerNorm, pyg.HeteroLayerNorm)) and module.mode == "node":
        return None
    return f"{kind.__name__} may depend on all nodes, and a process has some"


def _on_edges(layer: MessagePassing) -> Iterator[nn.Module]:
    """The modules of a known layer that may work on edges."""
    if type(layer) not in LOCAL:
        return
    of_nodes: set[nn.Module] = set()
    for name in _ON_NODES.get(type(layer), ()):
        part = getattr(layer, name)
        of_nodes.update(part.modules() if isinstance(part, nn.Module) else ())
    yield from (module for module in layer.modules() if module not in of_nodes)


def _why_not_layer(layer: MessagePassing) -> str | None:
    if layer.flow != "source_to_target":
        return "its messages flow from target to source"
    if getattr(layer, "cached", False):
        return "cached=True keeps a normalisation of one process"
    if (
        isinstance(layer, pyg.EGConv)
        and layer.add_self_loops
        and "symnorm" not in layer.aggregators
    ):
        return "its self-loops end with the last node that an edge names; add aggregator 'symnorm'"
    if _may_choose_way(layer):
        return (
            "each process would choose whether to fetch rows once or for each relation; set "
            "torch_geometric.backend.use_segment_matmul"
        )
    return None


def _may_choose_way(layer: MessagePassing) -> bool:
    """Whether a layer with pyg-lib decides by its edges how often it propagates."""
    chosen = torch_geometric.backend.use_segment_matmul
    return isinstance(layer, pyg.RGCNConv) and torch_geometric.typing.WITH_SEGMM and chosen is None

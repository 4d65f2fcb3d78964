"""The layers that give on a part of a graph the rows that they give on the whole graph."""

from __future__ import annotations

import torch_geometric
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing, MetaLayer

from gact_graph.layers.halo.norm import NORMS
from gact_graph.support.torch_private import AnyBatchNorm

LOCAL = (
    *(pyg.AGNNConv, pyg.APPNP, pyg.ARMAConv, pyg.CGConv, pyg.ClusterGCNConv, pyg.DNAConv),
    *(pyg.EdgeConv, pyg.EGConv, pyg.FAConv, pyg.FeaStConv, pyg.FiLMConv, pyg.GATConv),
    *(pyg.GATv2Conv, pyg.GatedGraphConv, pyg.GCNConv, pyg.GCN2Conv, pyg.GENConv, pyg.GeneralConv),
    *(pyg.GINConv, pyg.GINEConv, pyg.GMMConv, pyg.GraphConv, pyg.HEATConv, pyg.LEConv),
    *(pyg.LGConv, pyg.MFConv, pyg.MixHopConv, pyg.NNConv, pyg.PDNConv, pyg.PNAConv),
    *(pyg.PointGNNConv, pyg.PointNetConv, pyg.PointTransformerConv, pyg.PPFConv, pyg.RGATConv),
    *(pyg.ResGatedGraphConv, pyg.RGCNConv, pyg.SAGEConv, pyg.SGConv, pyg.SignedConv),
    *(pyg.SimpleConv, pyg.SplineConv, pyg.SSGConv, pyg.TAGConv, pyg.TransformerConv),
    *(pyg.WLConvContinuous,),
)
"""Layers whose output at a node depends on the edges to the node and their sources only.

For layers with several hops this holds for each call of ``propagate``; for layers that call
``gcn_norm``, given the degrees of the halo.
"""

_SEARCH = "it searches neighbors among all nodes, and a process has a part of them"
_LEAVING = "it also reads the edges that leave a node, which are in other parts"
_TYPES = "it needs several types of nodes, and a part has one"

NOT_LOCAL: dict[str, str] = {
    "ChebConv": "its Laplacian counts the edges that leave a node, which are in other parts",
    "DirGNNConv": _LEAVING,
    "DynamicEdgeConv": _SEARCH,
    "FastRGCNConv": "its messages may read the indices of nodes; RGCNConv computes the same",
    "GPSConv": "each node attends to all nodes, and a process has a part of them",
    "GravNetConv": _SEARCH,
    "HANConv": _TYPES,
    "HeteroConv": _TYPES,
    "HGTConv": _TYPES,
    "HypergraphConv": _LEAVING,
    "MeshCNNConv": "its messages depend on the order of the edges",
    "PANConv": "it multiplies adjacency matrices, of which a process has some rows",
    "SuperGATConv": "in training it samples pairs of nodes without an edge from all nodes",
    "WLConv": "each process would number the colors separately",
    "XConv": _SEARCH,
}
"""Reasons why layers of PyG cannot run on a part, by name: PyG 2.6 does not have all of them."""

_OVER_A_CONV = (pyg.AntiSymmetricConv,)
"""Modules of PyG's package of convs that work node by node around a conv."""

_ROW_BY_ROW = (pyg.BatchNorm, pyg.MessageNorm, pyg.DiffGroupNorm)
"""Norms of PyG that work row by row, except for a batch norm inside."""

_OVER_NODES = ("norm", "pool", "unpool", "aggr", "attention", "dense")
"""Packages of ``torch_geometric.nn`` whose modules may read all nodes."""

EDGE_METHODS = {"propagate": ("message", "aggregate", "update"), "edge_updater": ("edge_update",)}
"""The methods that get the arguments of ``propagate`` and of ``edge_updater``."""


def check_supported(model: nn.Module) -> None:
    """Check that all modules can run on a part.

    Raises:
        ValueError: A module depends on more than a node and the edges to it. Batch norm is allowed:
            :class:`gact_graph.layers.halo.norm.WholeBatchNorm` replaces it.
    """
    inside: set[nn.Module] = set()  # of message passing layers
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing):
            inside.update(module.modules())
        reason = _why_not(module, module in inside)
        if reason is not None:
            raise refusal(name or type(model).__name__, reason)


def refusal(name: str, reason: str) -> ValueError:
    """Return the error for a module that cannot run on a part."""
    return ValueError(
        f"Expected a model that can run on a part of a graph (got {name!r}: {reason}); train it on "
        "the whole graph, or with DistributedDataParallel on mini-batches"
    )


def _why_not(module: nn.Module, inside: bool) -> str | None:
    """Return the reason why a module, or its message passing layer, cannot run on a part."""
    kind = type(module)
    if any(is_lazy(p) for p in module.parameters(recurse=False)):
        return "each process would initialize it separately; run its first forward before wrap"
    package = kind.__module__.split(".")
    if package[:2] == ["torch_geometric", "nn"] and kind.__name__ in NOT_LOCAL:
        return NOT_LOCAL[kind.__name__]
    if isinstance(module, MessagePassing):
        return _why_not_layer(module)
    if isinstance(module, AnyBatchNorm):
        if kind not in NORMS:
            return f"{kind.__name__} may normalize in another way than torch's batch norm"
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
            return "it normalizes over its own process group; leave process_group out"
        return None
    is_conv = package[:3] == ["torch_geometric", "nn", "conv"] and kind not in _OVER_A_CONV
    if (is_conv and not inside) or isinstance(module, MetaLayer):
        return f"{kind.__name__} may read more than the edges to a node"
    if package[:2] != ["torch_geometric", "nn"] or package[2] not in _OVER_NODES:
        return None
    if isinstance(module, pyg.BatchNorm) and module.allow_single_element:
        return "it does not normalize a single row of a process; leave allow_single_element out"
    if kind in _ROW_BY_ROW or package[2:] == ["dense", "linear"]:
        return None
    if inside and package[2] == "aggr":
        return None  # over the edges of each node
    if isinstance(module, (pyg.LayerNorm, pyg.HeteroLayerNorm)) and module.mode == "node":
        return None
    return f"{kind.__name__} may depend on all nodes, and a process has a part of them"


def _why_not_layer(layer: MessagePassing) -> str | None:
    if layer.flow != "source_to_target":
        return "its messages flow from target to source"
    for methods in EDGE_METHODS.values():
        taken = {name for method in methods for name in layer.inspector.get_param_names(method)}
        for name in sorted(taken - layer.special_args):
            if f"{name}_j" in taken:
                return (
                    f"it takes {name} beside {name}_j, for which {name} gets rows of other parts; "
                    "pass the tensor to propagate under a second name"
                )
    if getattr(layer, "cached", False):
        return "cached=True keeps the normalization of one process"
    if (
        isinstance(layer, pyg.EGConv)
        and layer.add_self_loops
        and "symnorm" not in layer.aggregators
    ):
        return "its self-loops end with the last node that an edge names; add aggregator 'symnorm'"
    segments = torch_geometric.typing.WITH_SEGMM and isinstance(layer, pyg.RGCNConv)
    if segments and torch_geometric.backend.use_segment_matmul is None:
        return (
            "each process would choose separately whether to fetch rows once or for each relation; "
            "set torch_geometric.backend.use_segment_matmul"
        )
    return None

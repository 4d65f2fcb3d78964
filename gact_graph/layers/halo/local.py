"""Which layers give on a part of a graph what they give on all of it."""

from __future__ import annotations

import torch_geometric.nn as pyg
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing, MetaLayer

from gact_graph.layers.halo.norm import NORMS

LOCAL = (
    *(pyg.GCNConv, pyg.SAGEConv, pyg.GraphConv, pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv),
    *(pyg.GINConv, pyg.GINEConv, pyg.ResGatedGraphConv, pyg.EdgeConv, pyg.GENConv),
)
"""Layers whose output at a node depends on its edges and their sources, and on nothing else."""

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
            if type(module) is pyg.EdgeConv:
                of_edges.update(module.modules())
        reason = _why_not(module, module in inside, module in of_edges)
        if reason is not None:
            raise ValueError(
                "Expected a model that can run on a part of a graph (got "
                f"{name or type(model).__name__!r}: {reason}); train it on the whole graph, or "
                "with DistributedDataParallel on mini-batches"
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
    if isinstance(module, MessagePassing):
        return _why_not_layer(module)
    if isinstance(module, _BatchNorm):
        if kind not in NORMS:
            return f"{kind.__name__} is not known to normalise as torch's batch norm does"
        if is_of_edges:
            return "it normalises over edges, which each process may work on in blocks of its own"
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
            return "it normalises over a process group of its own; leave process_group out"
        return None
    is_conv = place[:3] == ["torch_geometric", "nn", "conv"] and not is_inside
    if is_conv or isinstance(module, MetaLayer):
        return f"{kind.__name__} is not known to read no more than a node's own edges"
    if place[:2] != ["torch_geometric", "nn"] or place[2] not in _OVER_NODES:
        return None
    if is_inside or kind in _ROW_BY_ROW or place[2:] == ["dense", "linear"]:
        return None
    if isinstance(module, (pyg.LayerNorm, pyg.HeteroLayerNorm)) and module.mode == "node":
        return None
    return f"{kind.__name__} may depend on all nodes, and a process has some"


def _why_not_layer(module: MessagePassing) -> str | None:
    if type(module) not in LOCAL:
        return f"{type(module).__name__} is not known to read no more than a node's own edges"
    if module.flow != "source_to_target":
        return "its messages flow from target to source"
    if getattr(module, "cached", False):
        return "cached=True keeps a normalisation of one process"
    return None

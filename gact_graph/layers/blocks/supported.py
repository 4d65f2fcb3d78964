"""Layers and edges that blocks do not support, told before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from gact_graph.layers.blocks.arguments import CannotBlock
from gact_graph.support.current import Hook


def plain_edge_index(module: MessagePassing, edge_index: Any) -> Tensor:
    """The edges [2, E] of int64 that the layer was given.

    Raises:
        CannotBlock: The edges have another form, or there are none.
    """
    if isinstance(edge_index, EdgeIndex):
        if module.fuse and module.SUPPORTS_FUSED_EDGE_INDEX and edge_index.is_sorted_by_col:
            raise CannotBlock("multiplies by a sparse matrix")
        edge_index = edge_index.as_tensor()
    if module.fuse and not _is_dense(edge_index):
        raise CannotBlock("multiplies by a sparse matrix")
    return checked_edges(edge_index)


def checked_edges(edge_index: Any) -> Tensor:
    """The same edges, if they can be cut into blocks.

    Raises:
        CannotBlock: They have another form than [2, E] of int64, or there are none.
    """
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    if not _is_dense(edge_index):
        raise CannotBlock(
            "has its edges in a sparse matrix; only an edge_index can be cut into blocks"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise CannotBlock("has no edge_index [2, E] of int64")
    if edge_index.size(1) == 0:
        raise CannotBlock("has no edges")
    return edge_index


def _is_dense(edge_index: Any) -> bool:
    return type(edge_index) is Tensor and edge_index.layout == torch.strided


def check_module(module: MessagePassing) -> None:
    """Raises CannotBlock if PyG or the user wants to see all messages at once."""
    if module.explain or module.decomposed_layers > 1:
        raise CannotBlock("is explained or decomposed")
    for phase in ("propagate", "message", "aggregate", "edge_update"):
        for when in ("forward_pre", "forward"):
            registered = getattr(module, f"_{phase}_{when}_hooks").values()
            if not all(isinstance(hook, Hook) for hook in registered):
                raise CannotBlock(f"has a hook on {phase} that is not from gact_graph")

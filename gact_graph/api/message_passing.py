"""Message passing in blocks for code without a ``MessagePassing`` module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from gact_graph.capture.config import check_blocks
from gact_graph.layers.blocks.functional import Messages
from gact_graph.ops.quantize import check_int
from gact_graph.support.torch_private import tree_leaves, tree_map

_REDUCE = ("sum", "mean", "max", "min", None)


def message_passing(
    message: Callable[[Any, Any, Any], Tensor],
    x: Any,
    edge_index: Tensor,
    edge_attr: Any = None,
    *,
    reduce: Literal["sum", "mean", "max", "min"] | None = "sum",
    dim_size: int | None = None,
    blocks: int | Literal["auto"] = "auto",
) -> Tensor:
    r"""Compute ``scatter(message(x[dst], x[src], edge_attr), dst)`` in blocks of edges.

    .. math::
        h_i = \bigoplus_{(j, i) \in E} \mathrm{message}(x_i, x_j, e_{ji})

    The edge work runs for one block of destination nodes after another, and backward computes each
    block again: messages, and the tensors that a network in ``message`` derives from them, exist
    for one block at a time. Backward needs ``x``, ``edge_attr`` and the parameters; in a model that
    is wrapped by ``gact_graph.wrap``, these are compressed like the inputs of a layer. Gradients of
    gradients, as for forces in a loss, run in blocks, too.

    ``message`` may be a module, a method of a module, or a function that reaches modules and
    tensors through its variables; all parameters get gradients. It must treat each edge separately.
    Otherwise, as with batch norm over edges, or if its gradients cannot be determined, all messages
    are computed at once, and a warning gives the reason.

    Args:
        message: Called as ``message(x_i, x_j, edge_attr)`` with the rows of a block's edges:
            ``x_i`` at their destinations, ``x_j`` at their sources. Returns a tensor [edges, ...].
        x: Node tensors [N, ...], or a pair ``(source, destination)`` of [N_src, ...] and
            [N_dst, ...], either of which may be None. A dict or list of tensors may stand in place
            of a tensor; ``message`` gets a dict or list.
        edge_index: [2, E], int64: sources in the first row, destinations in the second, as in PyG.
        edge_attr: Edge tensors [E, ...], a dict or list of them, or None.
        reduce: Reduction of the messages to each destination: ``"sum"``, ``"mean"``, ``"max"`` or
            ``"min"``; zeros at nodes without messages. None: no reduction; the result has a row for
            each edge, in the order of ``edge_index``.
        dim_size: Number of destination nodes; by default the rows of ``x``, or of the destination
            of a pair. With fewer than the rows of ``x``, the first rows are destinations.
        blocks: Edges per block, 1 to 2^40. ``"auto"`` or True decides by the width of the tensors,
            and uses one block for up to 4,096 edges. False computes all messages at once.

    Returns:
        [N_dst, ...], or [E, ...] with ``reduce=None``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has the wrong shape, the number of destinations is unknown, or
            ``message`` does not return a row for each edge.
        IndexError: ``edge_index`` names a node that ``x`` does not have.
        RuntimeError: Backward differentiates a gradient of a gradient; only ``blocks=False``
            supports this.
    """
    if not callable(message):
        raise TypeError(f"Expected message to be callable (got {type(message).__name__})")
    if reduce not in _REDUCE:
        raise ValueError(
            f"Expected reduce to be 'sum', 'mean', 'max', 'min' or None (got {reduce!r})"
        )
    check_blocks(blocks)
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"Expected edge_index to be a tensor (got {type(edge_index).__name__})")
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            f"Expected edge_index [2, E] of int64 (got {[*edge_index.shape]} of {edge_index.dtype})"
        )
    source, destination = x if isinstance(x, tuple) and len(x) == 2 else (x, x)
    num_sources = _rows("x", source)
    num_destinations = _rows("x", destination)
    edges = _rows("edge_attr", edge_attr)
    if edges is not None and edges != edge_index.size(1):
        raise ValueError(
            f"Expected edge_attr to have a row for each of {edge_index.size(1)} edges (got {edges})"
        )
    if dim_size is not None and dim_size != num_destinations:
        check_int("dim_size", dim_size)
        if dim_size < 0:
            raise ValueError(f"Expected dim_size to be 0 or more (got {dim_size})")
        if num_destinations is not None:
            if dim_size > num_destinations:
                raise ValueError(
                    f"Expected dim_size to be at most the {num_destinations} rows of x (got "
                    f"{dim_size})"
                )
            destination = _first_rows(destination, dim_size)
        num_destinations = dim_size
    if num_destinations is None:
        if reduce is not None:
            raise ValueError(
                "Expected the number of destination nodes (got no tensor with a row for each); "
                "pass dim_size"
            )
        num_destinations = _count(edge_index[1])
    return Messages(
        message,
        source,
        destination,
        edge_attr,
        edge_index,
        reduce,
        _count(edge_index[0]) if num_sources is None else num_sources,
        num_destinations,
    ).run("auto" if blocks is None or blocks is True else blocks or None)


def _rows(name: str, value: Any) -> int | None:
    """Return the number of rows of all tensors in a nested value; None without tensors."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    counts = {tensor.size(0) if tensor.dim() else None for tensor in tensors}
    if None in counts or len(counts) > 1:
        shapes = sorted(list(tensor.shape) for tensor in tensors)
        raise ValueError(f"Expected tensors of {name} with the same number of rows (got {shapes})")
    return next(iter(counts), None)


def _first_rows(value: Any, count: int) -> Any:
    return tree_map(lambda leaf: leaf[:count] if isinstance(leaf, Tensor) else leaf, value)


def _count(nodes: Tensor) -> int:
    """Return the least number of nodes that includes these indices."""
    return int(nodes.max()) + 1 if nodes.numel() else 0

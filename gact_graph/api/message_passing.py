"""Message passing in blocks for code that is no ``MessagePassing`` module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric import EdgeIndex

from gact_graph.capture.config import check_blocks
from gact_graph.layers.blocks.functional import Messages

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
    r"""``scatter(message(x[dst], x[src], edge_attr), dst)``, for a part of the edges at a time.

    .. math::
        h_i = \bigoplus_{(j, i) \in E} \mathrm{message}(x_i, x_j, e_{ji})

    The edge work runs for one block of destination nodes after another, and each block is computed
    again in backward: no tensor of messages, and none that a network in ``message`` makes of them,
    is alive for more than a block. What is saved for backward is ``x``, ``edge_attr`` and the
    parameters; in a model that ``gact_graph.wrap`` has wrapped, these are compressed as the
    inputs of a layer are. A gradient that is differentiated once more, as forces in a loss are,
    comes in blocks, too.

    ``message`` may be a module, a method of one, or a function or lambda that reaches modules and
    tensors through its variables; all that learns has its gradient. It must treat each edge by
    itself. If it does not, as with batch norm over edges, or if its gradients could not be told,
    all messages are made at once, and a warning says why.

    Args:
        message: Called as ``message(x_i, x_j, edge_attr)`` with the rows of some edges: ``x_i`` at
            their destinations, ``x_j`` at their sources. Returns a tensor [edges, ...].
        x: Node tensors [N, ...]; or a pair ``(source, destination)`` of [N_src, ...] and
            [N_dst, ...], either of which may be None. In place of a tensor there may be a dict or
            list of tensors, which ``message`` gets as such.
        edge_index: [2, E], int64: sources in the first row, destinations in the second, as in PyG.
        edge_attr: Edge tensors [E, ...], a dict or list of them, or None.
        reduce: How the messages to one destination are joined: ``"sum"``, ``"mean"``, ``"max"`` or
            ``"min"``; zeros where there are none. None joins nothing: the result has a row for each
            edge, in the order of ``edge_index``.
        dim_size: Number of destination nodes; by default the rows of ``x``, or of the destination
            of a pair. With fewer than ``x`` has rows, the first ones are destinations.
        blocks: Edges of a block, 1 to 2^40; ``"auto"`` chooses by the width of the tensors, and
            makes no blocks of 4,096 edges or fewer; False makes all messages at once.

    Returns:
        [N_dst, ...], or [E, ...] with ``reduce=None``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has the wrong shape, the number of destinations cannot be told, or
            ``message`` returns something else than a row for each edge.
        RuntimeError: In backward: a gradient of a gradient is to be differentiated, which only
            ``blocks=False`` supports.
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
        if num_destinations is not None:
            if not 0 <= dim_size <= num_destinations:
                raise ValueError(
                    f"Expected dim_size to be at most the {num_destinations} rows of x (got "
                    f"{dim_size})"
                )
            destination = _first_rows(destination, dim_size)
        num_destinations = dim_size
    if num_destinations is None:
        if reduce is not None:
            raise ValueError(
                "Expected the number of destination nodes (got no tensor of theirs); pass dim_size"
            )
        num_destinations = _beyond(edge_index[1])
    return Messages(
        message,
        source,
        destination,
        edge_attr,
        edge_index,
        reduce,
        _beyond(edge_index[0]) if num_sources is None else num_sources,
        num_destinations,
    ).run("auto" if blocks is None else blocks or None)


def _rows(name: str, value: Any) -> int | None:
    """The rows of all tensors in a nested value; None if there is no tensor."""
    found = {None if t.dim() == 0 else t.size(0) for t in tree_leaves(value) if _is_tensor(t)}
    if None in found or len(found) > 1:
        got = sorted(list(t.shape) for t in tree_leaves(value) if _is_tensor(t))
        raise ValueError(f"Expected tensors of {name} with the same number of rows (got {got})")
    return next(iter(found), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _first_rows(value: Any, count: int) -> Any:
    return tree_map(lambda t: t[:count] if isinstance(t, Tensor) else t, value)


def _beyond(nodes: Tensor) -> int:
    """One more than the largest number among these nodes."""
    return int(nodes.max()) + 1 if nodes.numel() else 0

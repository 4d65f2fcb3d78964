"""Passes over all edges of a graph: weighted sums by destination, and their gradients by source.

Weights are those of all edges, in the order of edge_index: a matrix [E, H].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gact_graph.layers.blocks.cuts import Block, Cuts
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, rows_at_a_time
from gact_graph.ops.weighted_sum import makes_messages, weighted_sum, weighted_sum_backward


def sums(out: Tensor, x: Tensor, weight: Tensor, order: Order, size: int) -> None:
    """Writes the weighted sums of all destination nodes.

    Args:
        out: [D, W].
        x: The rows at the sources [N, W].
        weight: [E, H].
        order: The order of the edges.
        size: Edges and nodes to take at a time, where messages are made of them.
    """
    for block in _parts(order.cuts, size, x.device):
        weighted_sum(
            out[block.nodes],
            x,
            order.sources[block.edges],
            weight,
            None if order.permutation is None else order.permutation[block.edges],
            order.starts[block.first_node : block.end_node + 1],
        )


def gradient_of_rows(
    of_x: Tensor, gradient: Tensor, weight: Tensor, order: Order, size: int
) -> None:
    """Writes the gradient of x [N, W], from that of the sums [D, W]."""
    by_source = order.by_source
    of_x[order.num_sources :] = 0
    for block in _parts(by_source.cuts, size, of_x.device):
        weighted_sum(
            of_x[block.nodes],
            gradient,
            by_source.destinations[block.edges],
            weight,
            by_source.positions[block.edges],
            by_source.cuts.starts[block.first_node : block.end_node + 1],
        )


def gradients(
    of_x: Tensor,
    of_weight: Tensor,
    gradient: Tensor,
    x: Tensor | Rows,
    weight: Tensor,
    order: Order,
    size: int,
) -> None:
    """Writes the gradients of x [N, W] and of the weights [E, H], from that of the sums [D, W].

    Args:
        x: [N, ...], which may be coded: each row is decoded once.
    """
    by_source = order.by_source
    of_x[order.num_sources :] = 0
    for block in _parts(by_source.cuts, size, of_x.device, rows_at_a_time(x)):
        rows = x[block.nodes] if isinstance(x, Tensor) else x.rows(block.nodes)
        weighted_sum_backward(
            of_x[block.nodes],
            of_weight,
            gradient,
            rows.flatten(1),
            by_source.destinations[block.edges],
            weight,
            by_source.positions[block.edges],
            by_source.cuts.starts[block.first_node : block.end_node + 1],
        )


def _parts(
    cuts: Cuts, size: int, device: torch.device, nodes: int | None = None
) -> Sequence[Block]:
    """What the operators get at a time: all edges, if they make no messages.

    Args:
        nodes: The most nodes, if that counts.
    """
    if makes_messages(device):
        return cuts.blocks(size)
    return cuts.blocks_of_nodes(len(cuts.starts) - 1 if nodes is None else nodes)

"""Weighted sums of source rows and their gradients, computed without messages.

The sum at destination :math:`i` is :math:`\\sum_{e \\to i} w_e x_{j(e)}`, with a weight for each
edge and head.

Shapes:
    - ``x``: the tensor of source nodes [N, ...];
    - ``out``: the sums at the destinations [D, ...];
    - ``weight``: [E, ..., 1] or [E, heads], in the order of edge_index unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.graph import EdgeGraph
from gact_graph.layers.blocks.order import Block, Order, SortedEdges
from gact_graph.layers.blocks.rows import CodedRows, rows_at_a_time, rows_of
from gact_graph.ops import weighted_sum as ops
from gact_graph.support.current import Product
from gact_graph.support.part import piece

_SUMMED_BYTES = 2 << 20
"""Bytes of sums that are multiplied at a time, so that they stay in the cache."""


@dataclass(frozen=True)
class WeightedSum:
    """The weighted sum that is a layer's result.

    Attributes:
        index: Index of the tensor x of source nodes in ``Arguments.tensors``.
        weights: The graph of the weights [E, ..., 1] and of the tensors that the layer keeps.
        of_edges: Whether the weights depend on tensors of edges alone, so that all are computed at
            once.
    """

    index: int
    weights: EdgeGraph
    of_edges: bool

    def sums_products(self, arguments: Arguments, never_read: Collection[int]) -> bool:
        """Return whether rows can be summed before they are multiplied by a weight matrix.

        Args:
            arguments: The arguments of the call.
            never_read: The indices of the arguments whose values backward does not read.
        """
        x = arguments.tensors[self.index]
        alone = len(arguments.levels_of(self.index)) == 1 and self.index in never_read
        return self.of_edges and alone and x.dim() == 2 and not ops.makes_messages(x.device)


def can_sum(x: Tensor) -> bool:
    """Return whether the operator can read the rows of a node tensor."""
    return x.dtype in (torch.float32, torch.float64) and x.is_contiguous()


def sum_block(out: Tensor, x: Tensor, weight: Tensor, sources: Tensor, starts: Tensor) -> None:
    """Write the sums of a block.

    Args:
        out: The sums of its destinations.
        x: The tensor of source nodes.
        weight: The weights of its edges, sorted by destination.
        sources: The source of each of its edges.
        starts: The first edge of each destination, as of :meth:`SortedEdges.starts_of`.
    """
    ops.weighted_sum(out.flatten(1), _matrix(x), sources, _matrix(weight), None, starts)


def weight_gradient(
    gradient: Tensor, x: Tensor | CodedRows, weight: Tensor, sources: Tensor, starts: Tensor
) -> Tensor:
    """Return the gradient of the weights in :func:`sum_block`, from that of the sums."""
    rows, index = (x, sources) if isinstance(x, Tensor) else (x.rows(sources), None)
    heads = weight.flatten(1).size(1)
    of_weight = ops.weighted_sum_weights(_matrix(gradient), _matrix(rows), index, starts, heads)
    return of_weight.view(weight.shape)


def sum_edges(out: Tensor, x: Tensor, weight: Tensor, edges: SortedEdges, size: int) -> None:
    """Write the sums of all nodes by which edges are sorted; zeros for further nodes.

    With edges sorted by source and the gradient of the sums in place of ``x``, these are the
    gradient of ``x``.

    Args:
        out: The sums.
        x: The tensor of the neighbors.
        weight: The weights.
        edges: The edges.
        size: Edges and nodes to process at a time, where the operator makes messages.
    """
    out, x, weight = out.flatten(1), _matrix(x), _matrix(weight)
    out[edges.num_nodes :] = 0
    for block in _parts(edges, size, x.device):
        ops.weighted_sum(out[block.nodes], x, *_block_operands(edges, weight, block))


def sum_products(out: Tensor, product: Product, weight: Tensor, edges: SortedEdges) -> None:
    """Write the sums of the rows of a product, from sums of the rows before the product.

    Args:
        out: The sums [D, W].
        product: The product, whose rows [N, F] are summed.
        weight: The weights [E, 1].
        edges: The edges.
    """
    for nodes, sums in sums_by_part(product.x, weight, edges):
        Product(sums, product.weight).write(out[nodes])


def sums_by_part(x: Tensor, weight: Tensor, edges: SortedEdges) -> Iterator[tuple[slice, Tensor]]:
    """Yield some nodes after another, and their sums [R, F], in memory that the next ones take.

    Args:
        x: The rows [N, F].
        weight: The weights [E, 1].
        edges: The edges.
    """
    x, weight = _matrix(x), _matrix(weight)
    rows = max(1, piece(_SUMMED_BYTES, x.device) // max(1, x.size(1) * x.element_size()))
    sums = x.new_empty(min(rows, edges.num_nodes), x.size(1))
    for block in edges.blocks_of_nodes(rows):
        part = sums[: block.num_nodes]
        ops.weighted_sum(part, x, *_block_operands(edges, weight, block))
        yield block.nodes, part


def sum_gradients(
    gradient: Tensor, x: Tensor | CodedRows, weight: Tensor, order: Order, size: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and of the weights in one pass.

    Args:
        gradient: The gradient of the sums.
        x: The tensor of source nodes, of which each row is decoded once.
        weight: The weights.
        order: The order of the edges.
        size: Edges and nodes to process at a time, where the operator makes messages.
    """
    edges, gradient, matrix = order.by_source, _matrix(gradient), _matrix(weight)
    x = x.contiguous() if isinstance(x, Tensor) else x
    of_x, of_weight = gradient.new_empty(x.shape), torch.empty_like(matrix)
    of_rows = of_x.flatten(1)
    of_rows[edges.num_nodes :] = 0
    for block in _parts(edges, size, x.device, rows_at_a_time(x)):
        ops.weighted_sum_backward(
            of_rows[block.nodes],
            of_weight,
            gradient,
            rows_of(x, block.nodes).flatten(1),
            *_block_operands(edges, matrix, block),
        )
    return of_x, of_weight.view(weight.shape)


def _block_operands(edges: SortedEdges, weight: Tensor, block: Block) -> Sequence[Any]:
    permutation = None if edges.permutation is None else edges.permutation[block.edges]
    return edges.neighbors[block.edges], weight, permutation, edges.starts_of(block)


def _parts(
    edges: SortedEdges, size: int, device: torch.device, nodes: int | None = None
) -> Sequence[Block]:
    """Return the blocks to process at a time: all nodes, or ``nodes``, without messages."""
    if ops.makes_messages(device):
        return edges.blocks(size)
    return edges.blocks_of_nodes(edges.num_nodes if nodes is None else nodes)


def _matrix(tensor: Tensor) -> Tensor:
    """Return a tensor [N, ...] as a contiguous matrix [N, W]."""
    return tensor.detach().contiguous().flatten(1)

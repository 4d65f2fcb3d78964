"""The tensors that a call in blocks gives, each filled block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import rows_of
from gact_graph.layers.blocks.sums.weighted_sum import BlockSum, GraphSum


@dataclass(frozen=True)
class Output:
    """One tensor that a call gives.

    Attributes:
        attribute: The attribute in which the layer leaves it, as some do with attention; None for
            the call's result.
        of_edges: Whether it has a row for each edge, in the order of edge_index; else it has a row
            for each destination node.
    """

    attribute: str | None
    of_edges: bool

    def room(self, order: Order, part: Tensor | BlockSum | GraphSum, shape_only: bool) -> Tensor:
        """The whole tensor, to be filled with parts like this one; or zeros in no memory."""
        length = order.num_edges if self.of_edges else order.num_destinations
        shape = length, *part.shape[1:]
        if shape_only:
            return torch.zeros((), dtype=part.dtype, device=part.device).expand(shape)
        return torch.empty(shape, dtype=part.dtype, device=part.device)

    def write(self, whole: Tensor, order: Order, block: Block, part: Tensor | BlockSum) -> None:
        """Writes the part of a block into the whole tensor."""
        if isinstance(part, BlockSum):
            part.write(whole[block.nodes])
            return
        if not self.of_edges:
            whole[block.nodes] = part
            return
        positions = order.positions(block)
        if isinstance(positions, slice):
            whole[positions] = part
        else:
            whole.index_copy_(0, positions.long(), part)

    def read(self, whole: Tensor, order: Order, block: Block) -> Tensor:
        """The part of a block, out of the whole tensor."""
        return rows_of(whole, order.positions(block)) if self.of_edges else whole[block.nodes]

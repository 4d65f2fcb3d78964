"""A call of ``propagate`` or ``edge_updater`` in blocks, and its forward.

No tensor with a row for each edge and the width of a message exists for more than one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.analysis import LayerAnalysis
from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, Input
from gact_graph.layers.blocks.order import Block, Order
from gact_graph.layers.blocks.rows import write_rows
from gact_graph.layers.blocks.weighted_sum import (
    WeightedSum,
    sum_block,
    sum_edges,
    sum_products,
)
from gact_graph.support.current import Product
from gact_graph.support.run_state import RunState, without_autocast


@dataclass(frozen=True)
class Output:
    """An output of a call.

    Attributes:
        attribute: The attribute in which the layer leaves the tensor; None for the result.
        of_edges: Whether the tensor has a row for each edge, in the order of edge_index, or for
            each destination node.
    """

    attribute: str | None
    of_edges: bool

    def rows(self, order: Order, block: Block) -> Tensor | slice:
        """Return the index of the rows that a block computes."""
        return order.positions(block) if self.of_edges else block.nodes


@dataclass(frozen=True)
class BlockedCall:
    """A call, without its tensors, which autograd saves.

    Attributes:
        analysis: The graphs of the layer.
        arguments: The arguments without their tensors.
        order: The order of the edges.
        blocks: All blocks of that order.
        size: The largest number of edges and nodes of a block.
        outputs: The result, then the tensors that the layer leaves in attributes.
        run_state: Random states and autocast at the start of the call.
    """

    analysis: LayerAnalysis
    arguments: Arguments
    order: Order
    blocks: list[Block]
    size: int
    outputs: tuple[Output, ...]
    run_state: RunState

    @torch.no_grad()
    def forward(
        self,
        tensors: Sequence[Tensor],
        shape_only: bool = False,
        product: Product | None = None,
    ) -> list[Tensor]:
        """Return the tensors of :attr:`outputs`, without an autograd graph.

        Args:
            tensors: The tensors of the arguments and the constants.
            shape_only: Whether zeros of the right shapes suffice.
            product: The product whose rows the call sums, where the tensor has no memory.

        Raises:
            CannotBlock: The layer raises an error.
        """
        attention, weighted_sum = self.analysis.attention, self.analysis.weighted_sum
        if attention is not None and not shape_only:
            return attention.outputs([tensors[i] for i in attention.inputs], self.order)
        with without_autocast(self.order.neighbors.device):
            if weighted_sum is not None and not shape_only:
                return self._sum(weighted_sum, tensors, product)
            graph, results = self.analysis.forward, list[Tensor]()
            inputs = [*map(Input, tensors)]
            for block in self.blocks[:1] if shape_only else self.blocks:
                with _errors_as_reasons():
                    values, _ = self.arguments.inputs(inputs, graph.inputs, self.order, block)
                    parts = graph(values)
                self._write(results, self.outputs, block, parts, shape_only)
            return results

    @torch.no_grad()
    def weights(self, weighted_sum: WeightedSum, tensors: Sequence[Tensor]) -> Tensor:
        """Return the weights of all edges [E, ..., 1], in the order of edge_index.

        Raises:
            CannotBlock: The layer raises an error.
        """
        order, graph, inputs = self.order, weighted_sum.weights, [*map(Input, tensors)]
        weights: Tensor | None = None
        with without_autocast(order.neighbors.device), _errors_as_reasons():
            for block in [None] if weighted_sum.of_edges else self.blocks:
                values, _ = self.arguments.inputs(inputs, graph.inputs, order, block)
                weight: Tensor = graph(values)[0]
                if block is None:
                    return weight
                if weights is None:
                    weights = weight.new_empty(order.num_edges, *weight.shape[1:])
                write_rows(weights, order.positions(block), weight)
        assert weights is not None  # calls without edges run as in PyG
        return weights

    def again(self, tensors: Sequence[Tensor], product: Product | None) -> Tensor:
        """Return the result of :meth:`forward` again."""
        with self.run_state.restored():
            return self.forward(tensors, product=product)[0]

    def _sum(
        self, weighted_sum: WeightedSum, tensors: Sequence[Tensor], product: Product | None
    ) -> list[Tensor]:
        order, graph, x = self.order, weighted_sum.weights, tensors[weighted_sum.index]
        result, kept = x.new_empty(order.num_nodes, *x.shape[1:]), list[Tensor]()
        inputs = [*map(Input, tensors)]
        if weighted_sum.of_edges:
            weight = self.weights(weighted_sum, tensors)
            if product is None:
                sum_edges(result, x, weight, order, self.size)
            else:
                sum_products(result, product, weight, order)
            return [result]
        for block in self.blocks:
            with _errors_as_reasons():
                values, _ = self.arguments.inputs(inputs, graph.inputs, order, block)
                weight, *parts = graph(values)
            sources, starts = values["edge_index_j"], order.starts_of(block)
            sum_block(result[block.nodes], x, weight, sources, starts)
            self._write(kept, self.outputs[1:], block, parts)
        return [result, *kept]

    def _write(
        self,
        results: list[Tensor],
        outputs: Sequence[Output],
        block: Block,
        parts: Sequence[Tensor],
        shape_only: bool = False,
    ) -> None:
        """Write the parts of a block into the results, allocated for the first block."""
        for number, (output, part) in enumerate(zip(outputs, parts, strict=True)):
            if number == len(results):
                rows = self.order.num_edges if output.of_edges else self.order.num_nodes
                shape = rows, *part.shape[1:]
                zeros = part.new_zeros(()).expand(shape)  # in no memory
                results.append(zeros if shape_only else part.new_empty(shape))
            if not shape_only:
                write_rows(results[number], output.rows(self.order, block), part)


@contextmanager
def _errors_as_reasons() -> Iterator[None]:
    """Turn an error of the layer in a block into a reason to run as in PyG."""
    try:
        yield
    except (CannotBlock, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # If the caller's arguments are wrong, PyG's own propagate raises the error again.
        raise CannotBlock(f"fails on a block ({type(error).__name__}: {error})") from error

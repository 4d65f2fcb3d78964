"""One call of ``propagate`` or ``edge_updater`` in blocks, and its forward.

No tensor with a row for each edge and the width of a message exists for more than one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.analysis import LayerAnalysis
from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, Use
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.outputs import Output
from gact_graph.layers.blocks.rows import Rows
from gact_graph.layers.blocks.sums.weighted_sum import BlockSum, GraphSum
from gact_graph.support.run_state import RunState, without_autocast


class BlockFailed(CannotBlock):
    """A block raised an error, which may be the fault of this call alone."""


@dataclass(frozen=True)
class BlockedCall:
    """One call, without its tensors, which autograd saves.

    Attributes:
        analysis: The graphs of the layer.
        arguments: The arguments without their tensors.
        order: The order of the edges.
        blocks: All blocks of that order.
        size: The most edges and nodes of a block.
        outputs: The result, then the tensors that the layer leaves in attributes.
        run_state: Random states and autocast when the call began.
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
        self, tensors: Sequence[Tensor], constants: Sequence[Tensor], shape_only: bool = False
    ) -> list[Tensor]:
        """The tensors of :attr:`outputs`, without a graph; or zeros of their shapes.

        Args:
            tensors: Those of the arguments.
            constants: The tensors that the layer reads beside them.
            shape_only: Whether zeros are enough.

        Raises:
            CannotBlock: The layer raises an error.
        """
        attention = self.analysis.attention
        if attention is not None and not shape_only:
            return attention.outputs(tensors, constants, self.order)
        constants = [constant.detach() for constant in constants]
        with without_autocast(self.order.sources.device):
            return self._run(tensors, constants, shape_only)

    def _run(
        self, tensors: Sequence[Tensor], constants: Sequence[Tensor], shape_only: bool
    ) -> list[Tensor]:
        weighted_sum = self.analysis.weighted_sum
        if weighted_sum is not None and weighted_sum.of_edges and not shape_only:
            with _failures():
                graph_sum, _ = self.graph_sum(tensors, constants)
            result = self.outputs[0].room(self.order, graph_sum, shape_only)
            graph_sum.write(result)
            return [result]
        results: list[Tensor] = []
        for block in self.blocks[:1] if shape_only else self.blocks:
            with _failures():
                parts = self._parts(tensors, constants, block, shape_only)
            if not results:
                results = [
                    output.room(self.order, part, shape_only)
                    for output, part in zip(self.outputs, parts, strict=True)
                ]
            if not shape_only:
                for output, whole, part in zip(self.outputs, results, parts, strict=True):
                    output.write(whole, self.order, block, part)
        return results

    def _parts(
        self,
        tensors: Sequence[Tensor],
        constants: Sequence[Tensor],
        block: Block,
        shape_only: bool,
    ) -> Sequence[Tensor | BlockSum]:
        """The parts of the outputs that a block gives."""
        if self.analysis.weighted_sum is not None and not shape_only:
            block_sum, kept, _ = self.block_sum(tensors, constants, block)
            return [block_sum, *kept]
        graph = self.analysis.forward
        given, _ = self.arguments.part(tensors, self.order, block, graph.inputs)
        return graph(given, constants)

    def graph_sum(
        self,
        tensors: Sequence[Tensor | Rows],
        constants: Sequence[Tensor],
        requires_grad: Sequence[bool] = (),
    ) -> tuple[GraphSum, list[tuple[Use, Tensor]]]:
        """The weighted sums of the whole graph, and the leaves that the weights are made of.

        For a layer whose weights are made of tensors of edges alone.
        """
        weighted_sum = self.analysis.weighted_sum
        assert weighted_sum is not None
        graph = weighted_sum.weights
        given, leaves = self.arguments.all_edges(tensors, requires_grad, graph.inputs, self.order)
        (weight,) = graph(given, constants)
        return GraphSum(tensors[weighted_sum.index], self.order, weight, self.size), leaves

    def block_sum(
        self,
        tensors: Sequence[Tensor | Rows],
        constants: Sequence[Tensor],
        block: Block,
        requires_grad: Sequence[bool] = (),
    ) -> tuple[BlockSum, list[Tensor], list[tuple[Use, Tensor]]]:
        """The weighted sums of a block, the tensors that the layer keeps, and their leaves."""
        weighted_sum = self.analysis.weighted_sum
        assert weighted_sum is not None
        graph = weighted_sum.weights
        given, leaves = self.arguments.part(tensors, self.order, block, graph.inputs, requires_grad)
        weight, *kept = graph(given, constants)
        starts = self.order.starts[block.first_node : block.end_node + 1]
        sources = self.order.sources[block.edges].long()
        return BlockSum(tensors[weighted_sum.index], sources, weight, starts), kept, leaves


@contextmanager
def _failures() -> Iterator[None]:
    """Within: an error of the layer on a block is a reason to run as PyG has it."""
    try:
        yield
    except (CannotBlock, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # If the caller's arguments are wrong, PyG's own propagate raises the error again.
        raise BlockFailed(f"fails on a block ({type(error).__name__}: {error})") from error

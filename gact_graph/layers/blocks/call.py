"""One call of ``propagate`` or ``edge_updater`` in blocks, and its forward.

No tensor with a row for each edge and the width of a message exists for more than one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Arguments, BlockFailed, CannotBlock, Use
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.outputs import Output
from gact_graph.layers.blocks.rows import Rows
from gact_graph.layers.blocks.steps import Recorder, Steps
from gact_graph.layers.blocks.sums.weighted_sum import (
    BlockSum,
    GraphSum,
    WeightedSum,
    is_one_of,
    placeholder,
)
from gact_graph.support.replica import Snapshot
from gact_graph.support.run_state import RunState


class OtherSteps(CannotBlock):
    """A layer does something else on a block than when it was tried out."""


@dataclass(frozen=True)
class BlockedCall:
    """One call, without its tensors, which autograd saves.

    It runs on replicas of the layer as it was when the call began. So the user's layer never sees
    what the layer sets while it makes the messages of a block, except for the tensors that it
    leaves in attributes.

    Attributes:
        snapshot: The layer.
        edge_function: What runs for each block.
        arguments: The arguments without their tensors.
        order: The order of the edges.
        blocks: All blocks of that order.
        size: The most edges and nodes of a block.
        outputs: The result, then the tensors that the layer leaves in attributes.
        steps: The operations that the layer runs on any block.
        never_read: Indices of the tensors whose values backward does not read.
        weighted_sum: The sum that is the result, if it is one.
        attention: The attention that gives the outputs, if it is one.
        run_state: Random states and autocast when the call began.
    """

    snapshot: Snapshot
    edge_function: EdgeFunction
    arguments: Arguments
    order: Order
    blocks: list[Block]
    size: int
    outputs: tuple[Output, ...]
    steps: Steps
    never_read: frozenset[int]
    weighted_sum: WeightedSum | None
    attention: Attention | None
    run_state: RunState

    @torch.no_grad()
    def forward(self, tensors: Sequence[Tensor], shape_only: bool = False) -> list[Tensor]:
        """The tensors of :attr:`outputs`, without a graph; or zeros of their shapes.

        Raises:
            CannotBlock: The layer changes another of its attributes with every block, does
                something else than when it was tried out, or raises an error.
        """
        if self.attention is not None and not shape_only:
            return self.attention.outputs(tensors, self.snapshot.learning, self.order)
        results: list[Tensor] = []
        with self.snapshot.replica(watch=True) as replica:
            graph_sum = None if shape_only else self._graph_sum(replica.module, tensors)
            if graph_sum is not None:
                results = [self.outputs[0].room(self.order, graph_sum, shape_only)]
                graph_sum.write(results[0])
                blocks = []
            else:
                blocks = self.blocks[:1] if shape_only else self.blocks
            for block in blocks:
                parts = self._parts(replica.module, tensors, block, shape_only)
                if not results:
                    results = [
                        output.room(self.order, part, shape_only)
                        for output, part in zip(self.outputs, parts, strict=True)
                    ]
                if not shape_only:
                    for output, whole, part in zip(self.outputs, results, parts, strict=True):
                        output.write(whole, self.order, block, part)
            changed = replica.changes().keys() - {output.attribute for output in self.outputs}
            elsewhere = replica.undo()
        if changed:
            raise CannotBlock(f"changes its attribute {min(changed)} while it makes messages")
        if elsewhere is not None:
            raise CannotBlock(f"changes {elsewhere} while it makes messages")
        return results

    def _graph_sum(self, module: Any, tensors: Sequence[Tensor]) -> GraphSum | None:
        with _failures():
            found = self.graph_sum_of(module, tensors)
        return None if found is None else found[0]

    def _parts(
        self, module: Any, tensors: Sequence[Tensor], block: Block, shape_only: bool
    ) -> list[Tensor | BlockSum]:
        """What one block gives of each output."""
        with _failures():
            found = None if shape_only else self.sum_of(module, tensors, block)
            out: Tensor | BlockSum
            if found is not None:
                out, _ = found
            else:
                given, _ = self.arguments.part(tensors, self.order, block)
                with Recorder() as recorder:
                    out = self.edge_function(module, given)
                if recorder.steps != self.steps:
                    raise OtherSteps("runs other operations than when it was tried out")
        return [out, *(output.left_in(module) for output in self.outputs[1:])]

    def graph_sum_of(
        self, module: Any, tensors: Sequence[Tensor | Rows], learns: Sequence[bool] = ()
    ) -> tuple[GraphSum, list[tuple[Use, Tensor]]] | None:
        """The weighted sums of the whole graph, and the leaves that the weights are made of.

        None if the layer is not given its weights, or if the result is something else now.
        """
        if self.weighted_sum is None or not self.weighted_sum.takes_weights:
            return None
        x, parameter = tensors[self.weighted_sum.index], self.weighted_sum.parameter
        given, leaves = self.arguments.all_edges(tensors, learns, parameter)
        of_edges = [given[use.parameter] for use in self.arguments.uses if use.level == "edge"]
        given[parameter] = placeholder(x, self.order.num_edges)
        weight = self.weighted_sum.weights(module, given)
        if weight is None or not is_one_of(weight, of_edges):
            return None
        return GraphSum(x, self.order, weight, self.size), leaves

    def sum_of(
        self,
        module: Any,
        tensors: Sequence[Tensor | Rows],
        block: Block,
        learns: Sequence[bool] = (),
    ) -> tuple[BlockSum, list[tuple[Use, Tensor]]] | None:
        """The weighted sums of a block, and the leaves that the weights are made of.

        None if the result is something else, or is now.
        """
        if self.weighted_sum is None:
            return None
        x, parameter = tensors[self.weighted_sum.index], self.weighted_sum.parameter
        given, leaves = self.arguments.part(tensors, self.order, block, learns, parameter)
        given[parameter] = placeholder(x, block.num_edges)
        weight = self.weighted_sum.weights(module, given)
        if weight is None:
            return None
        starts = self.order.starts[block.first_node : block.end_node + 1]
        return BlockSum(x, given["edge_index_j"], weight, starts), leaves


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

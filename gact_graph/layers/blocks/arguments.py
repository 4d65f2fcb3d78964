"""The arguments of ``propagate`` or ``edge_updater``, and what a block gets of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, rows_of

Level = Literal["source", "destination", "node", "edge", "whole"]


class CannotBlock(Exception):
    """A layer must run as PyG has it. The message says why, after "it", as in the report."""


@dataclass(frozen=True)
class Use:
    """A parameter of the layer's functions that gets a tensor.

    Attributes:
        parameter: Its name in the functions' signatures.
        level: What of the tensor it gets for a block:

            - ``source``: the rows at the sources of the block's edges (``x_j``);
            - ``destination``: the rows at the destinations of the block's edges (``x_i``);
            - ``node``: the rows of the block's destination nodes, each once (in ``update``);
            - ``edge``: the rows of the block's edges;
            - ``whole``: the tensor as it is.
        index: Index of the tensor in :attr:`Arguments.tensors`.
    """

    parameter: str
    level: Level
    index: int


@dataclass(frozen=True)
class Arguments:
    """All that ``propagate`` or ``edge_updater`` was given.

    Attributes:
        tensors: The tensors among the arguments, each once.
        names: Their names, for the report.
        uses: The parameters that get a tensor.
        others: The other parameters, with their values.
        num_destinations: Number of destination nodes.
        num_sources: Number of source nodes.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    uses: tuple[Use, ...]
    others: Mapping[str, Any]
    num_destinations: int
    num_sources: int

    def without_tensors(self) -> Arguments:
        """The same for what autograd holds: tensors go past the hooks on what it saves."""
        return replace(self, tensors=())

    def levels_of(self, index: int) -> set[Level]:
        """All uses of one tensor."""
        return {use.level for use in self.uses if use.index == index}

    def all_edges(
        self,
        tensors: Sequence[Tensor | Rows],
        requires_grad: Sequence[bool],
        names: Collection[str],
        order: Order,
    ) -> tuple[dict[str, Any], list[tuple[Use, Tensor]]]:
        """The inputs of a graph that needs tensors of edges alone, for all edges in their order.

        Args:
            tensors: In place of :attr:`tensors`.
            requires_grad: For each tensor whether a gradient is needed; none by default.
            names: The inputs of the graph.
            order: The order of the edges.

        Returns:
            The inputs by name, and the leaves whose gradient is needed.
        """
        given: dict[str, Any] = {}
        leaves: list[tuple[Use, Tensor]] = []
        for use in self.uses:
            if use.parameter not in names:
                continue
            tensor = tensors[use.index]
            assert isinstance(tensor, Tensor)  # only node tensors stay coded
            given[use.parameter] = _leaf(use, tensor, requires_grad, leaves)
        if "index" in names:  # for the number of edges
            zero = torch.zeros((), dtype=torch.int64, device=order.sources.device)
            given["index"] = zero.expand(order.num_edges)
        return given, leaves

    def part(
        self,
        tensors: Sequence[Tensor | Rows],
        order: Order,
        block: Block,
        names: Collection[str],
        requires_grad: Sequence[bool] = (),
    ) -> tuple[dict[str, Any], list[tuple[Use, Tensor]]]:
        """The inputs of a graph for one block.

        Args:
            tensors: In place of :attr:`tensors`.
            order: The order of the edges.
            block: The block.
            names: The inputs of the graph.
            requires_grad: For each tensor whether a gradient is needed; none by default.

        Returns:
            The inputs by name, and the leaves whose gradient is needed.
        """
        destinations = order.destinations(block)
        sources = order.sources[block.edges].long()
        given: dict[str, Any] = {
            "index": destinations,
            "edge_index_j": sources,
            "dim_size": block.num_nodes,
            "size_j": self.num_sources,
        }
        leaves: list[tuple[Use, Tensor]] = []
        for use in self.uses:
            if use.parameter not in names:
                continue
            whole = tensors[use.index]
            if use.level == "source":
                tensor = rows_of(whole, sources)
            elif use.level in ("destination", "node"):
                # Rows that share memory (an expanded tensor) must be leaves of their own.
                tensor = rows_of(whole, block.nodes).contiguous()
            else:
                assert isinstance(whole, Tensor)  # only node tensors stay coded
                tensor = whole
                if use.level == "edge":
                    tensor = rows_of(whole, order.positions(block)).contiguous()
            tensor = _leaf(use, tensor, requires_grad, leaves)
            if use.level == "destination":
                tensor = rows_of(tensor, destinations)
            given[use.parameter] = tensor
        return given, leaves


def _leaf(
    use: Use, tensor: Tensor, requires_grad: Sequence[bool], leaves: list[tuple[Use, Tensor]]
) -> Tensor:
    tensor = tensor.detach()
    if requires_grad and requires_grad[use.index]:
        tensor = tensor.requires_grad_()
        leaves.append((use, tensor))
    return tensor

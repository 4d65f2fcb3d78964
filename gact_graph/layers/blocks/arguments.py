"""The arguments of ``propagate`` or ``edge_updater``, and what a block gets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, rows_of

Level = Literal["source", "destination", "node", "edge", "whole"]


class CannotBlock(Exception):
    """A layer must run as PyG has it. The message says why, after "it", as in the report."""


class BlockFailed(CannotBlock):
    """A block raised an error, which may be the fault of this call alone."""


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
        self, tensors: Sequence[Tensor | Rows], learns: Sequence[bool], without: str
    ) -> tuple[dict[str, Any], list[tuple[Use, Tensor]]]:
        """What a function that only gets tensors of edges gets for all of them, in their own order.

        Args:
            tensors: In place of :attr:`tensors`.
            learns: For each tensor whether a gradient is needed; none by default.
            without: A parameter that the caller fills in; it may have rows of nodes.

        Returns:
            The function's arguments by name, and the leaves whose gradient is needed.
        """
        found: dict[str, Any] = dict(self.others)
        leaves: list[tuple[Use, Tensor]] = []
        for use in self.uses:
            if use.parameter == without:
                continue
            given = tensors[use.index]
            assert isinstance(given, Tensor)  # only node tensors stay coded
            tensor = given.detach()
            if learns and learns[use.index]:
                tensor = tensor.requires_grad_()
                leaves.append((use, tensor))
            found[use.parameter] = tensor
        return found, leaves

    def part(
        self,
        tensors: Sequence[Tensor | Rows],
        order: Order,
        block: Block,
        learns: Sequence[bool] = (),
        without: str | None = None,
    ) -> tuple[dict[str, Any], list[tuple[Use, Tensor]]]:
        """What the layer's functions get for one block.

        Args:
            tensors: In place of :attr:`tensors`.
            order: The order of the edges.
            block: The block.
            learns: For each tensor whether a gradient is needed; none by default.
            without: A parameter that the caller fills in.

        Returns:
            The functions' arguments by name, and the leaves whose gradient is needed.
        """
        destinations = order.destinations(block)
        sources = order.sources[block.edges].long()
        found: dict[str, Any] = dict(self.others)
        leaves: list[tuple[Use, Tensor]] = []
        for use in self.uses:
            if use.parameter == without:
                continue
            given = tensors[use.index]
            if use.level == "source":
                tensor = rows_of(given, sources)
            elif use.level in ("destination", "node"):
                # Rows that share memory (an expanded tensor) must be leaves of their own.
                tensor = rows_of(given, block.nodes).contiguous()
            else:
                assert isinstance(given, Tensor)  # only node tensors stay coded
                tensor = given if use.level == "whole" else rows_of(given, order.positions(block))
            tensor = tensor.detach()
            if learns and learns[use.index]:
                tensor = tensor.requires_grad_()
                leaves.append((use, tensor))
            if use.level == "destination":
                tensor = rows_of(tensor, destinations)
            found[use.parameter] = tensor
        found |= {
            "index": destinations,
            "edge_index_i": destinations,
            "edge_index_j": sources,
            "ptr": None,
            "size_i": block.num_nodes,
            "size_j": self.num_sources,
            "dim_size": block.num_nodes,
        }
        return found, leaves

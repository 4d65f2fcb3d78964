"""The arguments of ``propagate`` or ``edge_updater``, and the inputs of a block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gact_graph.layers.blocks.inputs import Input, Leaf
from gact_graph.layers.blocks.order import Block, Order
from gact_graph.layers.blocks.rows import rows_of
from gact_graph.layers.recompute.structure import Structure, taken_apart

Level = Literal["source", "destination", "node", "edge", "whole"]


class CannotBlock(Exception):
    """A layer must run as in PyG. The message gives the reason, as in the report, without "it"."""


@dataclass(frozen=True)
class Use:
    """A use of a tensor in the layer's methods.

    Attributes:
        parameter: The parameter that gets the tensor; for a constant a name of its own.
        level: The part of the tensor that a block gets:

            - ``source``: the rows at the sources of the block's edges (``x_j``);
            - ``destination``: the rows at the destinations of the block's edges (``x_i``);
            - ``node``: the rows of the block's destination nodes, each once (in ``update``);
            - ``edge``: the rows of the block's edges;
            - ``whole``: the whole tensor.
        index: Index of the tensor in :attr:`Arguments.tensors`.
    """

    parameter: str
    level: Level
    index: int


def constant_name(number: int) -> str:
    """Return the name of the use of a constant, which is no name of a parameter."""
    return f"constant {number}"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call of ``propagate`` or ``edge_updater``, and the constants of the layer.

    A constant is a tensor that the layer reads beside the arguments, such as a parameter.

    Attributes:
        tensors: The tensors among the arguments, each once, then the constants.
        names: Their names, for the report.
        uses: The uses of these tensors.
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

    def with_constants(self, constants: Sequence[tuple[str, Tensor]]) -> Arguments:
        """Return the arguments with the constants of the layer, by path."""
        count = len(self.tensors)
        uses = (Use(constant_name(i), "whole", count + i) for i in range(len(constants)))
        return replace(
            self,
            tensors=(*self.tensors, *(tensor for _, tensor in constants)),
            names=(*self.names, *(name for name, _ in constants)),
            uses=(*self.uses, *uses),
        )

    @property
    def needs_graph(self) -> bool:
        """Whether the call has a gradient."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    def without_tensors(self) -> Arguments:
        """Return the arguments for an autograd node, which saves their tensors through hooks."""
        return replace(self, tensors=())

    @property
    def rows_of_nodes(self) -> frozenset[int]:
        """Indices of the tensors of which blocks read rows of nodes, and nothing else."""
        other = {use.index for use in self.uses if use.level in ("edge", "whole")}
        return frozenset(use.index for use in self.uses) - other

    def levels_of(self, index: int) -> set[Level]:
        """Return the levels of all uses of a tensor."""
        return {use.level for use in self.uses if use.index == index}

    def inputs(
        self, inputs: Sequence[Input], names: Collection[str], order: Order, block: Block | None
    ) -> tuple[dict[str, Any], list[Leaf]]:
        """Return the inputs of a graph for a block.

        Args:
            inputs: The tensors in place of :attr:`tensors`.
            names: The names of the inputs that the graph needs.
            order: The order of the edges.
            block: The block; None for all edges in the order of edge_index, which only a graph of
                tensors of edges takes.

        Returns:
            The inputs by name, and the leaves whose gradients are needed.
        """
        rows: dict[Level, Tensor | slice] = {}
        if block is None:
            zero = torch.zeros((), dtype=torch.int64, device=order.neighbors.device)
            values: dict[str, Any] = {"index": zero.expand(order.num_edges)}  # only its length
        else:
            sources, destinations = order.neighbors[block.edges].long(), order.destinations(block)
            rows = {"source": sources, "edge": order.positions(block)}
            rows |= {"destination": block.nodes, "node": block.nodes}
            values = {
                "index": destinations,
                "edge_index_j": sources,
                "dim_size": block.num_nodes,
                "size_j": self.num_sources,
            }
        leaves: list[Leaf] = []
        for use in self.uses:
            if use.parameter not in names:
                continue
            entry, index = inputs[use.index], rows.get(use.level)
            # Rows that share memory (of an expanded tensor) must be leaves of their own.
            part = entry.tensor if index is None else rows_of(entry.value, index).contiguous()
            part = part.detach()
            if entry.requires_grad:
                leaves.append(Leaf(part.requires_grad_(), entry, index))
            if use.level == "destination":
                part = rows_of(part, destinations)
            values[use.parameter] = part
        return values, leaves


class Collector:
    """Collects the arguments of one call.

    Attributes:
        others: Arguments that are no tensors, by parameter.
    """

    def __init__(self) -> None:
        self.others: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        self._names: list[str] = []
        self._uses: list[Use] = []

    def add(self, parameter: str, level: Level, tensor: Tensor, name: str) -> None:
        """Add a tensor.

        Args:
            parameter: The parameter of the edge function that gets the tensor.
            level: The part of the tensor that a block reads.
            tensor: The tensor.
            name: The name of the tensor in the report.

        Raises:
            CannotBlock: The tensor is of a kind that cannot be cut.
        """
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise CannotBlock(f"has a {type(tensor).__name__} in {name}")
        index = next((i for i, t in enumerate(self._tensors) if t is tensor), None)
        if index is None:
            index = len(self._tensors)
            self._tensors.append(tensor)
            self._names.append(name)
        self._uses.append(Use(parameter, level, index))

    def add_nested(
        self, parameter: str, level: Level, value: Any, name: str, rows: int | None = None
    ) -> None:
        """Add a tensor, None, or tuples, lists and dicts of tensors: :func:`nested` returns them.

        Args:
            parameter: A name for :func:`nested`.
            level: The part of each tensor that a block reads.
            value: The argument.
            name: The name of the argument in the report.
            rows: The number of rows that each tensor must have; None for any number.

        Raises:
            CannotBlock: A tensor has another number of rows, or is of a kind that cannot be cut.
        """
        tensors, structure = taken_apart(value)
        self.others[parameter] = structure
        self.others[f"{parameter} as text"] = str(structure.spec), structure.others
        for number, tensor in enumerate(tensors):
            inner = name if len(tensors) == 1 else f"{name}.{number}"
            if rows is not None and (tensor.dim() == 0 or tensor.size(0) != rows):
                raise CannotBlock(
                    f"has a tensor of shape {[*tensor.shape]} in {inner} where {rows} rows are "
                    "expected"
                )
            self.add(f"{parameter}.{number}", level, tensor, inner)

    def arguments(self, num_destinations: int, num_sources: int) -> Arguments:
        """Return the arguments.

        Raises:
            CannotBlock: There is no tensor.
        """
        if not self._uses:
            raise CannotBlock("gets no tensor")
        return Arguments(
            tuple(self._tensors),
            tuple(self._names),
            tuple(self._uses),
            self.others,
            num_destinations,
            num_sources,
        )


def nested(inputs: Mapping[str, Any], parameter: str) -> Any:
    """Return an argument of :meth:`Collector.add_nested`, for a block.

    Args:
        inputs: The inputs of the edge function.
        parameter: The name of the argument.
    """
    structure: Structure = inputs[parameter]
    return structure.filled([inputs[f"{parameter}.{i}"] for i in range(structure.num_tensors)])

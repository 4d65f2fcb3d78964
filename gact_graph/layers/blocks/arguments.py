"""The arguments of a call, the inputs of a block, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gact_graph.layers.blocks.order import Block, Order
from gact_graph.layers.blocks.rows import CodedRows, add_rows, rows_of

Level = Literal["source", "destination", "node", "edge", "whole"]


class CannotBlock(Exception):
    """A layer must run as in PyG. The message gives the reason, as in the report, without "it"."""


@dataclass(frozen=True)
class EdgeFunction:
    """A function that runs for the edges of a block, as PyG runs it for all edges.

    Attributes:
        name: The name of the operation in reports and in the slots of saved tensors.
        run: Takes the module and the inputs of the block by name, and returns a row for each edge
            or for each destination node.
        of_edges: Whether the result has a row for each edge.
        methods: The methods of the layer that the function calls.
    """

    name: str
    run: Callable[[Any, dict[str, Any]], Tensor]
    of_edges: bool
    methods: frozenset[str] = frozenset()


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


@dataclass
class Input:
    """An input of the call: a tensor among the arguments, or a constant of the layer.

    Attributes:
        value: The saved tensor, which may be quantized.
        requires_grad: Whether its gradient is needed.
        of_gradient: In a backward of backward, the incoming gradient of the input's gradient.
    """

    value: Tensor | CodedRows
    requires_grad: bool = False
    of_gradient: Tensor | None = None
    _total: Tensor | None = field(default=None, init=False)
    _owned: bool = field(default=False, init=False)  # whether no other tensor shares its memory

    @property
    def gradient(self) -> Tensor | None:
        """The gradient, in the type of the value; None until a block has one."""
        return None if self._total is None else self._total.to(self.value.dtype)

    @property
    def tensor(self) -> Tensor:
        """The value of an input that is never quantized."""
        assert isinstance(self.value, Tensor)
        return self.value

    def add(self, gradient: Tensor | None, rows: Tensor | slice | None = None) -> None:
        """Add a gradient of the whole input, or of the rows at an index, if it is needed."""
        if gradient is None or not self.requires_grad:
            return
        if self._total is None and rows is None:
            self._total = gradient
            return
        if self._total is None or not self._owned:
            # Not in place: autograd may return one tensor as the gradient of several inputs.
            value, total, dtype = self.value, self._total, self.value.dtype
            if rows is None:  # the gradient of all edges is a sum in float32, as that of a matmul
                dtype = torch.promote_types(dtype, torch.float32)
            self._total = torch.zeros(value.shape, dtype=dtype, device=value.device)
            if total is not None:
                self._total += total
            self._owned = True
        if rows is None:
            self._total += gradient
        else:
            add_rows(self._total, rows, gradient.to(self._total.dtype))


@dataclass(frozen=True)
class Leaf:
    """A leaf of the graph of a block.

    Attributes:
        tensor: The leaf: an input, or some of its rows.
        input: The input, which adds up the gradients of its leaves.
        rows: Index of these rows; None for the whole input.
    """

    tensor: Tensor
    input: Input
    rows: Tensor | slice | None = None

    @property
    def of_gradient(self) -> Tensor | None:
        """In a backward of backward, the incoming gradient of the leaf's gradient."""
        of_gradient = self.input.of_gradient
        if of_gradient is None or self.rows is None:
            return of_gradient
        return rows_of(of_gradient, self.rows)


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
    def whole(self) -> set[int]:
        """The indices of the tensors of which a block gets all."""
        return {use.index for use in self.uses if use.level == "whole"}

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

    def row_bytes(self, summed: int | None) -> float:
        """Return the bytes of the widest row of an edge.

        Args:
            summed: Index of a tensor whose rows an operator sums, so that no edge has a row; None
                for no such tensor.
        """
        by_edge = {use.index for use in self.uses if use.level not in ("node", "whole")}
        if summed is not None and by_edge == {summed} and self.levels_of(summed) == {"source"}:
            return 1.0  # an edge has nothing else
        tensors = [self.tensors[index] for index in by_edge] or self.tensors
        return max(t.nbytes / max(1, len(t) if t.dim() else 1) for t in tensors)

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
            values: dict[str, Any] = {"num_edges": order.num_edges}
        else:
            sources, destinations = order.neighbors[block.edges].long(), order.destinations(block)
            rows = {"source": sources, "edge": order.positions(block)}
            rows |= {"destination": block.nodes, "node": block.nodes}
            values = {
                "num_edges": block.num_edges,
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

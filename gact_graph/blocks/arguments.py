"""What a message passing layer hands to ``propagate``, sorted by how a block takes its part of it.

PyG's rule: in the signature of ``message``, ``x_j`` is the argument ``x`` of ``propagate`` at the
sources of the arcs and ``x_i`` the same at their destinations; what has no such ending is handed
through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gact_graph.blocks.order import Block, Order
from gact_graph.storage import tensors_in

_WHOLE_GRAPH = frozenset({"edge_index", "adj_t", "size"})
"""Special arguments that show a layer all arcs at once."""


class CannotBlock(Exception):
    """A layer must run as PyG has it; the message says why."""


class BlockFailed(CannotBlock):
    """A block raised an error, which may be the fault of this call alone."""


@dataclass(frozen=True)
class Use:
    """One parameter of a layer's functions that a tensor is for.

    Attributes:
        parameter: As the functions name it.
        level: ``source`` and ``target`` are lifted from nodes; ``row`` are the destination nodes
            as they are; ``edge`` has a row for each arc; ``whole`` is handed over as it is.
        place: Of the tensor in :attr:`Arguments.tensors`.
    """

    parameter: str
    level: str
    place: int


class Rows(Protocol):
    """What may stand for a tensor of nodes [N, ...], where some of its rows at a time are read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def rows(self, places: Tensor | slice) -> Tensor: ...


@dataclass(frozen=True)
class Arguments:
    """All that ``propagate`` or ``edge_updater`` was given."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    uses: tuple[Use, ...]
    others: Mapping[str, Any]
    rows: int
    columns: int
    """Number of source nodes."""

    def part(
        self,
        tensors: Sequence[Tensor | Rows],
        order: Order,
        block: Block,
        learn: Sequence[bool] = (),
        without: str | None = None,
    ) -> tuple[dict[str, Any], list[tuple[Use, Tensor]]]:
        """What the layer's functions get for one block.

        Args:
            tensors: In place of :attr:`tensors`.
            order: Of the arcs.
            block: Which of them.
            learn: For each tensor whether a gradient is needed; none by default.
            without: A parameter that the caller fills in.

        Returns:
            The functions' arguments by name, and the leaves whose gradient is needed.
        """
        local = order.local(block)
        sources = order.sources[block.arc : block.arc_end].long()
        found: dict[str, Any] = dict(self.others)
        leaves: list[tuple[Use, Tensor]] = []
        for use in self.uses:
            if use.parameter == without:
                continue
            given = tensors[use.place]
            if use.level == "source":
                tensor = rows_of(given, sources)
            elif use.level in ("target", "row"):
                # Rows that are one in memory must be leaves of their own.
                tensor = rows_of(given, slice(block.row, block.row_end)).contiguous()
            else:
                assert isinstance(given, Tensor)  # rows alone can be had of tensors of nodes
                tensor = given if use.level == "whole" else rows_of(given, order.places(block))
            tensor = tensor.detach()
            if learn and learn[use.place]:
                tensor = tensor.requires_grad_()
                leaves.append((use, tensor))
            if use.level == "target":
                tensor = rows_of(tensor, local)
            found[use.parameter] = tensor
        rows = block.row_end - block.row
        found |= {
            "index": local,
            "edge_index_i": local,
            "edge_index_j": sources,
            "ptr": None,
            "size_i": rows,
            "size_j": self.columns,
            "dim_size": rows,
        }
        return found, leaves


def rows_of(tensor: Tensor | Rows, places: Tensor | slice) -> Tensor:
    """Some rows of a tensor [E, ...]."""
    if not isinstance(tensor, Tensor):
        return tensor.rows(places)
    if isinstance(places, slice):
        return tensor[places]
    if tensor.dim() and tensor.stride(0) == 0:
        return tensor[:1].expand(len(places), *tensor.shape[1:]).contiguous()
    if tensor.dim() < 3 or not tensor.is_contiguous():
        return tensor.index_select(0, places)
    # Of a matrix, on the CPU, this and its backward take a half to a third of the time.
    return tensor.flatten(1).index_select(0, places).unflatten(1, tensor.shape[1:])


def add_rows(total: Tensor, places: Tensor | slice, rows: Tensor) -> None:
    """Adds ``rows`` to some rows of ``total`` [E, ...], which is contiguous."""
    if isinstance(places, slice):
        total[places] += rows
    elif total.dim() < 2:
        total.index_add_(0, places, rows)
    else:
        # Of a matrix and with long integers, on the CPU, in a third of the time.
        total.flatten(1).index_add_(0, places.long(), rows.flatten(1))


def sort_out(
    module: MessagePassing,
    functions: Sequence[str],
    edge_index: Tensor,
    size: Sequence[int | None] | None,
    given: Mapping[str, Any],
) -> Arguments:
    """Find out which argument is what.

    Args:
        module: The layer.
        functions: Those of its functions that will run.
        edge_index: Arcs [2, E].
        size: As ``propagate`` takes it.
        given: Arguments by name.

    Raises:
        CannotBlock: If that cannot be told, or a function asks for the whole graph.
    """
    asked = {name: set(module.inspector.get_param_names(name)) for name in functions}
    names = {name for function in asked.values() for name in function}
    if names & _WHOLE_GRAPH:
        raise CannotBlock(f"asks for {', '.join(sorted(names & _WHOLE_GRAPH))}")
    target = 1 if module.flow == "source_to_target" else 0
    sizes: list[int | None] = list(size) if size is not None else [None, None]
    collector = _Collector(module.node_dim, target, sizes)
    plain: list[str] = []
    for name in sorted(names - MessagePassing.special_args):
        if name[-2:] in ("_i", "_j"):
            collector.lift(name, given.get(name[:-2], Parameter.empty))
        else:
            plain.append(name)
    rows, columns = sizes[target], sizes[1 - target]
    rows = columns if rows is None else rows
    columns = rows if columns is None else columns
    if rows is None or columns is None:
        raise CannotBlock("does not tell how many nodes there are")
    for name in plain:
        on_edges = any(name in asked[f] for f in functions if f != "update")
        in_update = name in asked.get("update", ())
        value = given.get(name, Parameter.empty)
        collector.hand_over(name, value, edge_index.size(1), rows, on_edges, in_update)
    if not collector.uses:
        raise CannotBlock("gets no tensor")
    return Arguments(
        tuple(collector.tensors),
        tuple(collector.names),
        tuple(collector.uses),
        collector.others,
        rows,
        columns,
    )


class _Collector:
    def __init__(self, node_dim: int, target: int, sizes: list[int | None]) -> None:
        self._node_dim, self._target, self._sizes = node_dim, target, sizes
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.uses: list[Use] = []
        self.others: dict[str, Any] = {}

    def lift(self, parameter: str, data: Any) -> None:
        side = self._target if parameter.endswith("_i") else 1 - self._target
        name = parameter[:-2]
        if isinstance(data, (tuple, list)):
            if len(data) != 2:
                raise CannotBlock(f"has {len(data)} tensors in {name}")
            if isinstance(data[1 - side], Tensor):
                self._check_size(1 - side, data[1 - side], name)
            data, name = data[side], f"{name}.{side}"
        if isinstance(data, Tensor):
            self._check_size(side, data, name)
            level = "target" if side == self._target else "source"
            self._add(parameter, level, name, data)
        else:
            self._other(parameter, data)

    def hand_over(
        self, parameter: str, data: Any, arcs: int, rows: int, on_edges: bool, in_update: bool
    ) -> None:
        if not isinstance(data, Tensor):
            self._other(parameter, data)
            return
        length = data.size(0) if data.dim() else None
        of_edges = on_edges and length == arcs
        of_rows = in_update and length == rows
        if (of_edges and of_rows) or (in_update and length == arcs and not of_rows):
            raise CannotBlock(f"does not tell whether {parameter} is of nodes or of edges")
        if of_rows and on_edges:
            raise CannotBlock(f"takes {parameter} of nodes both by arc and by node")
        level = "edge" if of_edges else "row" if of_rows else "whole"
        self._add(parameter, level, parameter, data)

    def _other(self, parameter: str, data: Any) -> None:
        if next(tensors_in(data), None) is not None:
            raise CannotBlock(f"has tensors inside {parameter}")
        self.others[parameter] = data

    def _check_size(self, side: int, data: Tensor, name: str) -> None:
        if data.dim() == 0 or data.dim() + self._node_dim != 0 != self._node_dim:
            raise CannotBlock(f"has its nodes not in the first dimension of {name}")
        known = self._sizes[side]
        if known is not None and known != data.size(0):
            raise CannotBlock(f"has {data.size(0)} nodes in {name} where {known} are expected")
        self._sizes[side] = data.size(0)

    def _add(self, parameter: str, level: str, name: str, data: Tensor) -> None:
        if type(data) not in (Tensor, torch.nn.Parameter) or data.layout != torch.strided:
            raise CannotBlock(f"has a {type(data).__name__} in {name}")
        place = next((i for i, t in enumerate(self.tensors) if t is data), None)
        if place is None:
            place = len(self.tensors)
            self.tensors.append(data)
            self.names.append(name)
        self.uses.append(Use(parameter, level, place))

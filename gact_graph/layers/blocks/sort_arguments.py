"""Which argument of ``propagate`` is of nodes, which of edges, and which of neither.

PyG's rule: in the signature of ``message``, ``x_j`` is the argument ``x`` of ``propagate`` at the
sources of the edges and ``x_i`` the same at their destinations; a parameter without such a suffix
gets the argument of its name as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, Level
from gact_graph.layers.blocks.collector import Collector
from gact_graph.support.storage import tensors_in

_WHOLE_GRAPH = frozenset({"edge_index", "adj_t", "size"})
"""Parameters that PyG fills in with all edges at once."""


def target_of(module: MessagePassing) -> int:
    """The row of edge_index that holds the destinations."""
    return 1 if module.flow == "source_to_target" else 0


def sort_arguments(
    module: MessagePassing,
    functions: Sequence[str],
    edge_index: Tensor,
    size: Sequence[int | None] | None,
    given: Mapping[str, Any],
) -> Arguments:
    """Tells what each argument is.

    Args:
        module: The layer.
        functions: The names of its functions that will run.
        edge_index: Edges [2, E].
        size: As ``propagate`` takes it.
        given: Arguments by name.

    Raises:
        CannotBlock: An argument cannot be told, or a function asks for the whole graph.
    """
    asked = {name: set(module.inspector.get_param_names(name)) for name in functions}
    names = {name for function in asked.values() for name in function}
    if names & _WHOLE_GRAPH:
        raise CannotBlock(f"asks for {', '.join(sorted(names & _WHOLE_GRAPH))}")
    target = target_of(module)
    sizes: list[int | None] = list(size) if size is not None else [None, None]
    sorter = _Sorter(module.node_dim, target, sizes)
    plain: list[str] = []
    for name in sorted(names - MessagePassing.special_args):
        if name[-2:] in ("_i", "_j"):
            sorter.lift(name, given.get(name[:-2], Parameter.empty))
        else:
            plain.append(name)
    num_destinations, num_sources = sizes[target], sizes[1 - target]
    num_destinations = num_sources if num_destinations is None else num_destinations
    num_sources = num_destinations if num_sources is None else num_sources
    if num_destinations is None or num_sources is None:
        raise CannotBlock("does not tell how many nodes there are")
    for name in plain:
        on_edges = any(name in asked[f] for f in functions if f != "update")
        in_update = name in asked.get("update", ())
        value = given.get(name, Parameter.empty)
        sorter.hand_over(name, value, edge_index.size(1), num_destinations, on_edges, in_update)
    return sorter.collector.arguments(num_destinations, num_sources)


class _Sorter:
    """Sorts arguments by PyG's rule.

    Args:
        node_dim: The layer's.
        target: The row of edge_index that holds the destinations.
        sizes: Numbers of nodes by row of edge_index, filled in as they become known.
    """

    def __init__(self, node_dim: int, target: int, sizes: list[int | None]) -> None:
        self.collector = Collector()
        self._node_dim, self._target, self._sizes = node_dim, target, sizes

    def lift(self, parameter: str, data: Any) -> None:
        """Take the argument for a parameter that ends in ``_i`` or ``_j``."""
        side = self._target if parameter.endswith("_i") else 1 - self._target
        name = parameter[:-2]
        if isinstance(data, (tuple, list)):
            if len(data) != 2:
                raise CannotBlock(f"has a tuple of {len(data)} in {name}")
            for row, half in enumerate(data):
                if isinstance(half, Tensor):
                    self._check_size(row, half, name)
            # PyG takes x_i from the second tensor of a pair, whichever way messages flow.
            number = 1 if parameter.endswith("_i") else 0
            data, name = data[number], f"{name}.{number}"
        if isinstance(data, Tensor):
            self._check_size(side, data, name)
            level: Level = "destination" if side == self._target else "source"
            self.collector.add(parameter, level, data, name)
        else:
            self._other(parameter, data)

    def hand_over(
        self,
        parameter: str,
        data: Any,
        num_edges: int,
        num_destinations: int,
        on_edges: bool,
        in_update: bool,
    ) -> None:
        """Take the argument for a parameter of another name.

        Args:
            parameter: Its name.
            data: The argument.
            num_edges: Number of edges.
            num_destinations: Number of destination nodes.
            on_edges: Whether a function of edges takes it.
            in_update: Whether ``update`` takes it.
        """
        if not isinstance(data, Tensor):
            self._other(parameter, data)
            return
        length = data.size(0) if data.dim() else None
        of_edges = on_edges and length == num_edges
        of_nodes = in_update and length == num_destinations
        if (of_edges and of_nodes) or (in_update and length == num_edges and not of_nodes):
            raise CannotBlock(f"does not tell whether {parameter} is of nodes or of edges")
        if of_nodes and on_edges:
            raise CannotBlock(f"uses the node tensor {parameter} both in message and in update")
        level: Level = "edge" if of_edges else "node" if of_nodes else "whole"
        self.collector.add(parameter, level, data, parameter)

    def _other(self, parameter: str, data: Any) -> None:
        if next(tensors_in(data), None) is not None:
            raise CannotBlock(f"has tensors inside the argument {parameter}")
        self.collector.others[parameter] = data

    def _check_size(self, row: int, data: Tensor, name: str) -> None:
        if data.dim() == 0 or data.dim() + self._node_dim != 0 != self._node_dim:
            raise CannotBlock(f"does not have its nodes in the first dimension of {name}")
        known = self._sizes[row]
        if known is not None and known != data.size(0):
            raise CannotBlock(f"has {data.size(0)} nodes in {name} where {known} are expected")
        self._sizes[row] = data.size(0)

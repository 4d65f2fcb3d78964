"""The arguments of layers sorted into tensors of nodes, tensors of edges, and others.

PyG's rule: in the signature of ``message``, ``x_j`` is the argument ``x`` of ``propagate`` at the
sources of the edges and ``x_i`` at their destinations; a parameter without such a suffix gets the
whole argument of its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, Level, Use
from gact_graph.layers.recompute.structure import Structure, taken_apart
from gact_graph.support.current import Hook
from gact_graph.support.storage import tensors_in
from gact_graph.support.torch_private import TRACED_TENSORS

_WHOLE_GRAPH = frozenset({"edge_index", "adj_t", "size"})
"""Parameters that PyG fills in with all edges at once."""


def target_of(module: MessagePassing) -> int:
    """Return the row of edge_index that holds the destinations."""
    return 1 if module.flow == "source_to_target" else 0


def sort_arguments(
    module: MessagePassing,
    methods: Iterable[str],
    edge_index: Tensor,
    size: Sequence[int | None] | None,
    values: Mapping[str, Any],
) -> Arguments:
    """Sort the arguments of ``propagate`` or ``edge_updater``.

    Args:
        module: The layer.
        methods: The methods of the layer that run.
        edge_index: Edges [2, E].
        size: As in ``propagate``.
        values: The arguments by name.

    Raises:
        CannotBlock: An argument is ambiguous, or a method takes the whole graph.
    """
    taken = {name: set(module.inspector.get_param_names(name)) for name in methods}
    names = {name for parameters in taken.values() for name in parameters}
    if names & _WHOLE_GRAPH:
        raise CannotBlock(f"asks for {', '.join(sorted(names & _WHOLE_GRAPH))}")
    target, collector = target_of(module), Collector()
    method = "edge_updater" if "edge_update" in taken else "propagate"
    # PyG cannot fill in its template for a class without a source file.
    has_template = getattr(type(module), method) is not getattr(MessagePassing, method)
    sizes: list[int | None] = list(size) if size is not None else [None, None]
    others: list[str] = []
    for name in sorted(names - MessagePassing.special_args):
        if name[-2:] not in ("_i", "_j"):
            others.append(name)
            continue
        label = name[:-2]
        if label not in values:
            raise CannotBlock(f"gets no argument {label}")
        value = values[label]
        row = target if name.endswith("_i") else 1 - target
        if isinstance(value, (tuple, list)):
            if len(value) != 2:
                raise CannotBlock(f"has a tuple of {len(value)} in {label}")
            for half_row, half in enumerate(value):
                if isinstance(half, Tensor):
                    _check_size(module, sizes, half_row, half, label)
            # PyG's template takes x_i from the second tensor for both directions of messages.
            number = int(name.endswith("_i")) if has_template else row
            value, label = value[number], f"{label}.{number}"
        if isinstance(value, Tensor):
            _check_size(module, sizes, row, value, label)
        elif has_template:
            value = None
        level: Level = "destination" if row == target else "source"
        _add(collector, name, level, value, label)
    num_destinations, num_sources = sizes[target], sizes[1 - target]
    num_destinations = num_sources if num_destinations is None else num_destinations
    num_sources = num_destinations if num_sources is None else num_sources
    if num_destinations is None or num_sources is None:
        raise CannotBlock("does not define the number of nodes")
    if num_destinations < 2 or num_sources < 2:
        raise CannotBlock("has no two nodes")  # code may treat one row in another way
    for name in others:
        if name not in values:
            continue  # PyG takes the default
        value, level = values[name], "whole"
        if isinstance(value, Tensor):
            on_edges = any(name in taken[method] for method in taken if method != "update")
            in_update = name in taken.get("update", ())
            level = _level(name, value, edge_index.size(1), num_destinations, on_edges, in_update)
        _add(collector, name, level, value, name)
    return collector.arguments(num_destinations, num_sources)


def _add(collector: Collector, parameter: str, level: Level, value: Any, name: str) -> None:
    if isinstance(value, Tensor):
        collector.add(parameter, level, value, name)
    elif next(tensors_in(value), None) is not None:
        raise CannotBlock(f"has tensors inside the argument {parameter}")
    else:
        collector.others[parameter] = value


def _level(
    parameter: str,
    tensor: Tensor,
    num_edges: int,
    num_destinations: int,
    on_edges: bool,
    in_update: bool,
) -> Level:
    """Return the level of a tensor that methods of edges, or ``update``, take by its name."""
    length = tensor.size(0) if tensor.dim() else None
    of_edges = on_edges and length == num_edges
    of_nodes = in_update and length == num_destinations
    if (of_edges and of_nodes) or (in_update and length == num_edges and not of_nodes):
        raise CannotBlock(f"has an argument {parameter} that may be of nodes or of edges")
    if of_nodes and on_edges:
        raise CannotBlock(f"uses the node tensor {parameter} both in message and in update")
    return "edge" if of_edges else "node" if of_nodes else "whole"


def _check_size(
    module: MessagePassing, sizes: list[int | None], row: int, tensor: Tensor, name: str
) -> None:
    """Compare the rows of a tensor with the number of nodes in a row of edge_index, or set it."""
    if tensor.dim() == 0 or tensor.dim() + module.node_dim != 0 != module.node_dim:
        raise CannotBlock(f"does not have its nodes in the first dimension of {name}")
    known = sizes[row]
    if known is not None and known != tensor.size(0):
        raise CannotBlock(f"has {tensor.size(0)} nodes in {name} where {known} are expected")
    sizes[row] = tensor.size(0)


def sort_edge_model_arguments(
    x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any
) -> tuple[Tensor, Arguments]:
    """Return the edges and the arguments of the edge model, from those of a MetaLayer's forward.

    Raises:
        CannotBlock: An argument has an unexpected shape.
    """
    edges = check_edge_index(edge_index)
    if not isinstance(x, Tensor) or not x.dim():
        raise CannotBlock("gets no tensor")
    nodes = x.size(0)
    collector = Collector()
    collector.add_nested("src", "source", x, "x", nodes)
    collector.add_nested("dest", "destination", x, "x", nodes)
    collector.add_nested("edge_attr", "edge", edge_attr, "edge_attr", edges.size(1))
    collector.add_nested("u", "whole", u, "u")
    collector.add_nested("batch", "source", batch, "batch", nodes)
    return edges, collector.arguments(nodes, nodes)


def check_layer(module: MessagePassing, edge_index: Any) -> Tensor:
    """Return the edges of a call of a layer as a tensor.

    Raises:
        CannotBlock: The edges are no tensor, there are none, or PyG or the user reads all messages
            at once.
    """
    if module.explain or module.decomposed_layers > 1:
        raise CannotBlock("is explained or decomposed")
    for phase in ("propagate", "message", "aggregate", "edge_update"):
        for when in ("forward_pre", "forward"):
            hooks = getattr(module, f"_{phase}_{when}_hooks").values()
            if not all(isinstance(hook, Hook) for hook in hooks):
                raise CannotBlock(f"has a hook on {phase} that is not from gact_graph")
    if module.fuse:
        is_sorted = isinstance(edge_index, EdgeIndex) and edge_index.is_sorted_by_col
        if (is_sorted and module.SUPPORTS_FUSED_EDGE_INDEX) or not (
            isinstance(edge_index, EdgeIndex) or _is_dense(edge_index)
        ):
            raise CannotBlock("multiplies by a sparse matrix")
    return check_edge_index(edge_index)


def check_edge_index(edge_index: Any) -> Tensor:
    """Return edges as a tensor.

    Raises:
        CannotBlock: The edges are no tensor [2, E] of int64, or there are none.
    """
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    if not _is_dense(edge_index):
        raise CannotBlock(
            "has its edges in a sparse matrix; only an edge_index can be cut into blocks"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise CannotBlock("has no edge_index [2, E] of int64")
    if edge_index.size(1) < 2:
        raise CannotBlock("has no two edges")  # code may treat one edge in another way
    return edge_index


def _is_dense(edge_index: Any) -> bool:
    return type(edge_index) in (Tensor, *TRACED_TENSORS) and edge_index.layout == torch.strided


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
        if (
            type(tensor) not in (Tensor, torch.nn.Parameter, *TRACED_TENSORS)
            or tensor.layout != torch.strided
        ):
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

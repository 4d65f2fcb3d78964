"""Recognizes results that are sums of messages, and messages that are weighted source rows.

The message of GCN, GAT and TransformerConv (without edge features) is a product, and ``propagate``
adds the products up for each destination node i:

    out_i = sum over edges e to i of  weight_e * x[source_e]

Stock PyG materializes all products, a tensor of messages [E, heads, channels]. From the weights
[E, heads, 1] alone, an operator of :mod:`gact_graph.ops.weighted_sum` sums the rows of x in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.graph import Dependencies, EdgeGraph
from gact_graph.layers.blocks.trace import Trace
from gact_graph.layers.blocks.weighted_sum import WeightedSum, can_sum

aten: Final = torch.ops.aten

_ADDS = (
    *(aten.scatter_add_.default, aten.scatter_add.default),
    *(aten.index_add_.default, aten.index_add.default),
)


class Messages(NamedTuple):
    """The messages whose sum is a result.

    Attributes:
        node: The messages; for a mean, divided by the number of edges of their destination.
        undivided: The messages before this division.
        divisor: The number of edges of each edge's destination [E, 1, ...]; None for a sum.
    """

    node: fx.Node
    undivided: fx.Node
    divisor: fx.Node | None


def match_messages(traced: Trace, dependencies: Dependencies, result: fx.Node) -> Messages | None:
    """Return the messages whose sum or mean is the result; None for another result."""
    messages = _summed(result, dependencies)
    if messages is not None:
        return Messages(messages, messages, None)
    if (
        dependencies.is_changed(result)
        or result.target is not aten.div.Tensor
        or not isinstance(result.args[1], fx.Node)
    ):
        return None
    messages = _summed(result.args[0], dependencies)
    if messages is None:
        return None
    count = result.args[1]
    while count.target is aten.expand.default:
        count = count.args[0]  # type: ignore[assignment]
    value, sums = count.meta["val"], result.args[0].meta["val"]  # type: ignore[union-attr]
    if value.dim() != sums.dim() or any(size != 1 for size in value.shape[1:]):
        return None
    # A node without edges has no message that the division could reach: its divisor is not 0.
    if str(value.shape[0]) != str(sums.shape[0]) or not _is_positive(count, dependencies):
        return None
    if not dependencies.closure([count]).isdisjoint(_float_inputs(traced)):
        return None
    shape = messages.meta["val"].shape[0], *value.shape[1:]
    arguments = count, 0, traced.placeholders["index"]
    divisor = _insert(
        traced, dependencies, aten.index_select.default, arguments, value.new_empty(shape)
    )
    message = _divide(traced, dependencies, messages, divisor)
    return Messages(message, messages, divisor)


def _is_positive(count: fx.Node, dependencies: Dependencies) -> bool:
    """Return whether a tensor is a view of numbers that were clamped to at least 1."""
    while count.target in (aten.view.default, aten.unsqueeze.default):
        count = count.args[0]  # type: ignore[assignment]
    least = count.args[1] if len(count.args) > 1 else count.kwargs.get("min")
    clamped = count.target in (aten.clamp.default, aten.clamp_min.default)
    positive = isinstance(least, int | float) and least >= 1
    return clamped and positive and not dependencies.is_changed(count)


def _insert(
    traced: Trace,
    dependencies: Dependencies,
    function: Any,
    arguments: tuple[Any, ...],
    value: Tensor,
    **settings: Any,
) -> fx.Node:
    """Append an operation to the graph, whose result is like a fake tensor ``value``."""
    graph = traced.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        node = graph.call_function(function, arguments, settings)
    node.meta["val"] = value
    dependencies.add(node)
    return node


def _divide(
    traced: Trace, dependencies: Dependencies, dividend: fx.Node, divisor: fx.Node
) -> fx.Node:
    value = torch.empty_like(dividend.meta["val"])
    return _insert(traced, dependencies, aten.div.Tensor, (dividend, divisor), value)


def match_weights(
    traced: Trace,
    dependencies: Dependencies,
    messages: Messages,
    kept: Sequence[fx.Node],
    arguments: Arguments,
) -> WeightedSum | None:
    """Return the weighted sum of source rows that the messages make; None for other messages."""
    for use in arguments.uses:
        x = arguments.tensors[use.index]
        if use.level != "source" or not can_sum(x) or x.dim() < 2:
            continue
        rows = traced.placeholders[use.parameter]
        factor = _factor(messages.undivided, rows)
        if factor is None or (factor.node is not None and dependencies.is_changed(factor.node)):
            continue
        weight = _weight(traced, dependencies, messages, factor.node, rows)
        if rows in dependencies.closure([weight, *kept]):
            continue
        graph = EdgeGraph(traced, dependencies, [weight, *kept])
        return WeightedSum(use.index, graph, _is_of_edges(graph, arguments, kept))
    return None


class _Factor(NamedTuple):
    node: fx.Node | None  # None for a weight of 1


def _factor(message: fx.Node, rows: fx.Node) -> _Factor | None:
    """Return the weight that multiplies the rows; None if the message is no such product."""
    if message is rows:
        return _Factor(None)
    if message.target is not aten.mul.Tensor:
        return None
    left, right = message.args[:2]
    if right is rows:
        left, right = right, left
    if left is not rows or not isinstance(right, fx.Node) or right is rows:
        return None
    weight, value = right.meta["val"], rows.meta["val"]
    if not isinstance(weight, Tensor) or weight.dtype != value.dtype:
        return None
    if tuple(map(str, weight.shape)) != tuple(map(str, (*value.shape[:-1], 1))):
        return None
    return _Factor(right)


def _weight(
    traced: Trace,
    dependencies: Dependencies,
    messages: Messages,
    factor: fx.Node | None,
    rows: fx.Node,
) -> fx.Node:
    """Return the node of the weights [E, ..., 1], which is new unless it is a factor of a sum."""
    if factor is None:
        value = rows.meta["val"]
        shape: list[Any] = [traced.placeholders["num_edges"], *(1 for _ in value.shape[1:])]
        ones = value.new_ones(value.shape[0], *shape[1:])
        kind = {"dtype": value.dtype, "device": value.device}
        factor = _insert(traced, dependencies, aten.ones.default, (shape,), ones, **kind)
    if messages.divisor is None:
        return factor
    return _divide(traced, dependencies, factor, messages.divisor)


def _is_of_edges(graph: EdgeGraph, arguments: Arguments, kept: Sequence[fx.Node]) -> bool:
    """Return whether the weights depend on tensors of edges alone."""
    edges = {use.parameter for use in arguments.uses if use.level in ("edge", "whole")}
    return not kept and not graph.is_random and {*graph.inputs} <= edges | {"num_edges"}


def _summed(result: object, dependencies: Dependencies) -> fx.Node | None:
    """Return the rows of edges that an operation adds to zeros at their destinations."""
    if not isinstance(result, fx.Node) or result.target not in _ADDS:
        return None
    if result.kwargs.get("alpha", 1) != 1 or len(result.args) > 4:
        return None
    arguments: Any = result.args
    zeros, dim, index, source = arguments
    if not all(isinstance(node, fx.Node) for node in (zeros, index, source)) or dim != 0:
        return None
    fresh = zeros.target is aten.zeros.default and [*zeros.users] == [result]
    rows, sums, places = (n.meta["val"].shape for n in (source, result, index))
    of_rows = len(places) == 1 or [*map(str, places)] == [*map(str, rows)]
    same = of_rows and [*map(str, rows[1:])] == [*map(str, sums[1:])]
    # A view of either may be written to, before or after the sum.
    changed = dependencies.is_changed(result) or dependencies.is_changed(source)
    summed: fx.Node | None = source if fresh and same and not changed else None
    return summed


def _float_inputs(traced: Trace) -> set[fx.Node]:
    return {
        node
        for node in traced.placeholders.values()
        if isinstance(node.meta["val"], Tensor) and node.meta["val"].is_floating_point()
    }

"""Results that are sums of messages, and messages that are weighted source rows.

The message of GCN, GAT and TransformerConv (without edge features) is a product, and ``propagate``
adds the products up for each destination node i:

    out_i = sum over edges e to i of  weight_e * x[source_e]

Stock PyG makes all products, a tensor of messages [E, heads, channels]. From the weights
[E, heads, 1] alone, an operator of :mod:`gact_graph.ops.weighted_sum` adds up the rows of x where
they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.graph import Dependencies, EdgeGraph
from gact_graph.layers.blocks.sums.weighted_sum import WeightedSum, can_sum
from gact_graph.layers.blocks.trace import Trace

aten = torch.ops.aten

_VIEWS = (aten.expand.default, aten.view.default, aten.unsqueeze.default)


class Messages(NamedTuple):
    """The messages whose sum is a result.

    Attributes:
        node: The messages; of a mean, each divided by the number of edges of its destination.
        made: The messages before that division.
        divisor: The number of edges of each edge's destination [E, 1, ...]; None for a sum.
    """

    node: fx.Node
    made: fx.Node
    divisor: fx.Node | None


def match_messages(traced: Trace, dependencies: Dependencies, result: fx.Node) -> Messages | None:
    """The messages whose sum or mean is the result; None if it is something else."""
    made = _summed(result, dependencies)
    if made is not None:
        return Messages(made, made, None)
    if (
        dependencies.is_changed(result)
        or result.target is not aten.div.Tensor
        or not isinstance(result.args[1], fx.Node)
    ):
        return None
    made = _summed(result.args[0], dependencies)
    if made is None:
        return None
    count = result.args[1]
    while count.target is aten.expand.default:
        count = count.args[0]  # type: ignore[assignment]
    value: Tensor = count.meta["val"]
    if value.dim() != made.meta["val"].dim() or any(size != 1 for size in value.shape[1:]):
        return None
    if not dependencies.closure([count]).isdisjoint(_float_inputs(traced)):
        return None
    graph = traced.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        share = graph.call_function(
            aten.index_select.default, (count, 0, traced.placeholders["index"])
        )
        share.meta["val"] = value.new_empty(made.meta["val"].shape[0], *value.shape[1:])
        message = graph.call_function(aten.div.Tensor, (made, share))
        message.meta["val"] = torch.empty_like(made.meta["val"])
    dependencies.add(share)
    dependencies.add(message)
    return Messages(message, made, share)


def match_weights(
    traced: Trace,
    dependencies: Dependencies,
    messages: Messages,
    kept: Sequence[fx.Node],
    arguments: Arguments,
) -> WeightedSum | None:
    """The weighted sum of source rows that the messages add up to; None if they are others."""
    for use in arguments.uses:
        x = arguments.tensors[use.index]
        if use.level != "source" or not can_sum(x) or x.dim() < 2:
            continue
        rows = traced.placeholders[use.parameter]
        factor = _factor(messages.made, rows)
        if factor is None or (factor.node is not None and dependencies.is_changed(factor.node)):
            continue
        weight = _weight(traced, dependencies, messages, factor.node, rows)
        if rows in dependencies.closure([weight, *kept]):
            continue
        graph = EdgeGraph(traced, dependencies, [weight, *kept])
        return WeightedSum(use.parameter, use.index, graph, _is_of_edges(graph, arguments, kept))
    return None


class _Factor(NamedTuple):
    node: fx.Node | None


def _factor(message: fx.Node, rows: fx.Node) -> _Factor | None:
    """The weight by which rows are multiplied, None for a weight of one; None if there is none."""
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
    """The node of the weights [E, ..., 1], made where the graph has none."""
    graph, value = traced.graph, rows.meta["val"]
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        if factor is None:
            shape: list[Any] = [traced.num_edges, *(1 for _ in value.shape[1:])]
            kind = {"dtype": value.dtype, "device": value.device}
            factor = graph.call_function(aten.ones.default, (shape,), kind)
            factor.meta["val"] = value.new_ones(value.shape[0], *shape[1:])
            dependencies.add(factor)
        if messages.divisor is not None:
            share = graph.call_function(aten.div.Tensor, (factor, messages.divisor))
            share.meta["val"] = torch.empty_like(factor.meta["val"])
            dependencies.add(share)
            return share
    return factor


def _is_of_edges(graph: EdgeGraph, arguments: Arguments, kept: Sequence[fx.Node]) -> bool:
    """Whether the weights depend on tensors of edges alone, so that all can be had at once."""
    edges = {use.parameter for use in arguments.uses if use.level in ("edge", "whole")}
    return (
        not kept
        and not graph.is_random
        and {*graph.inputs} <= edges | {"index"}
        and (not graph.reads_index)
    )


def _summed(result: object, dependencies: Dependencies) -> fx.Node | None:
    """The rows of edges that an operation adds to zeros at their destinations."""
    if not isinstance(result, fx.Node):
        return None
    if result.target in (aten.scatter_add_.default, aten.scatter_add.default):
        zeros, dim, _, source = result.args[:4]
    elif result.target in (aten.index_add_.default, aten.index_add.default):
        zeros, dim, _, source = result.args[:4]
        if result.kwargs.get("alpha", 1) != 1 or len(result.args) > 4:
            return None
    else:
        return None
    if not isinstance(zeros, fx.Node) or not isinstance(source, fx.Node) or dim != 0:
        return None
    fresh = zeros.target is aten.zeros.default and [*zeros.users] == [result]
    same = source.meta["val"].dim() == result.meta["val"].dim()
    # A view of either may be written to, before or after the sum.
    changed = dependencies.is_changed(result) or dependencies.is_changed(source)
    return source if fresh and same and not changed else None


def _float_inputs(traced: Trace) -> set[fx.Node]:
    return {
        node
        for node in traced.placeholders.values()
        if isinstance(node.meta["val"], Tensor) and node.meta["val"].is_floating_point()
    }

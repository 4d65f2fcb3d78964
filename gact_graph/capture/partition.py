"""Changes to the graphs that ``torch.compile`` partitions, so that they save what compresses well.

The partitioner saves the fewest uncompressed bytes. In compressed form, the mask of a ReLU takes
one bit per element, while the result that the mask is computed from must be exact. The rows that a
gather takes, or the weights of edges that attention computes, are more than their source, which
another operation has often saved already. One mask serves a ReLU and the dropout after it, whose
results are then computed again from tensors that backward reads in any case, such as the input of a
norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from gact_graph.capture.backward_graph import packet_of
from gact_graph.support.symbols import expected
from gact_graph.support.torch_private import compiler_settings

_aten = torch.ops.aten

_ALIASES = {_aten.alias, _aten.detach}
_VIEWS = {_aten.permute, _aten.t, _aten.transpose, _aten.view, _aten.reshape}
_GATHERS = {_aten.index, _aten.index_select}
_EDGE_FORWARD = "gact_graph_edges.edge_forward"
"""The operator of :mod:`gact_graph.layers.blocks.graph_operators`."""

Pass = Callable[[fx.GraphModule, Any], fx.GraphModule]


def partitioning() -> AbstractContextManager[None]:
    """Return a context in which the graphs that are compiled on this thread are changed."""
    config = compiler_settings()
    earlier: Pass | None = config.joint_custom_pass
    context: AbstractContextManager[None] = config.patch(joint_custom_pass=_after(earlier))
    return context


def _after(earlier: Pass | None) -> Pass:
    def changed(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        graph = graph if earlier is None else earlier(graph, inputs)
        relus: list[fx.Node] = []
        overwritten = _overwritten(graph.graph)
        for node in [*graph.graph.nodes]:
            if "recompute" in node.meta:  # by selective checkpointing
                continue
            packet = packet_of(node)
            if packet in _GATHERS and _is_larger([node], [node.args[0]]):
                if _memory_of(node.args[0]) not in overwritten:  # else backward has other values
                    _compute_again([node])
            elif str(packet) == _EDGE_FORWARD and _is_larger(node.users, node.args[1]):
                _compute_again([node, *node.users])
            elif packet is _aten.le and node.args[1] == 0:
                relus += _save_mask(graph.graph, node)
        backward = _backward_of(graph.graph)
        for relu in relus:
            _join_masks(graph.graph, relu, backward)
        return graph

    return changed


def _overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Return the inputs that the forward changes in place, as its last operations."""
    return {_memory_of(node.args[0]) for node in graph.nodes if packet_of(node) is _aten.copy_}


def _memory_of(node: Any) -> fx.Node:
    """Return the node of which another is a view."""
    while packet_of(node) in _VIEWS | _ALIASES:
        node = node.args[0]
    return cast(fx.Node, node)


def _save_mask(graph: fx.Graph, of_result: fx.Node) -> list[fx.Node]:
    """Compute the mask of a ReLU in forward: ``result <= 0`` is ``x <= 0``, also for NaN.

    Returns:
        The node of the ReLU; none if this is no mask of a ReLU.
    """
    relu: Any = of_result.args[0]
    while packet_of(relu) in _ALIASES:
        relu = relu.args[0]
    if packet_of(relu) is not _aten.relu or "recompute" in relu.meta:
        return []
    x, value = relu.args[0], relu.meta["val"]
    with graph.inserting_before(relu):
        mask = graph.call_function(_aten.le.Scalar, (x, 0))
        zero = graph.call_function(_aten.full.default, ([], 0.0), _options(value))
        result = graph.call_function(_aten.where.self, (mask, zero, x))
    result.meta |= relu.meta
    zero.meta |= relu.meta | {"val": value.new_zeros(())}
    mask.meta |= relu.meta | {"val": of_result.meta["val"]}
    mask.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    relu.replace_all_uses_with(result)
    of_result.replace_all_uses_with(mask)
    graph.erase_node(of_result)
    graph.erase_node(relu)
    return [result]


def _join_masks(graph: fx.Graph, relu: fx.Node, backward: Collection[fx.Node]) -> None:
    """Save one mask for a ReLU and the dropout after it: of the elements that both keep.

    The forward masks twice as before: an infinite element that is dropped becomes NaN.
    """
    negative, zero, x = cast(tuple[Any, Any, Any], relu.args)
    product: Any = _only_user(relu, _aten.mul)
    result: Any = _only_user(product, _aten.mul)
    kept, factor = _other(product, relu), _other(result, product)
    if factor is None or not _is_mask(kept) or _is_larger([relu], [kept]):
        return
    readers = [user for user in _users(kept) if user is not product]
    converted: Any = readers[0] if len(readers) == 1 else None
    masked: Any = _only_user(_only_user(_only_user(converted, _aten.mul), _aten.mul), _aten.where)
    if masked is None or {*_users(negative)} != {relu, masked}:
        return
    with graph.inserting_before(product):
        positive = graph.call_function(_aten.logical_not.default, (negative,))
        both = graph.call_function(_aten.logical_and.default, (kept, positive))
        dropped = graph.call_function(_aten.logical_not.default, (both,))
        again = graph.call_function(_aten.where.self, (dropped, zero, x))
    with graph.inserting_before(result):
        scaled = graph.call_function(_aten.mul.Tensor, (again, factor))
    del negative.meta["recompute"]
    for made, like in (
        *((mask, negative) for mask in (positive, both, dropped)),
        *((again, relu), (scaled, result)),
    ):
        made.meta |= like.meta
    both.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    _compute_again([dropped, again, scaled])
    for reader in (product, converted):
        reader.replace_input_with(kept, both)
    masked.replace_input_with(negative, dropped)
    for user in [user for user in result.users if _is_in(backward, user)]:
        user.replace_input_with(result, scaled)


def _other(product: fx.Node | None, argument: fx.Node) -> Any:
    """Return the other argument of an operation of two; None if it is the same."""
    arguments = [] if product is None else product.args[:2]
    return next((other for other in arguments if other is not argument), None)


def _users(node: fx.Node | None) -> list[fx.Node]:
    """Return the users of a node, without aliases that have none."""
    users: Iterable[fx.Node] = [] if node is None else node.users
    return [user for user in users if packet_of(user) not in _ALIASES or _users(user)]


def _only_user(node: fx.Node | None, packet: object) -> fx.Node | None:
    """Return the only user of a node, or of its copy, if it is a given operation."""
    users = _users(node)
    if len(users) == 1 and packet_of(users[0]) is _aten.clone:
        return _only_user(users[0], packet)
    return users[0] if len(users) == 1 and packet_of(users[0]) is packet else None


def _backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on the gradients of outputs."""
    inputs = graph.find_nodes(op="placeholder")
    found = {node for node in inputs if node.name.startswith("tangents")}
    for node in graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_in(backward: Collection[fx.Node], node: fx.Node) -> bool:
    """Return whether only the backward reads a node, or a view of the node."""
    if node in backward or packet_of(node) not in _VIEWS:
        return node in backward
    return bool(node.users) and all(_is_in(backward, user) for user in node.users)


def _is_mask(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _options(value: Tensor) -> dict[str, Any]:
    return {"dtype": value.dtype, "device": value.device, "pin_memory": False}


def _compute_again(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}


def _is_larger(results: Iterable[fx.Node], sources: Any) -> bool:
    """Return whether results have more elements than sources, as far as a compiler knows."""
    return sum(map(_numel, results)) > sum(map(_numel, sources))


def _numel(node: object) -> float:
    """Return the elements of a tensor; infinity for another result."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        return math.inf
    return expected(value.numel())

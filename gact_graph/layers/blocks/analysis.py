"""The analysis of a layer in one state: queries on its traced graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from gact_graph.layers.blocks.arguments import Arguments, EdgeFunction
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.graph import Dependencies, EdgeGraph, storages_of
from gact_graph.layers.blocks.locality import prove
from gact_graph.layers.blocks.match_attention import match_attention
from gact_graph.layers.blocks.match_sum import match_messages, match_weights
from gact_graph.layers.blocks.trace import Trace, trace
from gact_graph.layers.blocks.weighted_sum import WeightedSum
from gact_graph.support.reach import Reach
from gact_graph.support.storage import storage_id


@dataclass(frozen=True)
class BaselineSaves:
    """The tensors that stock autograd would save in a call.

    Attributes:
        by_edge: Bytes for each edge of tensors that the call makes.
        by_node: Bytes for each destination node.
        fixed: Bytes for any graph.
        inputs: Indices of the saved tensors in ``Arguments.tensors``.
        others: ``edge_index`` if the ends of the edges are saved, ``result`` if the result of the
            call is saved, and the attributes in which the layer leaves a saved tensor.
    """

    by_edge: float = 0.0
    by_node: float = 0.0
    fixed: float = 0.0
    inputs: frozenset[int] = frozenset()
    others: frozenset[str] = frozenset()

    def nbytes(self, num_edges: int, num_destinations: int) -> int:
        """Return the bytes of the tensors that the call makes, without arguments and result."""
        return round(self.by_edge * num_edges + self.by_node * num_destinations + self.fixed)


@dataclass(frozen=True)
class LayerAnalysis:
    """The analysis of an edge function in one state of its layer.

    Attributes:
        kept: The attributes in which the layer leaves a tensor with a row for each edge.
        constants: For each constant its number in ``Reach.tensors``.
        forward: The graph of the result, then of the tensors of ``kept``.
        backward: The graph that backward runs again: like ``forward``, but with the messages in
            place of a result that is their sum.
        sums: Whether the first result of ``backward`` is the messages.
        differentiable: Whether a gradient passes through the result, and each tensor of ``kept``.
        never_read: Indices in ``Arguments.tensors`` of the inputs whose values backward does not
            read.
        baseline: The tensors that stock autograd would save.
        weighted_sum: The weighted sum that is the result; None for another result.
        attention: The attention that operators compute; None for no such attention.
    """

    kept: tuple[str, ...]
    constants: tuple[int, ...]
    forward: EdgeGraph
    backward: EdgeGraph
    sums: bool
    differentiable: tuple[bool, ...]
    never_read: frozenset[int]
    baseline: BaselineSaves
    weighted_sum: WeightedSum | None
    attention: Attention | None


def analyze(
    edge_function: EdgeFunction, module: object, arguments: Arguments, reach: Reach
) -> LayerAnalysis:
    """Trace an edge function, prove that it can run in blocks, and analyze its graph.

    Raises:
        CannotBlock: There is no proof that the function can run in blocks.
    """
    traced = trace(edge_function, module, arguments, reach)
    prove(traced, edge_function.of_edges)
    dependencies = Dependencies(traced)
    result, *kept = traced.outputs
    messages = None if edge_function.of_edges else match_messages(traced, dependencies, result)
    again = [result if messages is None else messages.node, *kept]
    weighted_sum = None
    if messages is not None:
        weighted_sum = match_weights(traced, dependencies, messages, kept, arguments)
    attention = match_attention(traced, dependencies, messages, arguments, reach)
    inputs = arguments.with_constants([reach.tensors[number] for number in traced.constants])
    return LayerAnalysis(
        traced.kept,
        traced.constants,
        EdgeGraph(traced, dependencies, traced.outputs),
        EdgeGraph(traced, dependencies, again),
        messages is not None,
        traced.differentiable,
        _never_read(traced, dependencies, again, inputs),
        _baseline(traced, inputs),
        weighted_sum,
        attention,
    )


def _never_read(
    traced: Trace,
    dependencies: Dependencies,
    again: Sequence[fx.Node],
    arguments: Arguments,
) -> frozenset[int]:
    """Return the inputs of which no tensor depends that backward saves in its run of the graph."""
    if traced.hooked:
        return frozenset()
    runs = dependencies.closure(again)
    # Autograd itself copies a tensor that an operation saves and changes in place: no output
    # depends on such a copy.
    forward, saved = dependencies.closure(traced.outputs), list[fx.Node]()
    for tensor in traced.saved:
        node = dependencies.of_storage.get(storage_id(tensor))
        if node is None:  # a tensor of unknown origin
            return frozenset()
        if node in runs or node not in forward:
            saved.append(node)
    # Arguments may be views of one tensor.
    storages = {storage for node in saved for storage in storages_of(node)}
    saved += (p for p in traced.placeholders.values() if not storages.isdisjoint(storages_of(p)))
    read = dependencies.closure(saved)
    used = {use.index for use in arguments.uses if traced.placeholders[use.parameter] in read}
    return frozenset(
        number
        for number, tensor in enumerate(arguments.tensors)
        if tensor.is_floating_point() and tensor.dim() and number not in used
    )


def _baseline(traced: Trace, arguments: Arguments) -> BaselineSaves:
    saved = {storage_id(tensor): tensor for tensor in traced.saved}

    def take(node: fx.Node) -> bool:
        tensors = [saved.pop(storage, None) for storage in storages_of(node)]  # all of them
        return any(tensor is not None for tensor in tensors)

    inputs = {
        use.index
        for use in arguments.uses
        if use.level in ("node", "edge", "whole") and take(traced.placeholders[use.parameter])
    }
    first = len(arguments.tensors) - len(traced.constants)
    parameters = {
        i for i in inputs if i >= first and isinstance(arguments.tensors[i], nn.Parameter)
    }
    ends = [take(traced.placeholders[name]) for name in ("index", "edge_index_j")]
    result, *kept = traced.outputs
    outputs = zip((*traced.kept, "result"), (*kept, result), strict=True)
    others = {name for name, node in outputs if take(node)}
    by_edge, by_node, fixed = _linear(traced, saved, _float_masks(traced))
    if any(ends) or any(
        arguments.tensors[use.index].requires_grad
        for use in arguments.uses
        if use.level in ("source", "destination")
    ):
        others.add("edge_index")
    return BaselineSaves(by_edge, by_node, fixed, frozenset(inputs - parameters), frozenset(others))


def _float_masks(traced: Trace) -> dict[int, int]:
    """Return the bytes of an element of each dropout mask in stock PyTorch, by storage.

    On a CPU, dropout saves a mask of floating-point numbers; the graph has a mask of booleans.
    """
    masks: dict[int, int] = {}
    for node in traced.graph.nodes:
        if node.target is torch.ops.aten.native_dropout.default:
            out, mask = node.meta["val"]
            if out.device.type == "cpu":
                masks[storage_id(mask)] = out.dtype.itemsize
    return masks


def _linear(
    traced: Trace, saved: Mapping[int, Tensor], wider: Mapping[int, int]
) -> tuple[float, float, float]:
    """Return the bytes of storages for each edge, for each destination, and for any graph."""
    edges, destinations = traced.symbol("num_edges"), traced.symbol("dim_size")
    totals: list[float] = []
    for numbers in ({edges: 0, destinations: 0}, {edges: 1000}, {destinations: 1000}):
        total = 0
        for storage, tensor in saved.items():
            nbytes: Any = tensor.untyped_storage().nbytes()
            if not isinstance(nbytes, int):
                nbytes = int(nbytes.node.expr.subs({edges: 0, destinations: 0} | numbers))
            total += nbytes * wider.get(storage, 1)
        totals.append(total)
    fixed, with_edges, with_nodes = totals
    return (with_edges - fixed) / 1000, (with_nodes - fixed) / 1000, fixed

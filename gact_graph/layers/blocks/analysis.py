"""The questions that a traced graph answers about one layer in one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.graph import Dependencies, EdgeGraph, storages_of
from gact_graph.layers.blocks.locality import prove
from gact_graph.layers.blocks.match_attention import match_attention
from gact_graph.layers.blocks.match_sum import match_messages, match_weights
from gact_graph.layers.blocks.sums.weighted_sum import WeightedSum
from gact_graph.layers.blocks.trace import Trace, trace
from gact_graph.support.reach import Reach


@dataclass(frozen=True)
class BaselineSaves:
    """The tensors that stock autograd would save in a call.

    Attributes:
        by_edge: Bytes for each edge of tensors that the call makes.
        by_node: Bytes for each destination node.
        fixed: Bytes whatever the graph.
        arguments: Indices of the tensors in ``Arguments.tensors`` that are saved themselves.
        constants: Numbers of the tensors in ``LayerAnalysis.constants`` that are saved.
        edge_index: Whether the ends of the edges are saved.
        result: Whether the result of the call is saved.
        attributes: The attributes in which the layer leaves a tensor that is saved.
    """

    by_edge: float = 0.0
    by_node: float = 0.0
    fixed: float = 0.0
    arguments: frozenset[int] = frozenset()
    constants: frozenset[int] = frozenset()
    edge_index: bool = False
    result: bool = False
    attributes: frozenset[str] = frozenset()

    def nbytes(self, num_edges: int, num_destinations: int) -> int:
        """Bytes of the tensors that the call makes, without its arguments and its result."""
        return round(self.by_edge * num_edges + self.by_node * num_destinations + self.fixed)


@dataclass(frozen=True)
class LayerAnalysis:
    """All that blocks need to know of an edge function in one state of its layer.

    Attributes:
        kept: The attributes in which the layer leaves a tensor with a row for each edge.
        constants: For each tensor that the layer reads beside its arguments, its number in
            ``Reach.tensors``.
        forward: Gives the result, then the tensors of ``kept``.
        backward: The graph that backward runs again: like ``forward``, but with the messages in
            place of the result where that is their sum.
        sums: Whether ``backward`` gives messages.
        never_read: The numbers of the inputs (tensors, then constants) whose values backward does
            not read.
        baseline: The tensors that stock autograd would save.
        weighted_sum: The sum that is the result; None if the result is something else.
        attention: The attention that operators compute; None if there is none.
    """

    kept: tuple[str, ...]
    constants: tuple[int, ...]
    forward: EdgeGraph
    backward: EdgeGraph
    sums: bool
    never_read: frozenset[int]
    baseline: BaselineSaves
    weighted_sum: WeightedSum | None
    attention: Attention | None


def analyse(
    edge_function: EdgeFunction, module: object, arguments: Arguments, reach: Reach
) -> LayerAnalysis:
    """Trace an edge function, prove that it may run in blocks, and analyse its graph.

    Raises:
        CannotBlock: It may not run in blocks, or there is no proof.
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
    return LayerAnalysis(
        traced.kept,
        traced.constants,
        EdgeGraph(traced, dependencies, traced.outputs),
        EdgeGraph(traced, dependencies, again),
        messages is not None,
        _never_read(traced, dependencies, again, arguments, reach),
        _baseline(traced, dependencies, arguments, reach),
        weighted_sum,
        match_attention(edge_function, traced, dependencies, messages, arguments, reach),
    )


def _never_read(
    traced: Trace,
    dependencies: Dependencies,
    again: Sequence[fx.Node],
    arguments: Arguments,
    reach: Reach,
) -> frozenset[int]:
    """Inputs on which no tensor depends that backward saves when it runs the graph again."""
    runs = dependencies.closure(again)
    saved = {dependencies.of_storage.get(t.untyped_storage()._cdata) for t in traced.saved}
    if None in saved:  # a tensor of unknown origin
        return frozenset()
    # Autograd itself copies a tensor that an operation saves and changes in place: no output depends
    # on such a copy.
    forward = dependencies.closure(traced.outputs)
    read = dependencies.closure(node for node in saved if node in runs or node not in forward)
    tensors = [*arguments.tensors, *(reach.tensors[i][1] for i in traced.constants)]
    used = {number for node, number in _numbered(traced, arguments) if node in read}
    return frozenset(
        number
        for number, tensor in enumerate(tensors)
        if tensor.is_floating_point() and tensor.dim() and number not in used
    )


def _numbered(traced: Trace, arguments: Arguments) -> list[tuple[fx.Node, int]]:
    """Each placeholder of a tensor, with the number of the call's input that it stands for."""
    numbers: dict[str | int, int] = {use.parameter: use.index for use in arguments.uses}
    numbers |= {i: len(arguments.names) + i for i in range(len(traced.constants))}
    return [(node, numbers[name]) for name, node in traced.placeholders.items() if name in numbers]


def _baseline(
    traced: Trace, dependencies: Dependencies, arguments: Arguments, reach: Reach
) -> BaselineSaves:
    saved = {tensor.untyped_storage()._cdata: tensor for tensor in traced.saved}

    def take(node: fx.Node) -> bool:
        taken = [saved.pop(storage, None) for storage in storages_of(node)]  # all of them
        return any(tensor is not None for tensor in taken)

    uses = {use.parameter: use for use in arguments.uses}
    taken: set[int] = set()
    constants: set[int] = set()
    for name, node in traced.placeholders.items():
        if isinstance(name, int):
            _, tensor = reach.tensors[traced.constants[name]]
            if take(node) and not isinstance(tensor, nn.Parameter):
                constants.add(name)
        elif name in uses and uses[name].level in ("node", "edge", "whole") and take(node):
            taken.add(uses[name].index)
    ends = [take(traced.placeholders[name]) for name in ("index", "edge_index_j")]
    result, *kept = traced.outputs
    attributes = {name for name, node in zip(traced.kept, kept, strict=True) if take(node)}
    is_result = take(result)
    by_edge, by_node, fixed = _linear(traced, saved, _float_masks(traced))
    gathers = any(
        arguments.tensors[use.index].requires_grad
        for use in arguments.uses
        if use.level in ("source", "destination")
    )
    return BaselineSaves(
        by_edge,
        by_node,
        fixed,
        frozenset(taken),
        frozenset(constants),
        any(ends) or gathers,
        is_result,
        frozenset(attributes),
    )


def _float_masks(traced: Trace) -> dict[int, int]:
    """The storages of dropout masks, with the bytes of an element that stock PyTorch has of them.

    On a CPU, dropout keeps a mask of floating-point numbers; the graph has one of booleans.
    """
    masks: dict[int, int] = {}
    for node in traced.graph.nodes:
        if node.target is torch.ops.aten.native_dropout.default:
            out, mask = node.meta["val"]
            if out.device.type == "cpu":
                masks[mask.untyped_storage()._cdata] = out.dtype.itemsize
    return masks


def _linear(
    traced: Trace, saved: Mapping[int, Tensor], wider: Mapping[int, int]
) -> tuple[float, float, float]:
    """The bytes of storages by edge, by destination, and beside these."""
    edges, destinations = traced.symbols.edges, traced.symbols.destinations
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


def needs_graph(arguments: Arguments, tensors: Sequence[Tensor]) -> bool:
    """Whether a call has a gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in (*arguments.tensors, *tensors))

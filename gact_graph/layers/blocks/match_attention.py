"""Attention for which operators exist, recognized by comparing traced graphs.

The graph of a layer is compared with the graph of a reference for the attention of GATConv,
GATv2Conv or TransformerConv. Equal graphs compute the same; no class is recognized by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.utils import scatter, softmax

from gact_graph.layers.blocks.arguments import Arguments, Use, constant_name
from gact_graph.layers.blocks.attention import Attention, LeakyAttention, SumAttention
from gact_graph.layers.blocks.dot_attention import DotAttention
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.graph import Dependencies
from gact_graph.layers.blocks.match_sum import Messages
from gact_graph.layers.blocks.trace import Trace, trace
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support.reach import Reach

aten = torch.ops.aten

_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


def match_attention(
    traced: Trace,
    dependencies: Dependencies,
    messages: Messages | None,
    arguments: Arguments,
    reach: Reach,
) -> Attention | None:
    """Return the attention that a layer computes; None if no operator computes the same.

    Args:
        traced: The trace of the layer.
        dependencies: The dependencies between its nodes.
        messages: The messages that the layer sums; None if its result is no sum.
        arguments: The arguments of a call.
        reach: The tensors that the layer reads beside the arguments.
    """
    tensors = arguments.tensors
    if any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors) or makes_messages(tensors[0].device):
        return None
    of_nodes = [t for i, t in enumerate(tensors) if arguments.levels_of(i) != {"edge"}]
    if len({t.dtype for t in tensors}) != 1 or len({t.shape[1:] for t in of_nodes}) != 1:
        return None
    layer = _Layer(traced, dependencies, arguments, reach)
    if not layer.has(aten.exp.default):
        return None
    return layer.attention(of_edges=messages is None)


@dataclass(frozen=True)
class _Settings:
    """The numbers in a layer's graph that a reference takes."""

    dropout: float
    slope: float
    divisor: float


class _Layer:
    """The graph of a layer, compared with references."""

    def __init__(
        self, traced: Trace, dependencies: Dependencies, arguments: Arguments, reach: Reach
    ) -> None:
        closure = dependencies.closure(traced.outputs)
        self._traced, self._arguments = traced, arguments
        self._nodes = [node for node in traced.graph.nodes if node in closure]
        self._constants = [reach.tensors[number][1] for number in traced.constants]
        self._settings = _Settings(
            self._number(aten.native_dropout.default, 0.0),
            self._number(aten.leaky_relu.default, 0.01),
            self._number(aten.div.Tensor, 1.0),
        )

    def has(self, function: Any) -> bool:
        """Return whether the graph has an operation."""
        return any(node.target is function for node in self._nodes)

    def attention(self, of_edges: bool) -> Attention | None:
        """Return the attention of an ``edge_update``, or of a ``propagate`` that sums messages."""
        uses, kept, settings = self._arguments.uses, self._traced.kept, self._settings
        sources, destinations, edges = (
            [use for use in uses if use.level == level]
            for level in ("source", "destination", "edge")
        )
        others = len(uses) - len(sources) - len(destinations) - len(edges)
        if len(destinations) != 1 or len(edges) > 1 or others:
            return None
        if len(kept) > 1 or (of_edges and (kept or not self.has(aten.leaky_relu.default))):
            return None
        x = self._arguments.tensors[destinations[0].index]
        kind = _KINDS.get((of_edges, len(sources), x.dim()))
        if kind is None:
            return None
        compute, make = kind
        for source, *values in permutations(sources):
            inputs = [source, *destinations, *values, *edges]
            for parameters in self._parameters(of_edges, x, edges):
                if self._is(compute, inputs, parameters, bool(kept)):
                    first = len(self._arguments.tensors)
                    indices = [use.index for use in inputs] + [first + n for n in parameters]
                    numbers = (settings.slope,) if of_edges else (1 / settings.divisor, bool(kept))
                    return make(tuple(indices), settings.dropout, *numbers)
        return None

    def _parameters(
        self, of_edges: bool, x: Tensor, edges: Sequence[Use]
    ) -> Iterator[tuple[int, ...]]:
        """Yield constants whose shapes fit nodes like x [N, H] or [N, H, C] and edge features."""
        shapes = {n: c.shape for n, c in enumerate(self._constants) if c.dtype == x.dtype}
        if of_edges and x.dim() == 3:
            if not edges:
                yield from ((n,) for n, shape in shapes.items() if shape == (1, *x.shape[1:]))
            return
        if not edges:
            yield ()
            return
        features = self._arguments.tensors[edges[0].index]
        # Autocast would round the rows of edges, which the operator does not make.
        if features.dim() > 2 or torch.is_autocast_enabled(x.device.type):
            return
        width = features[0].numel()
        if of_edges:
            for vector, matrix in permutations(shapes, 2):
                shape = shapes[vector]
                fits = len(shape) == 3 and shape[:2] == (1, x.size(1))
                if fits and shapes[matrix] == (shape.numel(), width):
                    yield matrix, vector
        elif features.dim() == 2:
            rows = x.shape[1:].numel(), width
            yield from ((n,) for n, shape in shapes.items() if shape == rows)

    def _number(self, function: Any, default: float) -> float:
        """Return the second argument of the first operation of a kind, if it is a number."""
        for node in self._nodes:
            if node.target is function:
                value = node.args[1] if len(node.args) > 1 else default
                if isinstance(value, (int, float)):
                    return float(value)
        return default

    def _is(
        self,
        compute: Callable[[_Reference, dict[str, Any]], Tensor],
        inputs: Sequence[Use],
        parameters: Sequence[int],
        keeps: bool,
    ) -> bool:
        """Return whether the layer's graph is the graph of a reference."""
        constants = [self._constants[number] for number in parameters]
        names = [use.parameter for use in inputs]
        reference = _Reference(self._settings, names, constants, keeps)
        function = EdgeFunction("reference", compute, of_edges=compute is not _dot_attention)
        reach = Reach([None])
        reach.tensors = [("", tensor) for tensor in constants]
        other = trace(function, reference, self._arguments, reach)
        pairs = _Pairs(
            self._traced, self._constants, other, [constants[number] for number in other.constants]
        )
        same = len(other.outputs) == len(self._traced.outputs) and all(
            map(pairs.equal, self._traced.outputs, other.outputs)
        )
        return same and all(
            node in pairs.matched or node.op == "placeholder" for node in self._nodes
        )


class _Pairs:
    """The nodes of two graphs that compute the same.

    Args:
        traced: The trace of a layer.
        constants: The tensors of its constants.
        other: The trace of a reference.
        others: The tensors of the constants of the reference.
    """

    def __init__(
        self, traced: Trace, constants: Sequence[Tensor], other: Trace, others: Sequence[Tensor]
    ) -> None:
        self.matched: dict[fx.Node, fx.Node] = {}
        self._leaves = _leaves(traced, constants) | _leaves(other, others)

    def equal(self, node: Any, other: Any) -> bool:
        """Return whether two arguments are the same number, or nodes that compute the same."""
        if isinstance(node, (list, tuple)):
            return (
                isinstance(other, (list, tuple))
                and len(node) == len(other)
                and all(map(self.equal, node, other))
            )
        if not isinstance(node, fx.Node) or not isinstance(other, fx.Node):
            return type(node) is type(other) and bool(node == other)
        if node in self.matched:
            return self.matched[node] is other
        same = self._same(node, other)
        if same:
            self.matched[node] = other
        return same

    def _same(self, node: fx.Node, other: fx.Node) -> bool:
        if node.op != other.op or (node.target is not other.target and node.op != "placeholder"):
            return False
        if node.op == "placeholder":
            left, right = self._leaves[node], self._leaves[other]
            return left is right or (isinstance(left, str) and left == right)
        if node.kwargs.keys() != other.kwargs.keys() or not all(
            self.equal(node.kwargs[key], other.kwargs[key]) for key in node.kwargs
        ):
            return False
        if self.equal(node.args, other.args):
            return True
        return node.target in _COMMUTATIVE and self.equal(node.args[::-1], other.args)


def _leaves(traced: Trace, constants: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Return the name of each input and the tensor of each constant by its placeholder."""
    tensors = {constant_name(number): tensor for number, tensor in enumerate(constants)}
    return {node: tensors.get(name, name) for name, node in traced.placeholders.items()}


class _Reference(nn.Module):
    """The settings and tensors of attention that operators compute.

    Args:
        settings: The numbers of the layer.
        names: The inputs of both ends of the edges, then that of edge features, if any.
        constants: The tensors that are read beside the arguments.
        keeps: Whether the weights are left in an attribute.
    """

    def __init__(
        self, settings: _Settings, names: Sequence[str], constants: Sequence[Tensor], keeps: bool
    ) -> None:
        super().__init__()
        self.settings, self.names, self.constants, self.keeps = settings, names, constants, keeps

    def weights(self, score: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return the weights after dropout, for the scores of edges."""
        weight = softmax(score, inputs["index"], inputs["ptr"], inputs["dim_size"])
        if self.keeps:
            self.weight = weight
        p = self.settings.dropout
        return F.dropout(weight, p=p, training=p > 0)


def _sum_attention(reference: _Reference, inputs: dict[str, Any]) -> Tensor:
    """Run the operations of GATConv: see :class:`SumAttention`."""
    source, destination, *edge = (inputs[name] for name in reference.names)
    score = source + destination
    for features in edge:
        matrix, vector = reference.constants
        rows = F.linear(features.view(-1, 1) if features.dim() == 1 else features, matrix)
        score = score + (rows.view(-1, *vector.shape[1:]) * vector).sum(dim=-1)
    return reference.weights(F.leaky_relu(score, reference.settings.slope), inputs)


def _leaky_attention(reference: _Reference, inputs: dict[str, Any]) -> Tensor:
    """Run the operations of GATv2Conv: see :class:`LeakyAttention`."""
    source, destination = (inputs[name] for name in reference.names)
    rows = F.leaky_relu(destination + source, reference.settings.slope)
    return reference.weights((rows * reference.constants[0]).sum(dim=-1), inputs)


def _dot_attention(reference: _Reference, inputs: dict[str, Any]) -> Tensor:
    """Run the operations of TransformerConv: see :class:`DotAttention`."""
    key, query, value, *edge = (inputs[name] for name in reference.names)
    rows = None
    for features in edge:
        rows = F.linear(features, reference.constants[0]).view(-1, *key.shape[1:])
        key = key + rows
    score = (query * key).sum(dim=-1) / reference.settings.divisor
    weight = reference.weights(score, inputs)
    if rows is not None:
        value = value + rows
    out = value * weight.view(-1, weight.size(1), 1)
    return scatter(out, inputs["index"], 0, inputs["dim_size"], "sum")


_KINDS: dict[tuple[bool, int, int], tuple[Callable[..., Tensor], Callable[..., Attention]]] = {
    (True, 1, 2): (_sum_attention, SumAttention),
    (True, 1, 3): (_leaky_attention, LeakyAttention),
    (False, 2, 3): (_dot_attention, DotAttention),
}
"""References and their operators, by whether the result is of edges, the number of tensors that are
read at sources, and the dimensions of tensors of nodes."""

"""Attention for which operators exist, recognized by comparing traced graphs.

The graph of a layer is compared with the graph of a reference for the attention of GATConv,
GATv2Conv or TransformerConv. Graphs that are equal but for the names of their inputs compute the
same; no class is recognized by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.utils import scatter, softmax

from gact_graph.layers.blocks.arguments import Arguments, EdgeFunction, constant_name
from gact_graph.layers.blocks.attention import Attention, LeakyAttention, SumAttention
from gact_graph.layers.blocks.dot_attention import DotAttention
from gact_graph.layers.blocks.graph import Dependencies
from gact_graph.layers.blocks.match_sum import Messages
from gact_graph.layers.blocks.trace import Trace, trace
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support.reach import Reach

aten: Final = torch.ops.aten

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
    if not _can_be_attention(arguments) or len(traced.kept) > (messages is not None):
        return None
    closure = dependencies.closure(traced.outputs)
    layer = [node for node in traced.graph.nodes if node in closure]
    if all(node.target is not aten.exp.default for node in layer):
        return None
    sources, destinations, edges = (
        [use for use in arguments.uses if use.level == level]
        for level in ("source", "destination", "edge")
    )
    uses = [*sources[:1], *destinations, *sources[1:], *edges]
    if len(destinations) != 1 or len(edges) > 1 or len(uses) != len(arguments.uses):
        return None
    x = arguments.tensors[destinations[0].index]
    kind = _KINDS.get((messages is None, len(sources), x.dim()))
    arguments_and_constants = arguments.with_constants([reach.tensors[n] for n in traced.constants])
    index_of = {traced.placeholders[u.parameter]: u.index for u in arguments_and_constants.uses}
    constants = [
        arguments_and_constants.tensors[index]
        for node, index in index_of.items()
        if node in closure and index >= len(arguments.tensors)
    ]
    constants.sort(key=Tensor.dim)
    features = [arguments.tensors[use.index] for use in edges]
    if kind is None or not _fit(constants, x, features, messages is None):
        return None
    compute, make = kind
    keeps, settings = bool(traced.kept), _settings_of(layer)
    if settings.dropout >= 1:
        return None
    names = [use.parameter for use in uses]
    reference = _Reference(settings, names, constants, keeps)
    of_reference = Reach([None])
    of_reference.tensors = [("", tensor) for tensor in constants]
    function = EdgeFunction("reference", compute, of_edges=messages is None)
    other = trace(function, reference, arguments, of_reference)
    pairs = _Pairs(traced, other, arguments)
    if not pairs.equal(traced.outputs, other.outputs) or any(
        node.op != "placeholder" and node not in pairs.matched for node in layer
    ):
        return None
    names += [constant_name(other.constants.index(number)) for number in range(len(constants))]
    inputs = tuple(index_of[pairs.bound[other.placeholders[name]]] for name in names)
    numbers = (settings.slope,) if messages is None else (1 / settings.divisor, keeps)
    return make(inputs, settings.dropout, *numbers)


def _can_be_attention(arguments: Arguments) -> bool:
    """Return whether the operators take tensors such as the arguments."""
    tensors = arguments.tensors
    of_nodes = [t for i, t in enumerate(tensors) if arguments.levels_of(i) != {"edge"}]
    return (
        tensors[0].dtype in (torch.float32, torch.float64)
        and len({t.dtype for t in tensors}) == 1
        and len({t.shape[1:] for t in of_nodes}) == 1
        and all(t.is_contiguous() for t in tensors)
        and not makes_messages(tensors[0].device)
    )


def _fit(
    constants: Sequence[Tensor], x: Tensor, features: Sequence[Tensor], of_edges: bool
) -> bool:
    """Return whether constants have the shapes of those that a reference reads.

    Args:
        constants: The constants, by their numbers of dimensions.
        x: A tensor of nodes [N, H] or [N, H, C].
        features: The features of edges, if any.
        of_edges: Whether the result has a row for each edge.
    """
    expected: list[tuple[int, ...]] = []
    for rows in features:
        # Autocast would round the rows of edges, which the operator does not make.
        if rows.dim() > 2 or torch.is_autocast_enabled(x.device.type):
            return False
        if of_edges and x.dim() == 2:
            channels = constants[-1].size(-1) if constants and constants[-1].dim() else 0
            expected = [(x.size(1) * channels, rows[0].numel()), (1, x.size(1), channels)]
        elif not of_edges and rows.dim() == 2:
            expected = [(x.shape[1:].numel(), rows.size(1))]
        else:
            return False
    if not features and of_edges and x.dim() == 3:
        expected = [(1, *x.shape[1:])]
    return [tuple(constant.shape) for constant in constants] == expected and all(
        constant.dtype == x.dtype for constant in constants
    )


class _Settings(NamedTuple):
    """The numbers in a layer's graph that a reference takes."""

    dropout: float
    slope: float
    divisor: float


def _settings_of(layer: Sequence[fx.Node]) -> _Settings:
    numbers: dict[Any, float] = {}  # the second argument of the first operation of a kind
    for node in layer:
        if len(node.args) > 1 and isinstance(node.args[1], (int, float)):
            numbers.setdefault(node.target, float(node.args[1]))
    return _Settings(
        numbers.get(aten.native_dropout.default, 0.0),
        numbers.get(aten.leaky_relu.default, 0.01),
        numbers.get(aten.div.Tensor, 1.0),
    )


class _Pairs:
    """The nodes of two graphs that compute the same, if the inputs of one are named anew.

    Args:
        traced: The trace of a layer.
        other: The trace of a reference.
        arguments: The arguments of both.

    Attributes:
        matched: The node of the reference for each node of the layer.
        bound: The placeholder of the layer for each of the reference.
    """

    def __init__(self, traced: Trace, other: Trace, arguments: Arguments) -> None:
        self.matched: dict[fx.Node, fx.Node] = {}
        self.bound: dict[fx.Node, fx.Node] = {}
        self._kinds = _kinds(traced, arguments) | _kinds(other, arguments)

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
            same_kind = self._kinds[node] == self._kinds[other]
            return same_kind and self.bound.setdefault(other, node) is node
        if node.kwargs.keys() != other.kwargs.keys() or not all(
            self.equal(node.kwargs[key], other.kwargs[key]) for key in node.kwargs
        ):
            return False
        before = self.matched.copy(), self.bound.copy()
        if self.equal(node.args, other.args):
            return True
        self.matched, self.bound = before
        return node.target in _COMMUTATIVE and self.equal(node.args[::-1], other.args)


def _kinds(traced: Trace, arguments: Arguments) -> dict[fx.Node, object]:
    """Return for each placeholder the level of its rows, its shape as a constant, or its name."""
    levels = {use.parameter: use.level for use in arguments.uses}
    return {
        node: levels.get(name, name) if name in traced.inputs else node.meta["val"].shape
        for name, node in traced.placeholders.items()
    }


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

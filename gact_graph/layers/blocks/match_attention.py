"""Attention for which there are operators, found by comparing traced graphs.

The graph of a layer is compared with that of a reference, which computes GATConv's, GATv2Conv's or
TransformerConv's attention. Equal graphs compute the same; no kind of layer is known by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.utils import scatter, softmax

from gact_graph.layers.blocks.arguments import Arguments, Use
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.dot_attention import DotAttention
from gact_graph.layers.blocks.edge_attention import LeakyAttention, SumAttention
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.edge_rows import EdgeRows
from gact_graph.layers.blocks.edge_terms import EdgeTerms
from gact_graph.layers.blocks.graph import Dependencies
from gact_graph.layers.blocks.match_sum import Messages
from gact_graph.layers.blocks.trace import Trace, trace
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support.reach import Reach

aten = torch.ops.aten

_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


def match_attention(
    edge_function: EdgeFunction,
    traced: Trace,
    dependencies: Dependencies,
    messages: Messages | None,
    arguments: Arguments,
    reach: Reach,
) -> Attention | None:
    """The attention that a layer computes; None if there is no operator for it.

    Args:
        edge_function: The function that runs for each block.
        traced: Its trace.
        dependencies: Those of the trace.
        messages: The messages that the function adds up, if it does.
        arguments: Those of one call.
        reach: The tensors that the layer reads beside them.
    """
    tensors = arguments.tensors
    if any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors) or makes_messages(tensors[0].device):
        return None
    of_nodes = [t for i, t in enumerate(tensors) if arguments.levels_of(i) != {"edge"}]
    if len({t.dtype for t in tensors}) != 1 or len({t.shape[1:] for t in of_nodes}) != 1:
        return None
    layer = _Layer(edge_function, traced, dependencies, arguments, reach)
    if not layer.has(aten.exp.default):
        return None
    return layer.edge_attention() if messages is None else layer.dot_attention()


@dataclass(frozen=True)
class _Settings:
    """The numbers in a layer's graph that a reference takes."""

    dropout: float
    slope: float
    divisor: float


class _Layer:
    """A layer's graph, and what it is compared with."""

    def __init__(
        self,
        edge_function: EdgeFunction,
        traced: Trace,
        dependencies: Dependencies,
        arguments: Arguments,
        reach: Reach,
    ) -> None:
        self._edge_function, self._traced = edge_function, traced
        self._nodes = [
            node for node in traced.graph.nodes if node in dependencies.closure(traced.outputs)
        ]
        self._arguments, self._reach = arguments, reach
        self._learning = [reach.tensors[number][1] for number in traced.constants]
        self._settings = _Settings(
            self._number(aten.native_dropout.default, 1, 0.0),
            self._number(aten.leaky_relu.default, 1, 0.01),
            self._number(aten.div.Tensor, 1, 1.0),
        )

    def has(self, function: Any) -> bool:
        """Whether the graph has such an operation."""
        return any(node.target is function for node in self._nodes)

    def edge_attention(self) -> Attention | None:
        """The attention of an ``edge_update``."""
        arguments = self._arguments
        uses = {use.level: use for use in arguments.uses}
        if len(uses) != len(arguments.uses) or uses.keys() - {"edge"} != {"source", "destination"}:
            return None
        if not self.has(aten.leaky_relu.default) or self._traced.kept:
            return None
        source, destination = uses["source"], uses["destination"]
        x = arguments.tensors[source.index]
        settings = self._settings
        common = source.index, destination.index, settings.dropout, settings.slope
        ends = source.parameter, destination.parameter
        if x.dim() == 2:
            for terms in self._terms(uses.get("edge"), x):
                read = () if terms is None else terms.parameters
                if self._is(_Sums(settings, ends, uses.get("edge"), self._tensors(read))):
                    return SumAttention(*common, terms)
        if x.dim() == 3 and "edge" not in uses:
            for att, tensor in enumerate(self._learning):
                fits = tensor.shape == (1, *x.shape[1:]) and tensor.dtype == x.dtype
                if fits and self._is(_Rows(settings, ends, None, self._tensors((att,)))):
                    return LeakyAttention(*common, att)
        return None

    def dot_attention(self) -> Attention | None:
        """The attention of a ``propagate`` that adds up messages."""
        arguments = self._arguments
        levels = sorted(use.level for use in arguments.uses if use.level != "edge")
        edges = [use for use in arguments.uses if use.level == "edge"]
        kept = self._traced.kept
        if levels != ["destination", "source", "source"] or len(edges) > 1 or len(kept) > 1:
            return None
        (query,) = (use for use in arguments.uses if use.level == "destination")
        x = arguments.tensors[query.index]
        if x.dim() != 3:
            return None
        use, settings = (edges[0] if edges else None), self._settings
        for key, value in permutations(u for u in arguments.uses if u.level == "source"):
            for rows in self._rows(use, x):
                read = () if rows is None else (rows.matrix,)
                names = query.parameter, key.parameter, value.parameter
                if self._is(_Products(settings, names, use, self._tensors(read), bool(kept))):
                    common = key.index, query.index, settings.dropout, value.index
                    return DotAttention(*common, 1 / settings.divisor, bool(kept), rows)
        return None

    def _terms(self, use: Use | None, x: Tensor) -> Iterator[EdgeTerms | None]:
        """The terms of edges that may be added to scores x [N, H], by the shapes of parameters."""
        if use is None:
            yield None
            return
        features, device = self._arguments.tensors[use.index], x.device.type
        # Autocast would round rows of edges, and not the same without such rows.
        if features.dim() > 2 or torch.is_autocast_enabled(device):
            return
        width = features[0].numel()
        for vector, matrix in permutations(range(len(self._learning)), 2):
            left, right = self._learning[vector], self._learning[matrix]
            if not left.dtype == right.dtype == x.dtype or left.dim() != 3:
                continue
            if left.shape[:2] == (1, x.size(1)) and right.shape == (left.numel(), width):
                yield EdgeTerms(use.index, matrix, vector)

    def _rows(self, use: Use | None, x: Tensor) -> Iterator[EdgeRows | None]:
        """The rows of edges that may be added to keys and values like x [N, H, C]."""
        if use is None:
            yield None
            return
        features = self._arguments.tensors[use.index]
        if features.dim() != 2 or torch.is_autocast_enabled(x.device.type):
            return
        shape = x.shape[1:].numel(), features.size(1)
        for number, matrix in enumerate(self._learning):
            if matrix.shape == shape and matrix.dtype == x.dtype:
                yield EdgeRows(use.index, number)

    def _tensors(self, numbers: Sequence[int]) -> list[Tensor]:
        return [self._learning[number] for number in numbers]

    def _number(self, function: Any, position: int, default: float) -> float:
        """A number that the first operation of a kind gets."""
        for node in self._nodes:
            if node.target is function:
                value = node.args[position] if position < len(node.args) else default
                if isinstance(value, (int, float)):
                    return float(value)
        return default

    def _is(self, reference: _Reference) -> bool:
        """Whether the layer's graph is that of a reference."""
        function = EdgeFunction(_compute, self._edge_function.of_edges)
        other = trace(function, reference, self._arguments, _References(reference.read))
        pairs = _Pairs(self._traced, other, self._reach, reference.read)
        same = len(other.outputs) == len(self._traced.outputs) and all(
            map(pairs.equal, self._traced.outputs, other.outputs)
        )
        return same and all(
            node in pairs.matched or node.op == "placeholder" for node in self._nodes
        )


def _compute(reference: _Reference, given: dict[str, Any]) -> Tensor:
    return reference.compute(given)


class _References(Reach):
    """The tensors of a reference, which reaches nothing else."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__([None])
        self.tensors = [("", tensor) for tensor in tensors]


class _Pairs:
    """The nodes of two graphs that compute the same."""

    def __init__(self, traced: Trace, other: Trace, reach: Reach, read: Sequence[Tensor]) -> None:
        self.matched: dict[fx.Node, fx.Node] = {}
        self._inputs = {node: name for name, node in traced.placeholders.items()}
        self._others = {node: name for name, node in other.placeholders.items()}
        self._constants = [reach.tensors[number][1] for number in traced.constants]
        self._read = [read[number] for number in other.constants]

    def equal(self, node: Any, other: Any) -> bool:
        """Whether two arguments are the same number, or nodes that compute the same."""
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
            name, expected = self._inputs[node], self._others[other]
            if isinstance(name, int) and isinstance(expected, int):
                return self._constants[name] is self._read[expected]
            return name == expected
        if node.kwargs.keys() != other.kwargs.keys() or not all(
            self.equal(node.kwargs[key], other.kwargs[key]) for key in node.kwargs
        ):
            return False
        if self.equal(node.args, other.args):
            return True
        return node.target in _COMMUTATIVE and self.equal(node.args[::-1], other.args)


class _Reference(nn.Module):
    """Attention that operators compute, written as PyG's layer is.

    Args:
        settings: The numbers of the layer.
        names: The parameters that get the tensors at both ends of the edges.
        use: The parameter that gets the features of edges; None for none.
        read: The tensors that are read beside the arguments.
        keeps: Whether the weights are left in an attribute.
    """

    def __init__(
        self,
        settings: _Settings,
        names: Sequence[str],
        use: Use | None,
        read: Sequence[Tensor],
        keeps: bool = False,
    ) -> None:
        super().__init__()
        self.settings, self.names, self.use = settings, names, use
        self.read, self.keeps = read, keeps

    def compute(self, given: dict[str, Any]) -> Tensor:
        """The result for the edges of a block."""
        raise NotImplementedError

    def _weights(self, score: Tensor, given: dict[str, Any]) -> Tensor:
        return softmax(score, given["index"], given["ptr"], given["dim_size"])

    def _dropped(self, weight: Tensor) -> Tensor:
        p = self.settings.dropout
        return F.dropout(weight, p=p, training=p > 0)


class _Sums(_Reference):
    """The operations of GATConv: see :class:`SumAttention`."""

    def compute(self, given: dict[str, Any]) -> Tensor:
        source, destination = self.names
        score = given[source] + given[destination]
        if self.use is not None:
            matrix, vector = self.read
            features = given[self.use.parameter]
            rows = F.linear(features.view(-1, 1) if features.dim() == 1 else features, matrix)
            score = score + (rows.view(-1, *vector.shape[1:]) * vector).sum(dim=-1)
        score = F.leaky_relu(score, self.settings.slope)
        return self._dropped(self._weights(score, given))


class _Rows(_Reference):
    """The operations of GATv2Conv: see :class:`LeakyAttention`."""

    def compute(self, given: dict[str, Any]) -> Tensor:
        source, destination = self.names
        rows = F.leaky_relu(given[destination] + given[source], self.settings.slope)
        score = (rows * self.read[0]).sum(dim=-1)
        return self._dropped(self._weights(score, given))


class _Products(_Reference):
    """The operations of TransformerConv: see :class:`DotAttention`."""

    def compute(self, given: dict[str, Any]) -> Tensor:
        query, key, value = self.names
        keys, values, rows = given[key], given[value], None
        if self.use is not None:
            rows = F.linear(given[self.use.parameter], self.read[0]).view(-1, *keys.shape[1:])
            keys = keys + rows
        score = (given[query] * keys).sum(dim=-1) / self.settings.divisor
        weight = self._weights(score, given)
        if self.keeps:
            self.weight = weight
        left = self._dropped(weight)
        if rows is not None:
            values = values + rows
        out = values * left.view(-1, left.size(1), 1)
        return scatter(out, given["index"], 0, given["dim_size"], "sum")

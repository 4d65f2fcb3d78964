"""The part of a saved tensor that a traced backward reads.

AOTAutograd, the tracer of ``torch.compile``, hands over the graph of the backward. Each node is an
operation of ATen, so what backward reads of a tensor is proven from the operations that the tensor
reaches: with noise of mean zero in a polynomial of degree 1, gradients stay unbiased; degree 2 is
that of normalizations and of the derivatives of ``tanh`` and ``sigmoid``. Other functions, and
comparisons, get the exact tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem

import torch
from torch import Tensor, fx

from gact_graph.codecs.reads import EXACT, VALUES, Reads, Values
from gact_graph.support.symbols import expected

_aten, _prims = torch.ops.aten, torch.ops.prims

_VIEWS = {
    *(_aten.view, _aten.reshape, _aten._unsafe_view, _aten.permute, _aten.t, _aten.transpose),
    *(_aten.expand, _aten.unsqueeze, _aten.squeeze, _aten.select, _aten.slice, _aten.split),
    *(_aten.clone, _aten.alias, _aten.detach, getitem),
}

# Views, copies and sums: of the degree of their arguments.
_SUMS = _VIEWS | {
    *(_aten.add, _aten.sub, _aten.neg, _aten.sum, _aten.mean, _aten.cat, _aten.stack),
    *(_aten._to_copy, _prims.convert_element_type, _aten.constant_pad_nd, _aten.repeat),
    *(_aten.slice_scatter, _aten.select_scatter),
}

# Products: of the sum of the degrees of their arguments.
_PRODUCTS = {_aten.mul, _aten.mm, _aten.bmm, _aten.dot, _aten.mv, _aten.addmm, _aten.baddbmm}

# Smooth and bounded functions, whose mean hardly moves with noise.
_BOUNDED = {_aten.erf, _aten.sin, _aten.cos, _aten.tanh, _aten.sigmoid}

# By operation, the place of the argument that is an index. Rows of the others are taken or added.
_INDEXED = {
    **dict.fromkeys((_aten.index, _aten._unsafe_index, _aten.embedding), 1),
    **dict.fromkeys((_aten.index_put, _aten._unsafe_index_put), 1),
    **dict.fromkeys((_aten.index_select, _aten.gather, _aten.scatter), 2),
    **dict.fromkeys((_aten.scatter_add, _aten.index_add), 2),
}

_EDGE_BACKWARD = "gact_graph_edges.edge_backward"
"""The operator of :mod:`gact_graph.layers.blocks.graph_operators`."""

_INT32 = torch.iinfo(torch.int32)

_MOST = 2
"""The highest degree."""

_SQUARED = Values(least_bits=4)
"""The mean of squared noise is not zero: at 4 bits it is negligible."""

_EXPONENT = Values(least_bits=16)
"""The mean of exp(noise) is not 1: at 16 bits the error is half the square of 1e-5."""


def reads_in(graph: fx.Graph, name: str) -> Reads:
    """Return the part of a saved tensor of floating-point numbers that backward reads.

    Args:
        graph: The graph of the backward.
        name: The name of its input.
    """
    degrees: dict[fx.Node, int] = {}
    least = VALUES
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name == name:
                degrees[node] = 1
            continue
        if node.op == "output" or not any(used in degrees for used in node.all_input_nodes):
            continue
        found = _degree(node, degrees)
        if found is None:
            return EXACT
        degree, values = found
        least = max(least, values, key=lambda reads: reads.least_bits)
        if degree:
            degrees[node] = degree
    if max(degrees.values(), default=1) == _MOST:
        return max(least, _SQUARED, key=lambda reads: reads.least_bits)
    return least


def is_index_in(graph: fx.Graph, name: str) -> bool:
    """Return whether backward uses a saved tensor of integers as an index alone, of 32 bits.

    Args:
        graph: The graph of the backward.
        name: The name of its input.
    """
    copies = {node for node in graph.nodes if node.op == "placeholder" and node.name == name}
    for node in graph.nodes:
        if not any(used in copies for used in node.all_input_nodes):
            continue
        packet = packet_of(node)
        if packet in _INDEXED:
            others = [arg for i, arg in enumerate(node.args) if i != _INDEXED[packet]]
            indexed = [node, *(other for arg in others for other in _nodes(arg))]
            if any(other in copies or _is_huge(other) for other in indexed):
                return False
        elif packet in _VIEWS:
            copies.add(node)
        else:
            return False
    return True


def has_factor_by_column(graph: fx.Graph, name: str) -> bool:
    """Return whether backward adds or multiplies by a number for each column of a saved matrix.

    Norms over the rows do. Each number has its own gradient, and the scales of columns may differ.

    Args:
        graph: The graph of the backward.
        name: The name of its input that is the matrix.
    """
    for node in graph.nodes:
        if packet_of(node) in (_aten.add, _aten.sub, _aten.mul) and _nodes(node.args[:1])[:1]:
            x, other = node.args[:2]
            if x.name == name and isinstance(other, fx.Node) and _is_row(other, x.meta["val"]):
                return True
    return False


def _degree(node: fx.Node, degrees: dict[fx.Node, int]) -> tuple[int, Values] | None:
    """Return the degree of a node in the saved tensor, 0 for a constant, and the least bits.

    None if it is no polynomial of a small degree.
    """
    packet, value = packet_of(node), node.meta.get("val")
    # The bits of a number, and numbers that are rounded, are no functions of its mean.
    if node.target is _aten.view.dtype or node.kwargs.get("rounding_mode") is not None:
        return None
    if isinstance(value, Tensor) and not value.is_floating_point():
        return None
    own = [degrees.get(used, 0) for used in node.all_input_nodes]
    if packet in _SUMS:
        return max(own), VALUES
    if packet in _PRODUCTS:
        degree = sum(degrees.get(arg, 0) for arg in node.args if isinstance(arg, fx.Node))
        return (degree, VALUES) if degree <= _MOST else None
    if str(packet) == "prims.fma":  # a product and a sum; inductor defines it
        factors = sum(degrees.get(arg, 0) for arg in _nodes(node.args[:2]))
        degree = max(factors, *own)
        return (degree, VALUES) if degree <= _MOST else None
    if packet in _INDEXED:
        index = _nodes(node.args[_INDEXED[packet]])
        return None if any(part in degrees for part in index) else (max(own), VALUES)
    if packet is _aten.div:
        return None if _depends(node.args[1], degrees) else (max(own), VALUES)
    if packet is _aten.where:
        return None if _depends(node.args[0], degrees) else (max(own), VALUES)
    if packet is _aten.pow:
        twice = node.args[1] == 2 and own[0] == 1
        return (_MOST, VALUES) if twice else None
    if str(packet) == _EDGE_BACKWARD:
        # As for layers in blocks that are not compiled: products of their inputs and the gradient.
        tensors, gradients = (
            max((degrees.get(arg, 0) for arg in _nodes(node.args[place])), default=0)
            for place in (1, 3)
        )
        degree = tensors + gradients
        return (degree, VALUES) if degree <= _MOST else None
    if packet in _BOUNDED and max(own) == 1:
        return 1, VALUES
    if packet is _aten.exp:
        return (1, VALUES) if _is_gaussian(node.args[0]) else (1, _EXPONENT)
    return None


def _is_huge(node: fx.Node) -> bool:
    """Return whether an index of 32 bits may be too short for a tensor."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and expected(value.numel()) > _INT32.max


def _is_row(node: fx.Node, matrix: Tensor) -> bool:
    """Return whether a tensor has a number for each column, and no other dimension than 1.

    Sizes that the compiler does not know are left alone: a comparison would fix them.
    """
    sizes = [n if isinstance(n, int) else None for n in node.meta["val"].shape]
    return sizes[-1:] == [matrix.shape[-1]] and all(n == 1 for n in sizes[:-1])


def _is_gaussian(exponent: object) -> bool:
    """Return whether a number is a negative multiple of a square: its exponential is bounded."""
    if not isinstance(exponent, fx.Node) or packet_of(exponent) is not _aten.mul:
        return False
    square, factor = exponent.args[:2]
    if not isinstance(square, fx.Node) or not isinstance(factor, float) or factor >= 0:
        return False
    return packet_of(square) is _aten.mul and square.args[0] is square.args[1]


def _depends(value: object, degrees: dict[fx.Node, int]) -> bool:
    return isinstance(value, fx.Node) and value in degrees


def _nodes(value: object) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [n for n in value if isinstance(n, fx.Node)] if isinstance(value, (list, tuple)) else []


def packet_of(node: fx.Node) -> Callable[..., object] | str:
    """Return the operation of a node, without its overload."""
    packet: Callable[..., object] | str = getattr(node.target, "overloadpacket", node.target)
    return packet

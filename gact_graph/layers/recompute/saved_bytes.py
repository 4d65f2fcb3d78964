"""Estimates of the memory that a layer takes, before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gact_graph.support.storage import tensors_in
from gact_graph.support.symbols import expected, expected_bytes
from gact_graph.support.torch_private import TRACED_TENSORS, tree_leaves


def most_saved(module: nn.Module, arguments: Any) -> int:
    """Return the approximate bytes of the inputs of a layer and of one tensor of messages.

    The arguments have values.
    """
    inputs = (t for t in _tensors_in(arguments) if t.is_floating_point())
    return round(sum(map(expected_bytes, inputs)) + message_bytes(module, arguments))


def message_bytes(module: nn.Module, arguments: Any) -> float:
    """Return the approximate bytes of one tensor of messages.

    Args:
        module: The layer.
        arguments: The arguments of its call. The longest index is taken for that of the edges; a
            message has the width of the widest row of a tensor or the largest size of a parameter.
    """
    tensors = [*_tensors_in(arguments)]
    edges = max((expected(t.size(-1)) for t in tensors if not t.is_floating_point()), default=0)
    widths = [
        expected_bytes(t) / max(1, expected(t.size(0))) for t in tensors if t.is_floating_point()
    ]
    widths += [4 * max(p.shape, default=1) for p in module.parameters() if not is_lazy(p)]
    return edges * max(widths, default=0)


def _tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield tensors that are no scalars, with values or as a compiler traces them."""
    for leaf in tree_leaves(arguments):
        tensors: Iterable[Tensor] = tensors_in(leaf)
        if isinstance(leaf, Tensor) and isinstance(leaf, TRACED_TENSORS):
            tensors = [leaf]
        yield from (tensor for tensor in tensors if tensor.dim())

"""Estimates of the memory that a layer takes, before it runs."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from gact_graph.support.storage import tensors_in


def most_saved(module: nn.Module, arguments: Any) -> int:
    """Return the approximate bytes of the inputs of a layer and of one tensor of messages."""
    inputs = (t for t in tensors_in(arguments) if t.dim() and t.is_floating_point())
    return sum(t.nbytes for t in inputs) + message_bytes(module, arguments)


def message_bytes(module: nn.Module, arguments: Any) -> int:
    """Return the approximate bytes of one tensor of messages.

    Args:
        module: The layer.
        arguments: The arguments of its call. The longest index is taken for that of the edges; a
            message has the width of the widest row of a tensor or the largest size of a parameter.
    """
    tensors = [t for t in tensors_in(arguments) if t.dim()]
    edges = max((t.size(-1) for t in tensors if not t.is_floating_point()), default=0)
    widths = [t.nbytes // max(1, t.size(0)) for t in tensors if t.is_floating_point()]
    widths += [4 * max(p.shape, default=1) for p in module.parameters() if not is_lazy(p)]
    return edges * max(widths, default=0)

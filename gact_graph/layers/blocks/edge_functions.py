"""The functions of a message passing layer that run for each block.

They call the layer's own ``message``, ``aggregate``, ``update`` and ``edge_update`` as PyG's
``propagate`` and ``edge_updater`` do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, MeanAggregation, SumAggregation


def _no_sum(module: Any) -> EdgeFunction | None:
    return None


@dataclass(frozen=True)
class EdgeFunction:
    """What runs for each block.

    Attributes:
        run: Gets the module and its arguments for the block by name, and gives a row for each edge
            or for each destination node.
        of_edges: Whether the result has a row for each edge.
        messages_of: For a module whose result is no more than a sum of messages, what makes
            these messages; else None. A mean is the sum of shares.
    """

    run: Callable[[Any, dict[str, Any]], Tensor]
    of_edges: bool
    messages_of: Callable[[Any], EdgeFunction | None] = _no_sum

    def __call__(self, module: Any, given: dict[str, Any]) -> Tensor:
        return self.run(module, given)

    def in_backward(self, module: Any) -> EdgeFunction:
        """What backward computes again: the gradient of a sum needs its messages, and no sum."""
        return self.messages_of(module) or self


def shares_of(messages: Callable[[Any, dict[str, Any]], Tensor]) -> EdgeFunction:
    """Messages [E, ...], each divided by the number of edges of its destination.

    Their sum is the mean of the messages.

    Args:
        messages: Gives the messages, from the layer and what is given to it.
    """
    return EdgeFunction(functools.partial(_shares, messages=messages), of_edges=True)


def _shares(
    module: Any, given: dict[str, Any], messages: Callable[[Any, dict[str, Any]], Tensor]
) -> Tensor:
    made = messages(module, given)
    index = given["index"]
    # A half-precision count would stop at a few hundred edges.
    kind = torch.promote_types(made.dtype, torch.float32)
    ones = torch.ones((), dtype=kind, device=index.device).expand(index.size(0))
    count = torch.zeros(given["dim_size"], dtype=kind, device=index.device)
    count.index_add_(0, index, ones)
    share = count.reciprocal_().index_select(0, index).to(made.dtype)
    return made * share.view(-1, *(1 for _ in made.shape[1:]))


def is_sum(module: MessagePassing) -> bool:
    """Whether ``propagate`` only adds up messages, so that each has the gradient of its sum."""
    return _only_joins(module, SumAggregation)


def _only_joins(module: MessagePassing, how: type[Aggregation]) -> bool:
    kind = type(module)
    plain = all(
        getattr(kind, name) is getattr(MessagePassing, name) and name not in vars(module)
        for name in ("aggregate", "update")
    )
    return plain and type(module.aggr_module) is how


def _messages(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    return module.message(**module.inspector.collect_param_data("message", given))


def _propagate(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    collect = module.inspector.collect_param_data
    out = _messages(module, given)
    out = module.aggregate(out, **collect("aggregate", given))
    return module.update(out, **collect("update", given))


def _edge_update(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    return module.edge_update(**module.inspector.collect_param_data("edge_update", given))


def _messages_of(module: MessagePassing) -> EdgeFunction | None:
    if is_sum(module):
        return messages
    return _shares_of_messages if _only_joins(module, MeanAggregation) else None


messages = EdgeFunction(_messages, of_edges=True)
"""``message`` alone: [edges, ...]."""

_shares_of_messages = shares_of(_messages)

propagate = EdgeFunction(_propagate, of_edges=False, messages_of=_messages_of)
"""``message``, ``aggregate`` and ``update``: [destination nodes, ...]."""

edge_update = EdgeFunction(_edge_update, of_edges=True)
"""``edge_update``: [edges, ...]."""

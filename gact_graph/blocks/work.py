"""The functions of a message passing layer that a block runs, as PyG's ``propagate`` calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import SumAggregation

Work = Callable[[MessagePassing, dict[str, Any]], Tensor]


def messages(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    """``message`` alone: [arcs, ...]."""
    return module.message(**module.inspector.collect_param_data("message", given))


def is_sum(module: MessagePassing) -> bool:
    """Whether ``propagate`` only adds messages up, so that their gradient is that of the sum."""
    kind = type(module)
    plain = all(
        getattr(kind, name) is getattr(MessagePassing, name) and name not in vars(module)
        for name in ("aggregate", "update")
    )
    return plain and type(module.aggr_module) is SumAggregation


def propagate(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    """``message``, ``aggregate`` and ``update``: [rows, ...]."""
    collect = module.inspector.collect_param_data
    out = messages(module, given)
    out = module.aggregate(out, **collect("aggregate", given))
    return module.update(out, **collect("update", given))


def edge_update(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    """``edge_update``: [arcs, ...]."""
    return module.edge_update(**module.inspector.collect_param_data("edge_update", given))


def work_again(module: MessagePassing, work: Work) -> Work:
    """What is computed again in backward: a sum needs not be taken to have its gradient."""
    return messages if work is propagate and is_sum(module) else work

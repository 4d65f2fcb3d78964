"""The functions of a message passing layer that run for each block.

They call the layer's own ``message``, ``aggregate``, ``update`` and ``edge_update`` as PyG's
``propagate`` and ``edge_updater`` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing


@dataclass(frozen=True)
class EdgeFunction:
    """A function of the edges of a block.

    Attributes:
        run: Takes the module and its arguments for the block by name, and returns a row for each
            edge or for each destination node.
        of_edges: Whether the result has a row for each edge.
    """

    run: Callable[[Any, dict[str, Any]], Tensor]
    of_edges: bool

    def __call__(self, module: Any, given: dict[str, Any]) -> Tensor:
        return self.run(module, given)


def _propagate(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    collect = module.inspector.collect_param_data
    out = module.message(**collect("message", given))
    out = module.aggregate(out, **collect("aggregate", given))
    return module.update(out, **collect("update", given))


def _edge_update(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    return module.edge_update(**module.inspector.collect_param_data("edge_update", given))


propagate = EdgeFunction(_propagate, of_edges=False)
"""``message``, ``aggregate`` and ``update``: [destination nodes, ...]."""

edge_update = EdgeFunction(_edge_update, of_edges=True)
"""``edge_update``: [edges, ...]."""

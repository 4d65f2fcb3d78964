"""The functions that run for each block, as PyG runs them for all edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from gact_graph.layers.blocks.arguments import nested


@dataclass(frozen=True)
class EdgeFunction:
    """A function of the edges of a block.

    Attributes:
        name: The name of the operation in reports and in the slots of saved tensors.
        run: Takes the module and the inputs of the block by name, and returns a row for each edge
            or for each destination node.
        of_edges: Whether the result has a row for each edge.
        methods: The methods of the layer that the function calls.
    """

    name: str
    run: Callable[[Any, dict[str, Any]], Tensor]
    of_edges: bool
    methods: frozenset[str] = frozenset()


def _propagate(module: MessagePassing, inputs: dict[str, Any]) -> Tensor:
    collect = module.inspector.collect_param_data
    out = module.message(**collect("message", inputs))
    out = module.aggregate(out, **collect("aggregate", inputs))
    return module.update(out, **collect("update", inputs))


def _edge_update(module: MessagePassing, inputs: dict[str, Any]) -> Tensor:
    return module.edge_update(**module.inspector.collect_param_data("edge_update", inputs))


def _edge_model(module: Any, inputs: dict[str, Any]) -> Tensor:
    names = ("src", "dest", "edge_attr", "u", "batch")
    return module(*(nested(inputs, name) for name in names))


propagate = EdgeFunction(
    "propagate", _propagate, of_edges=False, methods=frozenset({"message", "aggregate", "update"})
)
edge_update = EdgeFunction(
    "edge_updater", _edge_update, of_edges=True, methods=frozenset({"edge_update"})
)
edge_model = EdgeFunction("edge_model", _edge_model, of_edges=True)
"""The edge model of a ``MetaLayer``, which gets the rows of both ends as tensors of edges."""

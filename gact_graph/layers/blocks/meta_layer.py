"""The edge model of PyG's ``MetaLayer``, which gets the ends of all edges as tensors of edges."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import MetaLayer

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock
from gact_graph.layers.blocks.collector import Collector, nested
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.supported import checked_edges


def is_stock(layer: MetaLayer) -> bool:
    """Whether the layer has the forward of PyG's class."""
    return type(layer).forward is MetaLayer.forward and "forward" not in vars(layer)


def sort_arguments_of(
    x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any
) -> tuple[Tensor, Arguments]:
    """The edges, and what the edge model gets, from the arguments of the layer.

    Raises:
        CannotBlock: An argument cannot be told.
    """
    edges = checked_edges(edge_index)
    if not isinstance(x, Tensor) or not x.dim():
        raise CannotBlock("gets no tensor")
    nodes = x.size(0)
    collector = Collector()
    collector.add_nested("src", "source", x, "x", nodes)
    collector.add_nested("dest", "destination", x, "x", nodes)
    collector.add_nested("edge_attr", "edge", edge_attr, "edge_attr", edges.size(1))
    collector.add_nested("u", "whole", u, "u")
    collector.add_nested("batch", "source", batch, "batch", nodes)
    return edges, collector.arguments(nodes, nodes)


def _edge_model(module: Any, inputs: dict[str, Any]) -> Tensor:
    names = ("src", "dest", "edge_attr", "u", "batch")
    return module(*(nested(inputs, name) for name in names))


edge_model = EdgeFunction(_edge_model, of_edges=True)
"""What the edge model gives: [edges, ...]."""

"""GCN's normalization on a part: the owners of nodes in the halo provide their degrees."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, scatter

from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.parts import check_edges
from gact_graph.support.patch import Patch


def calls_gcn_norm(module: nn.Module) -> bool:
    """Return whether the forward of a layer's class calls PyG's ``gcn_norm``."""
    forward = type(module).forward
    return (
        isinstance(forward, types.FunctionType)
        and "gcn_norm" in forward.__code__.co_names
        and forward.__globals__.get("gcn_norm") is gcn_norm
    )


class NormalizedForward(Patch):
    """Replace the forward of a layer that :func:`calls_gcn_norm`.

    The replacement runs the same code with :func:`norm_of_part` as ``gcn_norm``. PyG's modules stay
    unchanged.
    """

    def __init__(self, module: nn.Module, exchange: Exchange) -> None:
        # If the layer is the wrapped model itself, the patch of the model calls this patch.
        self._outer = vars(module).pop("forward", None)
        super().__init__(module, "forward")
        self._exchange = exchange
        if self._outer is not None:
            self._outer.previous = self
            vars(module)["forward"] = self._outer

    def run(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the forward of ``module``."""
        stock = type(module).forward
        names = stock.__globals__ | {"gcn_norm": functools.partial(norm_of_part, self._exchange)}
        forward = types.FunctionType(
            stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__
        )
        forward.__kwdefaults__ = stock.__kwdefaults__
        return forward(module, *args, **kwargs)

    def remove(self) -> None:
        """Restore the previous forward."""
        if self._outer is not None:
            self._outer.previous = None
        super().remove()


def norm_of_part(
    exchange: Exchange,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalize the edges of a part as ``torch_geometric.nn.conv.gcn_conv.gcn_norm`` does.

    ``num_nodes`` and ``flow`` are ignored: the part defines the number of nodes, and layers with
    another flow are refused.
    """
    check_edges(edge_index)
    num_nodes = exchange.num_nodes
    if add_self_loops:
        fill = 2.0 if improved else 1.0
        edge_index, edge_weight = add_remaining_self_loops(edge_index, edge_weight, fill, num_nodes)
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    source, destination = edge_index
    degree = scatter(edge_weight, destination, dim_size=num_nodes, reduce="sum")
    root = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    # Exact: these numbers are the same in every step, so that noise would be a bias.
    roots = exchange.extend(root, exact=True)
    return edge_index, roots[source] * edge_weight * root[destination]

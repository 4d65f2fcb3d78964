"""Layers that run on a part: they fetch the rows of their halo before their edge work runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_remaining_self_loops, scatter

from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.norm import NORMS, WholeBatchNorm
from gact_graph.support.patch import Patch

_FUNCTIONS = {"propagate": ("message", "aggregate", "update"), "edge_updater": ("edge_update",)}


class Handle(Protocol):
    """What takes off a patch or a hook again."""

    def remove(self) -> None: ...


def attach(model: nn.Module, exchange: Exchange) -> Iterator[Handle]:
    """Patches the layers; yields what undoes it."""
    yield model.register_forward_pre_hook(exchange.next_step)
    for module in model.modules():
        if isinstance(module, MessagePassing):
            for method, functions in _FUNCTIONS.items():
                yield _EdgeWork(module, method, functions, exchange)
            if type(module) is pyg.GCNConv:
                hooks = _Normalized(exchange)
                yield module.register_forward_pre_hook(hooks.before, with_kwargs=True)
                yield module.register_forward_hook(hooks.after, always_call=True)
        elif type(module) in NORMS and exchange.num_parts > 1:
            yield WholeBatchNorm(module, exchange)


def _check_edges(edge_index: object) -> None:
    """Raises TypeError unless these are pairs of numbers."""
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        raise TypeError(
            "Expected a part's edges as edge_index [2, E] (got "
            f"{type(edge_index).__name__}); pass part.edge_index"
        )


class _EdgeWork(Patch):
    """``propagate`` or ``edge_updater`` of a layer, which is given the halo's rows too."""

    def __init__(
        self, module: Any, method: str, functions: tuple[str, ...], exchange: Exchange
    ) -> None:
        super().__init__(module, method)
        asked = {n for f in functions for n in module.inspector.get_param_names(f)}
        self._lifted = sorted({n[:-2] for n in asked if n.endswith("_j")})
        self._exchange = exchange

    def run(self, module: Any, edge_index: Any, size: Any = None, **given: Any) -> Any:
        """Runs in place of the method of ``module``."""
        _check_edges(edge_index)
        for name in self._lifted:
            value = given.get(name)
            pair = value if isinstance(value, (tuple, list)) else (value, value)
            if isinstance(pair[0], Tensor):
                given[name] = self._exchange.extended(pair[0]), pair[1]
        own = self._exchange.num_nodes
        size = own + self._exchange.num_halo, own
        return self.original(module)(edge_index, size=size, **given)


class _Normalized:
    """Hooks around a GCNConv: the degrees of the halo's nodes are those that their owners know."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._normalizes = False

    def before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Weighs the edges, which the conv then does not do."""
        self._normalizes = module.normalize
        if not module.normalize:
            return None
        given = dict(zip(("x", "edge_index", "edge_weight"), args, strict=False)) | kwargs
        x, edge_index, weight = given["x"], given["edge_index"], given.get("edge_weight")
        _check_edges(edge_index)
        own = self._exchange.num_nodes
        weight = x.new_ones(edge_index.size(1)) if weight is None else weight
        if module.add_self_loops:
            fill = 2.0 if module.improved else 1.0
            edge_index, weight = add_remaining_self_loops(edge_index, weight, fill, own)
        source, destination = edge_index
        degree = scatter(weight, destination, dim_size=own, reduce="sum")
        root = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
        # Exact, for these numbers are the same at every step: their noise would be a bias.
        roots = self._exchange.extended(root, exact=True)
        module.normalize = False
        return (x, edge_index, roots[source] * weight * root[destination]), {}

    def after(self, module: Any, args: Any, output: Any) -> None:
        """Undoes that, also after an exception."""
        module.normalize = self._normalizes

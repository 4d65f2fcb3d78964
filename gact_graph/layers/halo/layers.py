"""Layers that run on a part: they fetch the rows of their halo before their edge work runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.gcn_norm import NormalizedForward, normalizes
from gact_graph.layers.halo.local import LOCAL
from gact_graph.layers.halo.norm import NORMS, WholeBatchNorm
from gact_graph.layers.halo.parts import check_edges
from gact_graph.layers.halo.tried import Tried
from gact_graph.support.patch import Patch

_FUNCTIONS = {"propagate": ("message", "aggregate", "update"), "edge_updater": ("edge_update",)}


class Handle(Protocol):
    """What takes off a patch or a hook again."""

    def remove(self) -> None: ...


def attach(model: nn.Module, exchange: Exchange) -> Iterator[Handle]:
    """Patches the layers; yields what undoes it."""
    yield model.register_forward_pre_hook(exchange.next_step)
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing):
            for method, functions in _FUNCTIONS.items():
                yield _EdgeWork(module, method, functions, exchange)
            if normalizes(module):
                yield NormalizedForward(module, exchange)
            if type(module) not in LOCAL:
                tried = Tried(name, exchange)
                yield module.register_forward_pre_hook(tried, with_kwargs=True)
        elif type(module) in NORMS and exchange.num_parts > 1:
            yield WholeBatchNorm(module)


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
        check_edges(edge_index)
        for name in self._lifted:
            value = given.get(name)
            pair = value if isinstance(value, (tuple, list)) else (value, value)
            if isinstance(pair[0], Tensor):
                given[name] = self._extended(pair[0], module.node_dim), pair[1]
        own = self._exchange.num_nodes
        size = own + self._exchange.num_halo, own
        return self.original(module)(edge_index, size=size, **given)

    def _extended(self, x: Tensor, node_dim: int) -> Tensor:
        if node_dim % x.dim() == 0:
            return self._exchange.extended(x)
        return self._exchange.extended(x.movedim(node_dim, 0)).movedim(0, node_dim)

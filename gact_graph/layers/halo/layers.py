"""Patches of layers that run on a part: they fetch the rows of the halo before their edge work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.gcn_norm import NormalizedForward, calls_gcn_norm
from gact_graph.layers.halo.locality import LocalityCheck
from gact_graph.layers.halo.norm import NORMS, WholeBatchNorm
from gact_graph.layers.halo.parts import check_edges
from gact_graph.layers.halo.supported import EDGE_METHODS, LOCAL
from gact_graph.support.patch import Patch


class Handle(Protocol):
    """A handle that removes a patch or a hook."""

    def remove(self) -> None: ...


def attach(model: nn.Module, exchange: Exchange) -> Iterator[Handle]:
    """Patch the layers of a model; yield the handles of the patches."""
    yield model.register_forward_pre_hook(exchange.start_forward)
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing):
            for method in EDGE_METHODS:
                yield _EdgeWork(module, method, exchange)
            if calls_gcn_norm(module):
                yield NormalizedForward(module, exchange)
            if type(module) not in LOCAL:
                check = LocalityCheck(name, exchange)
                yield module.register_forward_pre_hook(check, with_kwargs=True)
        elif type(module) in NORMS and exchange.num_parts > 1:
            yield WholeBatchNorm(module)


class _EdgeWork(Patch):
    """``propagate`` or ``edge_updater`` of a layer, with the rows of the halo in its arguments."""

    def __init__(self, module: Any, method: str, exchange: Exchange) -> None:
        super().__init__(module, method)
        get_names = module.inspector.get_param_names
        parameters = {name for function in EDGE_METHODS[method] for name in get_names(function)}
        self._source_names = sorted({name[:-2] for name in parameters if name.endswith("_j")})
        self._exchange = exchange

    def run(self, module: Any, /, edge_index: Any, size: Any = None, **arguments: Any) -> Any:
        """Run in place of the method of ``module``."""
        check_edges(edge_index)
        for name in self._source_names:
            value = arguments.get(name)
            pair = value if isinstance(value, (tuple, list)) else (value, value)
            if isinstance(pair[0], Tensor):
                arguments[name] = self._extend(pair[0], module.node_dim), pair[1]
        num_nodes = self._exchange.num_nodes
        size = num_nodes + self._exchange.num_halo, num_nodes
        return self.original(module)(edge_index, size=size, **arguments)

    def _extend(self, x: Tensor, node_dim: int) -> Tensor:
        if node_dim % x.dim() == 0:
            return self._exchange.extend(x)
        return self._exchange.extend(x.movedim(node_dim, 0)).movedim(0, node_dim)

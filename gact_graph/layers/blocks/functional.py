"""Message passing of a function: ``scatter(message(x[dst], x[src], e), dst)`` in blocks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.utils import scatter

from gact_graph.layers.blocks.arguments import EdgeFunction
from gact_graph.layers.blocks.cutting import LEAST_EDGES, Cutting
from gact_graph.layers.blocks.edge_work import EdgeWork, in_blocks
from gact_graph.layers.blocks.order import Orders
from gact_graph.layers.blocks.sort_arguments import Collector, check_edge_index, nested
from gact_graph.layers.recompute.runs import ended_as_stock
from gact_graph.support import current
from gact_graph.support.current import is_transformed
from gact_graph.support.messages import warn
from gact_graph.support.torch_private import tree_map

_NAME = "message_passing"


@dataclass(frozen=True)
class Messages:
    """A call of ``gact_graph.message_passing``.

    Attributes:
        message: The user's function.
        source: Its argument at the source of an edge: tensors of nodes, nested at will.
        destination: Its argument at the destination, likewise.
        edge_attr: Its argument of the edge: tensors of edges.
        edge_index: [2, E].
        reduce: The reduction of the messages to a destination; None for no reduction.
        num_sources: Number of source nodes.
        num_destinations: Number of destination nodes.
    """

    message: Callable[..., Any]
    source: Any
    destination: Any
    edge_attr: Any
    edge_index: Tensor
    reduce: str | None
    num_sources: int
    num_destinations: int

    def run(self, size: int | str | None) -> Tensor:
        """Return the reduced messages.

        Args:
            size: Edges of a block, ``"auto"``, or None for all at once.
        """
        edges = self.edge_index.size(1)
        few = edges == 0 or (size == "auto" and edges <= LEAST_EDGES)
        if size is None or few or torch.compiler.is_compiling() or is_transformed():
            return self._all_at_once()
        # Not before: a compiler would guard the weak keys of all states, which may die meanwhile.
        state, session = _state_of(self.message), current.current()
        reasons: list[str] = []

        def report(way: str, blocks: int | None, reason: str | None) -> None:
            if session is not None:
                session.add_layer_row(_NAME, way, blocks, reason)
            if reason is not None:
                reasons.append(reason)

        result = in_blocks(_NAME, lambda first: self._in_blocks(state, session, size), report)
        if result is None:
            result = self._all_at_once()  # which may raise the user's own error
        for reason in reasons:
            state.warn_once(reason)
        return result

    def _in_blocks(
        self, state: _State, session: current.Capture | None, size: int | str
    ) -> tuple[Tensor, int]:
        edges = check_edge_index(self.edge_index)
        collector = Collector()
        collector.add_nested("x_i", "destination", self.destination, "x_i")
        collector.add_nested("x_j", "source", self.source, "x_j")
        collector.add_nested("edge_attr", "edge", self.edge_attr, "edge_attr")
        arguments = collector.arguments(self.num_destinations, self.num_sources)
        orders = _orders.setdefault(edges, Orders())
        orders.next_forward()  # so that the content of the edges is compared
        # Blocks do not depend on whether a model is wrapped: what torch.utils.checkpoint runs again
        # must be cut in the same way, or dropout would have other masks.
        cutting = Cutting(orders, size, quantized=False)
        return state.edge_work(self.reduce).run(self.message, edges, 1, arguments, cutting, session)

    def _all_at_once(self) -> Tensor:
        sources, destinations = self.edge_index[0], self.edge_index[1]
        out = self.message(
            _rows(self.destination, destinations), _rows(self.source, sources), self.edge_attr
        )
        edges = self.edge_index.size(1)
        if not isinstance(out, Tensor) or out.dim() == 0 or out.size(0) != edges:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"Expected message to return a tensor with a row for each of {edges} edges "
                f"(got {got})"
            )
        ended_as_stock()
        if self.reduce is None:
            return out
        return scatter(out, destinations, 0, self.num_destinations, self.reduce)


def _rows(tensors: Any, index: Tensor) -> Any:
    return tree_map(lambda t: t.index_select(0, index) if isinstance(t, Tensor) else t, tensors)


def _message(message: Any, inputs: dict[str, Any], reduce: str | None) -> Tensor:
    out: Tensor = message(*(nested(inputs, name) for name in ("x_i", "x_j", "edge_attr")))
    if reduce is None:
        return out
    return scatter(out, inputs["index"], 0, inputs["dim_size"], reduce)


@functools.cache
def _edge_function(reduce: str | None) -> EdgeFunction:
    run = functools.partial(_message, reduce=reduce)
    return EdgeFunction(_NAME, run, of_edges=reduce is None)


@dataclass
class _State:
    """The edge work of a message function, by reduction, and the reasons it was warned of."""

    by_reduce: dict[str | None, EdgeWork] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def edge_work(self, reduce: str | None) -> EdgeWork:
        if reduce not in self.by_reduce:
            self.by_reduce[reduce] = EdgeWork(_edge_function(reduce))
        return self.by_reduce[reduce]

    def warn_once(self, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            warn(
                "gact_graph.message_passing makes the messages of all edges at once, because its "
                f"message function {reason}. The result is right, and takes the memory of the "
                "same written by hand; blocks=False asks for that without a warning."
            )


_states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()

_orders = WeakTensorKeyDictionary()
"""The orders of edges, which live as long as their edge_index."""


def _state_of(message: Any) -> _State:
    """Return the state of a module, or of the code of a function, which each call may create."""
    while isinstance(message, functools.partial):
        message = message.func
    if not isinstance(message, nn.Module):
        message = getattr(message, "__func__", message)
        message = getattr(message, "__code__", type(message))
    return _states.setdefault(message, _State())

"""Messages of a function: ``scatter(message(x[dst], x[src], e), dst)`` in blocks, where it can."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.utils import scatter

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.collector import Collector, nested
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.edge_work import EdgeWork, Ran, in_blocks
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.size import LEAST_EDGES, edges_per_block
from gact_graph.layers.blocks.supported import checked_edges
from gact_graph.layers.recompute.reuse import ended_as_stock
from gact_graph.support import current
from gact_graph.support.content import checksum
from gact_graph.support.transforms import is_transformed
from gact_graph.support.warn import warn

NAME = "message_passing"


@dataclass(frozen=True)
class Messages:
    """One call.

    Attributes:
        message: The user's function.
        source: What it gets at the source of an edge: tensors of nodes, nested at will.
        destination: The same at the destination.
        edge_attr: What it gets of the edge: tensors of edges.
        edge_index: [2, E].
        reduce: How messages to a destination are joined; None if they are not.
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
        """The messages, joined.

        Args:
            size: Edges of a block, ``"auto"``, or None for all at once.
        """
        work, session = _work_of(self.message), current.current()
        edges = self.edge_index.size(1)
        few = edges == 0 or (size == "auto" and edges <= LEAST_EDGES)
        if size is None or few or torch.compiler.is_compiling() or is_transformed():
            return self._all_at_once()
        found = in_blocks(NAME, lambda first: self._in_blocks(work, session, _Cutting(size)))
        if isinstance(found, Ran):
            if session is not None:
                session.layer_ran(NAME, "blocks", found.blocks, None)
            return found.result
        result = self._all_at_once()
        if found is not None:
            if session is not None:
                session.layer_ran(NAME, "stock", None, found)
            work.warn_once(found)
        return result

    def _in_blocks(self, work: _Work, session: current.Capture | None, cut: _Cutting) -> Ran:
        edges = checked_edges(self.edge_index)
        collector = Collector()
        collector.add_nested("x_i", "destination", self.destination, "x_i")
        collector.add_nested("x_j", "source", self.source, "x_j")
        collector.add_nested("edge_attr", "edge", self.edge_attr, "edge_attr")
        arguments = collector.arguments(self.num_destinations, self.num_sources)
        edge_work = work.of(self.reduce)
        prepared = edge_work.prepare(self.message, edges, 1, arguments, cut)
        return edge_work.run(prepared, self.message, session, NAME)

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


def _messages(message: Any, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = message(*(nested(inputs, name) for name in ("x_i", "x_j", "edge_attr")))
    return out


def _reduced(message: Any, inputs: dict[str, Any], reduce: str) -> Tensor:
    return scatter(_messages(message, inputs), inputs["index"], 0, inputs["dim_size"], reduce)


_each_message = EdgeFunction(_messages, of_edges=True)


@functools.cache
def _edge_function(reduce: str | None) -> EdgeFunction:
    if reduce is None:
        return _each_message
    return EdgeFunction(functools.partial(_reduced, reduce=reduce), of_edges=False)


@dataclass
class _Work:
    """What is known of one message function."""

    by_reduce: dict[str | None, EdgeWork] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def of(self, reduce: str | None) -> EdgeWork:
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


_works: weakref.WeakKeyDictionary[Any, _Work] = weakref.WeakKeyDictionary()


def _work_of(message: Any) -> _Work:
    """What is known: by the module, or by the code of a function, which is made anew each time."""
    while isinstance(message, functools.partial):
        message = message.func
    if not isinstance(message, nn.Module):
        message = getattr(message, "__func__", message)
        message = getattr(message, "__code__", type(message))
    return _works.setdefault(message, _Work())


class _Sorted(NamedTuple):
    content: int
    order: Order


_orders = WeakTensorKeyDictionary()
"""The orders of edges, which live as long as their edge_index."""


class _Cutting:
    """See :class:`gact_graph.layers.blocks.edge_work.Cutting`."""

    def __init__(self, size: Any) -> None:
        self._size = size

    def size_for(self, arguments: Arguments, summed: int | None = None) -> int:
        # Not by whether a model is wrapped: what torch.utils.checkpoint runs again must be cut the
        # same way, or dropout would have other masks.
        if self._size == "auto":
            return edges_per_block(arguments, thrifty=False, summed=summed)
        return int(self._size)

    def order(self, edge_index: Tensor, target: int, num_destinations: int) -> Order:
        # Its memory may change unseen by autograd, so it is compared each time.
        content = int(checksum(edge_index))
        known: _Sorted | None = _orders.get(edge_index)
        if known is None or (known.content, known.order.num_destinations) != (
            content,
            num_destinations,
        ):
            with current.capture_disabled():  # else the index that sorts them would count as saved
                known = _Sorted(content, Order(edge_index, target, num_destinations))
            _orders[edge_index] = known
        return known.order

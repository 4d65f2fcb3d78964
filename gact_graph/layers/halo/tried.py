"""Layers that are not known to be local: tried on a few nodes before they run on a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.local import ON_EDGES, refusal
from gact_graph.layers.halo.norm import NORMS
from gact_graph.support.run_state import RunState

_FEW = 32
"""Nodes that a layer is tried on: few enough that a mean over nodes is another one."""

_BEYOND = ("out of bounds", "out of range")
"""What torch says of an index."""


class Tried:
    """A hook before the forward of a layer, which acts at the first one.

    The layer runs in evaluation mode, without gradients: on the part, with the others, and by
    itself on some of its nodes, with the edges to them and the rows that the first run fetched.
    If it is local, it gives the same at these nodes.

    Args:
        name: The layer's name in the model.
        exchange: That of the part.
    """

    def __init__(self, name: str, exchange: Exchange) -> None:
        self._name, self._exchange = name, exchange

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tries the layer.

        Raises:
            ValueError: It is not local, or not known to be.
        """
        exchange = self._exchange
        if self._name in exchange.tried or torch.compiler.is_compiling():
            return
        devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with ExitStack() as stack:
            stack.enter_context(RunState(devices).restored())
            stack.enter_context(torch.no_grad())
            stack.enter_context(_evaluating(module))
            reason = self._why_not(module, (args, kwargs))
        if reason is not None:
            raise refusal(self._name or type(module).__name__, reason)
        exchange.tried.add(self._name)

    def _why_not(self, module: nn.Module, inputs: Any) -> str | None:
        kind, exchange = type(module).__name__, self._exchange
        try:
            with exchange.taped() as tape, _norms_of(module, exchange) as are_of_nodes:
                whole = _run(module, inputs)
        except (IndexError, RuntimeError) as error:
            if not any(words in str(error) for words in _BEYOND):
                raise
            return f"{kind} looks up sources by itself, outside of propagate: {error}"
        if not all(are_of_nodes):
            return ON_EDGES
        edges = {id(t): t for t in tree_leaves(inputs) if _is_edges(t)}
        if len(edges) != 1:
            return f"{kind} was not called with one edge_index [2, E], but with {len(edges)}"
        [edge_index] = edges.values()
        few = _few(edge_index, exchange)
        if few is None:
            return None
        try:
            with exchange.of_few(len(few.nodes), few.halo, tape):
                found = _run(module, tree_map(few.cut, inputs))
        except (IndexError, RuntimeError, ValueError) as error:
            return f"{kind} fails on a few of its nodes: {error}"
        for all_rows, got in zip(tree_leaves(whole), tree_leaves(found), strict=True):
            if not _is_same(few.rows_of(all_rows), got):
                return f"{kind} gives something else at a node if it sees that node's edges alone"
        return None


class _Few(NamedTuple):
    """Some nodes of a part, with the edges to them.

    Attributes:
        nodes: Their numbers in the part [k].
        edges: The numbers of the edges [e].
        edge_index: These edges [2, e], with the nodes counted from 0 and other sources after them.
        halo: The numbers of these others, in the part with its halo.
        sizes: Nodes and edges of the part.
    """

    nodes: Tensor
    edges: Tensor
    edge_index: Tensor
    halo: Tensor
    sizes: tuple[int, int]

    def cut(self, value: Any) -> Any:
        """An argument, for these nodes."""
        return self.edge_index if _is_edges(value) else self.rows_of(value)

    def rows_of(self, value: Any) -> Any:
        """The rows of a tensor of nodes or of edges; others as they are."""
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) not in self.sizes:
            return value
        return value[self.nodes if len(value) == self.sizes[0] else self.edges]


def _few(edge_index: Tensor, exchange: Exchange) -> _Few | None:
    """Nodes with few edges; None if only other parts can tell."""
    source, destination = edge_index
    own = exchange.num_nodes
    degree = torch.bincount(destination, minlength=own)
    read = degree.nonzero().view(-1)
    if len(destination) == own or len(read) < 2:
        return None  # tensors of nodes look as those of edges do, or these are all nodes
    read = read[degree[read].argsort()][: len(read) // 2]
    nodes = read[:: -(-len(read) // _FEW)]
    place = source.new_full((own + exchange.num_halo,), -1)
    place[nodes] = torch.arange(len(nodes), device=place.device)
    edges = (place[destination] >= 0).nonzero().view(-1)
    halo = source[edges].unique()
    halo = halo[place[halo] < 0]
    place[halo] = len(nodes) + torch.arange(len(halo), device=place.device)
    edge_index = place[torch.stack([source[edges], destination[edges]])]
    return _Few(nodes, edges, edge_index, halo, (own, len(destination)))


def _is_edges(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() == 2
        and value.size(0) == 2
    )


def _is_same(expected: Any, found: Any) -> bool:
    if not isinstance(expected, Tensor) or not expected.is_floating_point():
        return True
    if expected.shape != found.shape:
        return False
    most = float(expected.abs().max()) if expected.numel() else 0.0
    near = torch.finfo(expected.dtype).eps ** 0.5  # sums come in another order
    return torch.allclose(found, expected, rtol=0.0, atol=near * most, equal_nan=True)


def _run(module: nn.Module, inputs: Any) -> Any:
    args, kwargs = inputs
    return module.forward(*args, **kwargs)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _norms_of(module: nn.Module, exchange: Exchange) -> Iterator[list[bool]]:
    """Whether the batch norms in a layer get a row for each node, call by call."""
    found: list[bool] = []

    def note(_: nn.Module, args: Any) -> None:
        found.append(len(args[0]) == exchange.num_nodes)

    with ExitStack() as stack:
        for part in module.modules():
            if type(part) in NORMS:
                stack.callback(part.register_forward_pre_hook(note).remove)
        yield found

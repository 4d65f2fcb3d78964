"""A check whether a layer that is not listed is local: a trial at its first forward.

The trial compares rows of a layer on the part and on a few nodes, with the layer's whole
``forward``. The proof for blocks (:mod:`gact_graph.layers.blocks.locality`) covers the edge
function only, and cannot replace the trial. Most forwards can be traced (64 of 67 variants of PyG's
convs in ``tests/helpers/zoo.py``), but a proof of them needs rules for lists of edges whose length
depends on values (without self-loops, or selected by a mask), for the two rows of ``edge_index``,
and for ``propagate`` on several lists. It would refuse local layers with operations without a rule,
or with code that reads values, so the trial would have to stay for these.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.supported import refusal
from gact_graph.support.run_state import RunState
from gact_graph.support.torch_private import tree_leaves, tree_map

_SAMPLED = 32
"""Nodes of the trial: so few that the mean over them differs from the mean over all nodes."""

_BEYOND = ("out of bounds", "out of range")
"""Words of torch's errors about an index."""


class LocalityCheck:
    """A hook before the forward of a layer, which tries the layer once.

    The layer runs in evaluation mode without gradients: on the part, together with the other
    processes, and separately on some of the nodes, with the edges to them and the rows that the
    first run fetched. A local layer gives equal rows.

    Args:
        name: The name of the layer in the model.
        exchange: The exchange of the part.
    """

    def __init__(self, name: str, exchange: Exchange) -> None:
        self._name, self._exchange = name, exchange

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Try the layer.

        Raises:
            ValueError: The layer is not local, or the trial cannot decide that.
        """
        checked = self._exchange.local_layers
        if self._name in checked or torch.compiler.is_compiling():
            return
        devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with ExitStack() as stack:
            stack.enter_context(RunState(devices).restored())
            stack.enter_context(torch.no_grad())
            for part in module.modules():
                stack.callback(setattr, part, "training", part.training)
                part.training = False
            reason = self._why_not(module, (args, kwargs))
        if reason is not None:
            raise refusal(self._name or type(module).__name__, reason)
        checked.add(self._name)

    def _why_not(self, module: nn.Module, inputs: Any) -> str | None:
        kind, exchange = type(module).__name__, self._exchange
        try:
            with exchange.recording() as record:
                expected = _run(module, inputs)
        except (IndexError, RuntimeError) as error:
            if not any(words in str(error) for words in _BEYOND):
                raise
            return f"{kind} looks up sources outside of propagate: {error}"
        edges = {id(t): t for t in tree_leaves(inputs) if _is_edge_index(t)}
        if len(edges) != 1:
            return f"{kind} was called with {len(edges)} tensors edge_index [2, E] in place of one"
        [edge_index] = edges.values()
        sample = _sample(edge_index, exchange)
        if sample is None:
            return (
                f"{kind} cannot be tried on a part with {exchange.num_nodes} nodes and "
                f"{edge_index.size(1)} edges: a trial takes another number of edges than of nodes, "
                "and edges to two nodes"
            )
        try:
            with exchange.replaying(len(sample.nodes), sample.halo, record):
                result = _run(module, tree_map(sample.select, inputs))
        except (IndexError, RuntimeError, ValueError) as error:
            return f"{kind} fails on some of its nodes: {error}"
        for whole, rows in zip(tree_leaves(expected), tree_leaves(result), strict=True):
            if not _are_close(sample.rows_of(whole), rows):
                return f"{kind} gives another result at a node without the edges to other nodes"
        return None


class _Sample(NamedTuple):
    """Some nodes of a part, with the edges to them.

    Attributes:
        nodes: The numbers of the nodes in the part [k].
        edges: The numbers of the edges [e].
        edge_index: The edges [2, e], numbering the nodes from 0 and the halo after them.
        halo: The numbers of the other sources, in the part with its halo.
        sizes: The numbers of nodes and of edges of the part.
    """

    nodes: Tensor
    edges: Tensor
    edge_index: Tensor
    halo: Tensor
    sizes: tuple[int, int]

    def select(self, value: Any) -> Any:
        """Select the rows of an argument."""
        return self.edge_index if _is_edge_index(value) else self.rows_of(value)

    def rows_of(self, value: Any) -> Any:
        """Select the rows of a tensor of nodes or of edges; return other values unchanged."""
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) not in self.sizes:
            return value
        return value[self.nodes if len(value) == self.sizes[0] else self.edges]


def _sample(edge_index: Tensor, exchange: Exchange) -> _Sample | None:
    """Select nodes with few edges; None if the part cannot decide."""
    source, destination = edge_index
    num_nodes, num_edges = exchange.num_nodes, len(destination)
    degree = torch.bincount(destination, minlength=num_nodes)
    nodes = degree.nonzero().view(-1)
    if num_edges == num_nodes or len(nodes) < 2:
        return None  # tensors of nodes and of edges have one length, or these are all nodes
    nodes = nodes[degree[nodes].argsort()][: len(nodes) // 2]
    nodes = nodes[:: -(-len(nodes) // _SAMPLED)]
    number = source.new_full((num_nodes + exchange.num_halo,), -1)
    number[nodes] = torch.arange(len(nodes), device=number.device)
    edges = (number[destination] >= 0).nonzero().view(-1)
    halo = source[edges].unique()
    halo = halo[number[halo] < 0]
    number[halo] = len(nodes) + torch.arange(len(halo), device=number.device)
    return _Sample(nodes, edges, number[edge_index[:, edges]], halo, (num_nodes, num_edges))


def _is_edge_index(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() == 2
        and value.size(0) == 2
    )


def _are_close(expected: Any, result: Any) -> bool:
    if not isinstance(expected, Tensor) or not expected.is_floating_point():
        return True
    if expected.shape != result.shape:
        return False
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * largest  # sums have another order
    return torch.allclose(result, expected, rtol=0.0, atol=tolerance, equal_nan=True)


def _run(module: nn.Module, inputs: Any) -> Any:
    args, kwargs = inputs
    return module.forward(*args, **kwargs)

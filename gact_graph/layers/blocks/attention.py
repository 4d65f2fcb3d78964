"""Attention from the scores of nodes, as GATConv's ``edge_update`` computes it: one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import softmax

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.probe import Probed, other_parameters
from gact_graph.layers.blocks.sample import Sample
from gact_graph.layers.blocks.steps import Recorder, Steps
from gact_graph.ops import attention as ops
from gact_graph.ops.reference.attention import written_out
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support.replica import Snapshot
from gact_graph.support.run_state import RunState

_OF_SHAPES = frozenset({"size", "dim", "numel"})
"""Functions that compute nothing of a tensor's values."""


@dataclass(frozen=True)
class Attention:
    """The attention that an ``edge_update`` computes.

    Attributes:
        source: Index of the scores at the sources in ``Arguments.tensors``.
        destination: Index of those at the destinations.
        slope: Of LeakyReLU.
        dropout: The share of weights that become 0.
    """

    source: int
    destination: int
    slope: float
    dropout: float

    def weights(self, tensors: Sequence[Tensor], order: Order) -> Tensor:
        """The weights [E, H] in the order of edge_index; draws a number if there is dropout."""
        source, destination = tensors[self.source], tensors[self.destination]
        out = source.new_empty(order.num_edges, source.size(1))
        ops.attention(out, *self._given(source, destination, order))
        return out

    def weights_of_block(self, tensors: Sequence[Tensor], order: Order, block: Block) -> Tensor:
        """The weights of the edges of a block, without dropout."""
        source, destination = tensors[self.source], tensors[self.destination][block.nodes]
        out = source.new_empty(block.num_edges, source.size(1))
        starts = order.starts[block.first_node : block.end_node + 1]
        edges = order.sources[block.edges], None, starts
        ops.attention(out, source, destination, *edges, self.slope, 0.0, 0)
        return out

    def gradients(
        self, tensors: Sequence[Tensor], order: Order, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the scores at the sources and at the destinations.

        Args:
            tensors: As in forward. The random state must be that of forward, too.
            order: The order of the edges.
            gradient: That of the weights [E, H].
        """
        source = tensors[self.source].contiguous()
        destination = tensors[self.destination].contiguous()
        gradient = gradient.contiguous()
        of_score, of_destination = torch.empty_like(gradient), torch.empty_like(destination)
        given = self._given(source, destination, order)
        ops.attention_backward(of_score, of_destination, gradient, *given)
        of_source = torch.zeros_like(source)
        by_source = order.by_source
        out = of_source[: order.num_sources]
        ops.segment_sum(out, of_score, by_source.positions, by_source.cuts.starts)
        return of_source, of_destination

    def written_out(self, source: Tensor, destination: Tensor, order: Order) -> Tensor:
        """The weights [E, H] as :meth:`weights` has them, by operations that have second
        derivatives. The random state must be that of forward."""
        return written_out(*self._given(source, destination, order))

    def _given(self, source: Tensor, destination: Tensor, order: Order) -> tuple[Any, ...]:
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if self.dropout else 0
        edges = order.sources, order.permutation, order.starts
        return source, destination, *edges, self.slope, self.dropout, seed


def find_attention(
    edge_function: EdgeFunction,
    snapshot: Snapshot,
    arguments: Arguments,
    sample: Sample,
    probed: Probed,
) -> Attention | None:
    """The attention that a layer computes; None if it computes something else.

    What decides is what the layer does on the sample: it runs the same operations as
    :func:`_written_out`, with the same settings, and gives the same values and gradients for all
    draws of its tensors.

    Args:
        edge_function: What runs for each block.
        snapshot: Of the layer.
        arguments: Those of one call.
        sample: A small graph with rows of their tensors.
        probed: What the layer does in blocks.
    """
    uses = {use.level: use for use in arguments.uses}
    tensors = arguments.tensors
    if len(arguments.uses) != 2 or set(uses) != {"source", "destination"} or probed.kept:
        return None
    if any(t.dim() != 2 or t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors) or makes_messages(tensors[0].device):
        return None
    if len({(t.dtype, t.size(1)) for t in tensors}) != 1:
        return None
    settings = _settings(probed.steps)
    if settings is None:
        return None
    written_out = partial(
        _written_out, uses["source"].parameter, uses["destination"].parameter, settings
    )
    run_state = RunState(set())
    for number, drawn in enumerate(sample.draws()):
        values = other_parameters(snapshot) if number else None
        with snapshot.replica(values, own=True) as replica:
            tried = []
            for function in (partial(edge_function, replica.module), written_out):
                learns = [True] * len(drawn)
                given, leaves = sample.arguments.part(drawn, sample.order, sample.whole, learns)
                inputs = [*(leaf for _, leaf in leaves), *replica.parameters]
                with run_state.restored():
                    tried.append(_tried(partial(function, given), inputs))
        found, expected = tried
        if found is None or expected is None or found.steps != expected.steps:
            return None
        if not all(map(_same, found.tensors, expected.tensors)):
            return None
    dropout = settings.dropout if settings.training else 0.0
    if not 0 <= dropout < 1:
        return None
    return Attention(uses["source"].index, uses["destination"].index, settings.slope, dropout)


def computes(
    attention: Attention,
    edge_function: EdgeFunction,
    snapshot: Snapshot,
    arguments: Arguments,
    order: Order,
    block: Block,
    steps: Steps,
) -> bool:
    """Whether the layer computes this attention in a call, too: tried on one block of it.

    Args:
        attention: What was found on a sample.
        edge_function: What runs for each block.
        snapshot: Of the layer.
        arguments: Those of the call.
        order: The order of its edges.
        block: One of its blocks.
        steps: The operations that the layer ran on the sample.
    """
    with snapshot.replica(own=True) as replica, RunState(set()).restored(), torch.no_grad():
        given, _ = arguments.part(arguments.tensors, order, block)
        try:
            with Recorder() as recorder:
                expected = edge_function(replica.module, given)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # which PyG's own edge_updater raises again
            return False
    if recorder.steps != steps:
        return False
    if attention.dropout:  # by another mask
        return True
    found = attention.weights_of_block(arguments.tensors, order, block)
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@dataclass(frozen=True)
class _Tried:
    steps: Steps
    tensors: list[Tensor | None]


def _tried(run: Callable[[], Tensor], inputs: Sequence[Tensor]) -> _Tried | None:
    """The operations; the result and the gradients of the inputs. None where there are none."""
    try:
        with Recorder() as recorder:
            out = run()
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        gradients = torch.autograd.grad(out, inputs, weight, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it has no gradient, say
        return None
    steps = [step for step in recorder.steps if getattr(step, "__name__", "") not in _OF_SHAPES]
    return _Tried(steps, [out.detach(), *gradients])


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-5, equal_nan=True)


class _Settings(NamedTuple):
    slope: float
    dropout: float
    training: bool


def _settings(steps: Steps) -> _Settings | None:
    """The settings of the one LeakyReLU and the one dropout among these operations."""
    found: dict[Any, Any] = {}
    for function in (F.leaky_relu, F.dropout):
        if steps.count(function) != 1:
            return None
        for step in steps[steps.index(function) + 1 :]:
            if not isinstance(step, tuple):
                break
            found[step[0]] = step[1]
    names = "negative_slope", "p", "training"
    return _Settings(*(found[name] for name in names)) if found.keys() >= {*names} else None


def _written_out(
    source: str, destination: str, settings: _Settings, given: dict[str, Any]
) -> Tensor:
    """What :class:`Attention` computes, on one block: the operations of GATConv."""
    score = F.leaky_relu(given[source] + given[destination], settings.slope)
    score = softmax(score, given["index"], given["ptr"], given["dim_size"])
    return F.dropout(score, p=settings.dropout, training=settings.training)

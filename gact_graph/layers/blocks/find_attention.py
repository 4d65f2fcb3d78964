"""Whether an ``edge_update`` computes attention that one operator computes: by what it does."""

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
from gact_graph.layers.blocks.attention import Attention, LeakyAttention, SumAttention
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.probe import Probed, other_parameters
from gact_graph.layers.blocks.sample import Sample
from gact_graph.layers.blocks.steps import Recorder, Steps
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support.replica import Snapshot
from gact_graph.support.run_state import RunState

_OF_SHAPES = frozenset({"size", "dim", "numel"})
"""Functions that compute nothing of a tensor's values."""


def find_attention(
    edge_function: EdgeFunction,
    snapshot: Snapshot,
    arguments: Arguments,
    sample: Sample,
    probed: Probed,
) -> Attention | None:
    """The attention that a layer computes; None if it computes something else.

    What decides is what the layer does on the sample: it runs the same operations as
    :func:`_of_sums` or :func:`_of_rows`, with the same settings, and gives the same values and
    gradients for all draws of its tensors.

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
    if any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors) or makes_messages(tensors[0].device):
        return None
    if len({(t.dtype, t.shape[1:]) for t in tensors}) != 1:
        return None
    settings = _settings(probed.steps)
    if settings is None:
        return None
    dropout = settings.dropout if settings.training else 0.0
    if not 0 <= dropout < 1:
        return None
    ends = uses["source"].parameter, uses["destination"].parameter
    common = uses["source"].index, uses["destination"].index, settings.slope, dropout
    tried = edge_function, snapshot, sample
    if tensors[0].dim() == 2 and _same(*tried, lambda _: partial(_of_sums, *ends, settings)):
        return SumAttention(*common)
    if tensors[0].dim() == 3:
        for att in _vectors(snapshot.learning, tensors[0]):

            def written_out(parameters: Sequence[Tensor], att: int = att) -> _Run:
                return partial(_of_rows, *ends, settings, parameters[att])

            if _same(*tried, written_out):
                return LeakyAttention(*common, att)
    return None


def _vectors(learning: Sequence[Tensor], x: Tensor) -> list[int]:
    """The indices of what has a number for each head and channel of x [N, H, C]."""
    shape, kind = (1, *x.shape[1:]), x.dtype
    return [i for i, p in enumerate(learning) if p.shape == shape and p.dtype == kind]


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
    found = attention.weights_of_block(arguments.tensors, snapshot.learning, order, block)
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


_Run = Callable[[dict[str, Any]], Tensor]


def _same(
    edge_function: EdgeFunction,
    snapshot: Snapshot,
    sample: Sample,
    written_out: Callable[[Sequence[Tensor]], _Run],
) -> bool:
    """Whether a layer does on the sample what is written out, which gets its parameters."""
    run_state = RunState(set())
    for number, drawn in enumerate(sample.draws()):
        values = other_parameters(snapshot) if number else None
        with snapshot.replica(values, own=True) as replica:
            tried = []
            for function in (
                partial(edge_function, replica.module),
                written_out(replica.parameters),
            ):
                learns = [True] * len(drawn)
                given, leaves = sample.arguments.part(drawn, sample.order, sample.whole, learns)
                inputs = [*(leaf for _, leaf in leaves), *replica.parameters]
                with run_state.restored():
                    tried.append(_tried(partial(function, given), inputs))
        found, expected = tried
        if found is None or expected is None or found.steps != expected.steps:
            return False
        if not all(map(_close, found.tensors, expected.tensors)):
            return False
    return True


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


def _close(one: Tensor | None, other: Tensor | None) -> bool:
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


def _of_sums(source: str, destination: str, settings: _Settings, given: dict[str, Any]) -> Tensor:
    """What :class:`SumAttention` computes, on one block: the operations of GATConv."""
    score = F.leaky_relu(given[source] + given[destination], settings.slope)
    return _weights(score, settings, given)


def _of_rows(
    source: str, destination: str, settings: _Settings, att: Tensor, given: dict[str, Any]
) -> Tensor:
    """What :class:`LeakyAttention` computes, on one block: the operations of GATv2Conv."""
    rows = F.leaky_relu(given[destination] + given[source], settings.slope)
    return _weights((rows * att).sum(dim=-1), settings, given)


def _weights(score: Tensor, settings: _Settings, given: dict[str, Any]) -> Tensor:
    score = softmax(score, given["index"], given["ptr"], given["dim_size"])
    return F.dropout(score, p=settings.dropout, training=settings.training)

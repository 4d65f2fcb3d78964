"""Whether a layer computes attention that operators compute: by what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import softmax

from gact_graph.layers.blocks.arguments import Arguments, Use
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.dot_attention import DotAttention
from gact_graph.layers.blocks.edge_attention import EdgeAttention, LeakyAttention, SumAttention
from gact_graph.layers.blocks.edge_functions import (
    EdgeFunction,
    edge_update,
    is_sum,
    messages,
    propagate,
)
from gact_graph.layers.blocks.edge_rows import EdgeRows
from gact_graph.layers.blocks.edge_terms import EdgeTerms
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
    :func:`_of_sums`, :func:`_of_rows` or :func:`_of_products`, with the same settings, and gives
    the same values and gradients for all draws of its tensors.

    Args:
        edge_function: What runs for each block.
        snapshot: Of the layer.
        arguments: Those of one call.
        sample: A small graph with rows of their tensors.
        probed: What the layer does in blocks.
    """
    tensors = arguments.tensors
    if any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors) or makes_messages(tensors[0].device):
        return None
    of_nodes = [t for i, t in enumerate(tensors) if arguments.levels_of(i) != {"edge"}]
    if len({t.dtype for t in tensors}) != 1 or len({t.shape[1:] for t in of_nodes}) != 1:
        return None
    found = _settings(probed.steps, F.dropout)
    if found is None or not found.keys() >= {"p", "training"}:
        return None
    settings = _Settings(found["p"], found["training"])
    if not 0 <= settings.dropout < 1:
        return None
    given = snapshot, arguments, sample, probed, settings
    if edge_function == edge_update:
        return _find_weights(edge_function, *given)
    if edge_function == propagate and is_sum(snapshot.parts[0]):
        return _find_sum(*given)
    return None


class _Settings(NamedTuple):
    """Of F.dropout."""

    p: float
    training: bool

    @property
    def dropout(self) -> float:
        return self.p if self.training else 0.0


def _find_weights(
    edge_function: EdgeFunction,
    snapshot: Snapshot,
    arguments: Arguments,
    sample: Sample,
    probed: Probed,
    settings: _Settings,
) -> EdgeAttention | None:
    """The attention of an ``edge_update``."""
    uses = {use.level: use for use in arguments.uses}
    if len(uses) != len(arguments.uses) or uses.keys() - {"edge"} != {"source", "destination"}:
        return None
    x = arguments.tensors[uses["source"].index]
    slope = (_settings(probed.steps, F.leaky_relu) or {}).get("negative_slope")
    if slope is None or probed.kept:
        return None
    ends = uses["source"].parameter, uses["destination"].parameter
    common = uses["source"].index, uses["destination"].index, settings.dropout, slope
    tried = edge_function, snapshot, sample, probed.kept
    if x.dim() == 2:
        for terms in _terms(uses.get("edge"), arguments, snapshot.learning, x):

            def added(parameters: Sequence[Tensor], terms: EdgeTerms | None = terms) -> _Run:
                read = None if terms is None else [parameters[i] for i in terms.parameters]
                return partial(_of_sums, *ends, slope, settings, uses.get("edge"), read)

            if _same(*tried, added):
                return SumAttention(*common, terms)
    if x.dim() == 3 and "edge" not in uses:
        for att in _vectors(snapshot.learning, x):

            def written_out(parameters: Sequence[Tensor], att: int = att) -> _Run:
                return partial(_of_rows, *ends, slope, settings, parameters[att])

            if _same(*tried, written_out):
                return LeakyAttention(*common, att)
    return None


def _find_sum(
    snapshot: Snapshot,
    arguments: Arguments,
    sample: Sample,
    probed: Probed,
    settings: _Settings,
) -> DotAttention | None:
    """The attention of a ``propagate`` that adds up messages."""
    levels = [use.level for use in arguments.uses if use.level != "edge"]
    if sorted(levels) != ["destination", "source", "source"] or len(probed.kept) > 1:
        return None
    edges = [use for use in arguments.uses if use.level == "edge"]
    divisor = (_settings(probed.steps, Tensor.div) or {}).get(None)
    (query,) = (use for use in arguments.uses if use.level == "destination")
    x = arguments.tensors[query.index]
    if not divisor or x.dim() != 3 or len(edges) > 1:
        return None
    use, keeps = (edges[0] if edges else None), bool(probed.kept)
    both = permutations(use for use in arguments.uses if use.level == "source")
    found = _rows(use, arguments, snapshot.learning, x)
    for (key, value), rows in product(both, found):
        names = query.parameter, key.parameter, value.parameter

        def written_out(
            parameters: Sequence[Tensor],
            names: tuple[str, str, str] = names,
            rows: EdgeRows | None = rows,
        ) -> _Run:
            matrix = None if rows is None else parameters[rows.matrix]
            return partial(_of_products, *names, divisor, settings, keeps, use, matrix)

        if _same(messages, snapshot, sample, probed.kept, written_out):
            common = key.index, query.index, settings.dropout
            return DotAttention(*common, value.index, 1 / divisor, keeps, rows)
    return None


def _rows(
    use: Use | None, arguments: Arguments, learning: Sequence[Tensor], x: Tensor
) -> Iterator[EdgeRows | None]:
    """What edges may add to keys and values like x [N, H, C], as :func:`_terms`."""
    if use is None:
        yield None
        return
    features = arguments.tensors[use.index]
    if features.dim() != 2 or torch.is_autocast_enabled(x.device.type):
        return
    shape = x.shape[1:].numel(), features.size(1)
    for i, matrix in enumerate(learning):
        if matrix.shape == shape and matrix.dtype == x.dtype:
            yield EdgeRows(use.index, i)


def _terms(
    use: Use | None, arguments: Arguments, learning: Sequence[Tensor], x: Tensor
) -> Iterator[EdgeTerms | None]:
    """What edges may add to scores x [N, H]: all that the shapes of what learns allow."""
    if use is None:
        yield None
        return
    features, device = arguments.tensors[use.index], x.device.type
    # Autocast would round what is computed of rows of edges, and not what is computed without them.
    if features.dim() > 2 or torch.is_autocast_enabled(device):
        return
    width = features[0].numel()
    for vector, matrix in permutations(range(len(learning)), 2):
        one, other = learning[vector], learning[matrix]
        if not one.dtype == other.dtype == x.dtype or one.dim() != 3:
            continue
        if one.shape[:2] == (1, x.size(1)) and other.shape == (one.numel(), width):
            yield EdgeTerms(use.index, matrix, vector)


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
    probed: Probed,
) -> bool:
    """Whether the layer computes this attention in a call, too: tried on one block of it.

    Args:
        attention: What was found on a sample.
        edge_function: What runs for each block.
        snapshot: Of the layer.
        arguments: Those of the call.
        order: The order of its edges.
        block: One of its blocks.
        probed: What the layer did on the sample.
    """
    run_state = RunState({t.device.type for t in arguments.tensors})
    with snapshot.replica(own=True) as replica, run_state.restored(), torch.no_grad():
        given, _ = arguments.part(arguments.tensors, order, block)
        try:
            with Recorder() as recorder:
                out = edge_function(replica.module, given)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # which PyG's own propagate or edge_updater raises again
            return False
        expected = [out, *(getattr(replica.module, name) for name in probed.kept)]
    if recorder.steps != probed.steps:
        return False
    found = attention.of_block(arguments.tensors, snapshot.learning, order, block)
    # What dropout changes has another mask.
    return all(
        one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    )


_Run = Callable[[dict[str, Any]], Sequence[Tensor]]


def _same(
    edge_function: EdgeFunction,
    snapshot: Snapshot,
    sample: Sample,
    kept: Sequence[str],
    written_out: Callable[[Sequence[Tensor]], _Run],
) -> bool:
    """Whether a layer does on the sample what is written out, which gets its parameters."""
    run_state = RunState({t.device.type for t in sample.arguments.tensors})
    for number, drawn in enumerate(sample.draws()):
        values = other_parameters(snapshot) if number else None
        with snapshot.replica(values, own=True) as replica:
            tried = []
            for function in (
                partial(_run, edge_function, replica.module, kept),
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


def _run(
    edge_function: EdgeFunction, module: Any, kept: Sequence[str], given: dict[str, Any]
) -> Sequence[Tensor]:
    return [edge_function(module, given), *(getattr(module, name) for name in kept)]


@dataclass(frozen=True)
class _Tried:
    steps: Steps
    tensors: list[Tensor | None]


def _tried(run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Tried | None:
    """The operations; the results and the gradients of the inputs. None where there are none."""
    try:
        with Recorder() as recorder:
            outs = run()
        weights = [
            torch.linspace(-1, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)
            for t in outs
        ]
        gradients = [
            gradient
            for out, weight in zip(outs, weights, strict=True)
            for gradient in torch.autograd.grad(
                out, inputs, weight, retain_graph=True, allow_unused=True
            )
        ]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it has no gradient, say
        return None
    steps = [step for step in recorder.steps if getattr(step, "__name__", "") not in _OF_SHAPES]
    return _Tried(steps, [*(out.detach() for out in outs), *gradients])


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # Within rounding of what is added up, in whatever order: on CUDA, PyG's softmax adds by atomic
    # operations, and what cancels leaves an error as large as that of its terms.
    finite = other.detach().nan_to_num(0.0, 0.0, 0.0)
    most = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-5, atol=max(1e-8, 1e-6 * most), equal_nan=True)


def _settings(steps: Steps, function: Any) -> dict[str | None, Any] | None:
    """The settings of the first call of a function, those without a name under None."""
    if function not in steps:
        return None
    found: dict[str | None, Any] = {}
    for step in steps[steps.index(function) + 1 :]:
        if isinstance(step, tuple):
            found[step[0]] = step[1]
        elif isinstance(step, float):
            found[None] = step
        else:
            break
    return found


def _of_sums(
    source: str,
    destination: str,
    slope: float,
    settings: _Settings,
    use: Use | None,
    read: Sequence[Tensor] | None,
    given: dict[str, Any],
) -> Sequence[Tensor]:
    """What :class:`SumAttention` computes, on one block: the operations of GATConv."""
    score = given[source] + given[destination]
    if use is not None and read is not None:
        matrix, vector = read
        features = given[use.parameter]
        rows = F.linear(features.view(-1, 1) if features.dim() == 1 else features, matrix)
        score = score + (rows.view(-1, *vector.shape[1:]) * vector).sum(dim=-1)
    return (_weights(F.leaky_relu(score, slope), settings, given),)


def _of_rows(
    source: str,
    destination: str,
    slope: float,
    settings: _Settings,
    att: Tensor,
    given: dict[str, Any],
) -> Sequence[Tensor]:
    """What :class:`LeakyAttention` computes, on one block: the operations of GATv2Conv."""
    rows = F.leaky_relu(given[destination] + given[source], slope)
    return (_weights((rows * att).sum(dim=-1), settings, given),)


def _weights(score: Tensor, settings: _Settings, given: dict[str, Any]) -> Tensor:
    score = softmax(score, given["index"], given["ptr"], given["dim_size"])
    return F.dropout(score, p=settings.p, training=settings.training)


def _of_products(
    query: str,
    key: str,
    value: str,
    divisor: float,
    settings: _Settings,
    keeps: bool,
    use: Use | None,
    matrix: Tensor | None,
    given: dict[str, Any],
) -> Sequence[Tensor]:
    """The messages that :class:`DotAttention` adds up, on one block: those of TransformerConv."""
    keys, rows = given[key], None
    if use is not None and matrix is not None:
        rows = F.linear(given[use.parameter], matrix).view(-1, *keys.shape[1:])
        keys = keys + rows
    score = (given[query] * keys).sum(dim=-1) / divisor
    weight = softmax(score, given["index"], given["ptr"], given["size_i"])
    left = F.dropout(weight, p=settings.p, training=settings.training)
    values = given[value] if rows is None else given[value] + rows
    out = values * left.view(-1, left.size(1), 1)
    return (out, weight) if keeps else (out,)

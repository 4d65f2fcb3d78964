"""A recomputed layer as one operation of autograd: saves its inputs, and runs again in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from gact_graph.codecs import Context, Kept, Saved
from gact_graph.layers.recompute.call import LEARNS_FROM_ELSEWHERE, LayerCall, learns_from_elsewhere
from gact_graph.layers.recompute.contexts import Given, LayerContexts
from gact_graph.layers.recompute.edits import check, glimpse
from gact_graph.layers.recompute.reuse import EdgeCalls, Ends, counting
from gact_graph.layers.recompute.structure import Structure
from gact_graph.support.current import advises, apart, forward_runs, saved_by, unpack
from gact_graph.support.replica import Replica
from gact_graph.support.run_state import check_once
from gact_graph.support.storage import is_plain

_SHARE = 0.5
"""Results with a row for each edge are saved if each takes at most this share of the bytes of the
layer's floating-point inputs."""


@dataclass(frozen=True)
class FirstRun:
    """What a layer gave in forward.

    Attributes:
        results: Its tensors.
        structure: What is around them.
        ends: The state after each call of its edge work.
        edge_results: Results of that work that are saved beside the inputs, by the number of their
            call: small per-edge tensors such as attention weights, which take long to compute.
    """

    results: list[Tensor]
    structure: Structure
    ends: Ends
    edge_results: dict[int, Tensor]


@torch.no_grad()
def run_first(call: LayerCall, module: nn.Module, tensors: Sequence[Tensor]) -> FirstRun:
    """Runs the layer in forward, without a graph."""
    edge_calls = EdgeCalls()
    with counting(edge_calls):
        results, structure = call.run(module, tensors)
    most = _SHARE * sum(t.nbytes for t in tensors if t.is_floating_point())
    not_needed = call.values_not_needed.get(call.key, frozenset())
    saved = {
        number: result
        for number, result in edge_calls.edge_results.items()
        if number not in not_needed and result.nbytes <= most and result.is_floating_point()
    }
    return FirstRun(results, structure, edge_calls.ends, saved)


class Recompute(torch.autograd.Function):
    """Gives the results of a first run as results of its inputs.

    ``Recompute.apply(call, first, count, *tensors, *parameters)`` takes the ``count`` tensors that
    the layer was given and the parameters of ``call.snapshot.learning``.
    """

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, first: FirstRun, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.count, ctx.ends = call, count, first.ends
        ctx.edge_calls = [*first.edge_results]
        ctx.set_materialize_grads(False)
        ctx.glimpses = {
            number: glimpse(tensor)
            for number, tensor in enumerate(tensors[:count])
            if tensor.grad_fn is None and is_plain(tensor)
        }
        # Through the hooks of whoever compresses what is saved.
        ctx.save_for_backward(*tensors, *first.edge_results.values())
        ctx.mark_non_differentiable(*(t for t in first.results if not _can_learn(t)))
        return tuple(first.results)

    @staticmethod
    @advises
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        again = torch.is_grad_enabled()  # a gradient that is to be differentiated
        saved = saved_by(ctx)
        if saved is None:  # other hooks hold some of them
            kept = "an input of a layer that is computed again"
            saved = [Saved(Context(Kept(tensor, kept))) for tensor in ctx.saved_tensors]
        for number, before in ctx.glimpses.items():
            if isinstance(saved[number].context.encoded, Kept):
                check(before, saved[number].tensor())
        if again:
            count = ctx.count + len(call.snapshot.learning)
            given = ctx.saved_tensors[:count]
            return (None, None, None, *_Gradient.apply(call, ctx.count, *given, *gradients))
        inputs, others = saved[: ctx.count], saved[ctx.count :]
        parameters = [one.tensor() for one in others[: len(call.snapshot.learning)]]
        edge_results = dict(zip(ctx.edge_calls, others[len(parameters) :], strict=True))
        if forward_runs():  # what it gives is for forward, and exact
            call = replace(call, coding=None)
            for one in inputs:
                one.encoded()
        with (
            apart(),
            call.snapshot.replica(parameters) as replica,
            call.run_state.restored(),
        ):
            graph = _rerun(call, ctx.ends, replica, inputs, edge_results)
            found = _gradients(graph, gradients, replica.parameters)
        return (None, None, None, *found)


class _Gradient(torch.autograd.Function):
    """The backward of :class:`Recompute` as an operation that has a gradient itself.

    ``_Gradient.apply(call, count, *inputs, *gradients)`` takes the ``count`` tensors and the
    parameters of the call, and the gradient of each result or None.
    """

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, count: int, *given: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        learns = (*call.learns, *(True for _ in given[len(call.learns) :]))
        leaves: list[Any] = [
            one.detach().requires_grad_(learn) if one is not None else None
            for one, learn in zip(given, learns, strict=True)
        ]
        inputs, gradients = leaves[: len(call.learns)], leaves[len(call.learns) :]
        with (
            apart(),
            call.snapshot.replica(inputs[count:], aliases=True) as replica,
            call.run_state.restored(),
        ):
            inputs[count:] = replica.parameters
            # Clones, for the layer may change in place what it is given.
            tensors = [one.clone() if one.requires_grad else one for one in inputs[:count]]
            results, _ = call.run(replica.module, tensors)
            wanted = [
                one if learn else None for one, learn in zip(inputs, call.learns, strict=True)
            ]
            found = _differentiated(results, wanted, gradients, create_graph=True)
        ctx.leaves, ctx.found = [*wanted, *gradients], found
        ctx.set_materialize_grads(False)
        return tuple(None if one is None else one.detach() for one in found)

    @staticmethod
    def backward(ctx: Any, *of_found: Tensor | None) -> tuple[Tensor | None, ...]:
        check_once("the gradient of a layer that is computed again")
        with apart():
            found = _differentiated(ctx.found, ctx.leaves, of_found, retain_graph=True)
        return (None, None, *found)


def _differentiated(
    results: Sequence[Tensor | GradientEdge | None],
    wanted: Sequence[Tensor | GradientEdge | None],
    of_results: Sequence[Tensor | None],
    **options: bool,
) -> list[Tensor | None]:
    """The gradient of each that is wanted; None where it is not, or where none arrives."""
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, of_results, strict=True)
        if gradient is not None and result is not None and _has_graph(result)
    ]
    targets: list[Any] = [target for target in wanted if target is not None]
    if not pairs or not targets:
        return [None] * len(wanted)
    ends, gradients = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ends, targets, gradients, allow_unused=True, **options))
    return [None if target is None else next(found) for target in wanted]


def _has_graph(result: Tensor | GradientEdge) -> bool:
    return isinstance(result, GradientEdge) or result.requires_grad


@dataclass(frozen=True)
class _Graph:
    """The graph of a layer that has run again.

    Edges, and not tensors: what the graph does not hold is freed before its backward.
    """

    inputs: list[GradientEdge | None]
    results: list[GradientEdge | None]


def _rerun(
    call: LayerCall,
    ends: Ends,
    replica: Replica,
    inputs: Sequence[Saved],
    edge_results: Mapping[int, Saved],
) -> _Graph:
    not_needed = call.values_not_needed.get(call.key)
    with torch.no_grad():  # nobody differentiates what is decoded
        decoded = {number: saved.tensor() for number, saved in edge_results.items()}
    edge_calls = EdgeCalls(ends, not_needed or frozenset(), edge_results=decoded)
    del decoded
    contexts = LayerContexts(replica.module, edge_calls, call.coding)
    token = torch.zeros((), device="cpu", requires_grad=True)
    with torch.no_grad():
        tensors = [contexts.given(saved) for saved in inputs]
    learns = call.learns[: len(inputs)]
    for number, learn in enumerate(learns):
        if learn:
            tensors[number] = Given.apply(token, tensors[number])
    with counting(edge_calls), saved_tensors_hooks(contexts.pack, unpack):
        results, _ = call.run(replica.module, tensors)
    if learns_from_elsewhere(replica, results, [token]):
        raise RuntimeError(
            f"Expected a layer that can be computed again (got one that {LEARNS_FROM_ELSEWHERE}); "
            "take a level that computes nothing again, such as level='L1'"
        )
    if not_needed is None:
        call.values_not_needed[call.key] = edge_calls.find_values_not_needed(results)
    return _Graph(
        [get_gradient_edge(t) if learn else None for t, learn in zip(tensors, learns, strict=True)],
        [get_gradient_edge(t) if t.requires_grad else None for t in results],
    )


def _gradients(
    graph: _Graph, of_results: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradient of each input and parameter; None where none is needed or none arrives."""
    return _differentiated(graph.results, [*graph.inputs, *parameters], of_results)


def _can_learn(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

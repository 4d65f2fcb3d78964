"""Operators of edge work for compiled graphs.

The edge work of a layer is a call of ``edge_forward``, whose gradient is a call of
``edge_backward``. Compilers do not look into either: both run a :class:`GraphWork`, found by its
name. ``sort_edges`` returns the state that they share. ``draw_and_sort_edges`` is the same for
layers that draw random numbers: a compiler merges no two calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.graph_work import GraphCall, GraphWork

works: weakref.WeakValueDictionary[str, GraphWork] = weakref.WeakValueDictionary()
"""The edge work that compiled graphs call, by name. The patches of layers keep it alive."""


def call(name: str, traced: GraphCall) -> tuple[Tensor, ...]:
    """Return the outputs of a call that a compiler traces.

    Args:
        name: The name of the edge work in the graph.
        traced: The call.
    """
    works[name] = traced.work
    results: tuple[Tensor, ...] = _EdgeWork.apply(
        name, traced.edge_index, traced.sizes, *traced.tensors
    )
    return results


class _EdgeWork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, edge_index: Tensor, sizes: list[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        work = works[name]
        never_read = work.analysis.never_read
        sort = _operators.draw_and_sort_edges if work.is_random else _operators.sort_edges
        state = sort(name, edge_index, sizes)
        results = _operators.edge_forward(name, tensors, state, sizes)
        ctx.name, ctx.sizes = name, sizes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(state, *(t for i, t in enumerate(tensors) if i not in never_read))
        outputs = zip(results, work.analysis.differentiable, strict=True)
        ctx.mark_non_differentiable(*(result for result, passes in outputs if not passes))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        state, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        results = iter(
            _operators.edge_backward(ctx.name, saved, state, gradients, ctx.sizes, needed)
        )
        return None, None, None, *(next(results) if needs else None for needs in needed)


_library = torch.library.Library("gact_graph_edges", "DEF")
_operators = torch.ops.gact_graph_edges

_library.define("sort_edges(str name, Tensor edge_index, SymInt[] sizes) -> Tensor")
_library.define(
    "draw_and_sort_edges(str name, Tensor edge_index, SymInt[] sizes) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define(
    "edge_forward(str name, Tensor[] tensors, Tensor state, SymInt[] sizes) -> Tensor[]"
)
_library.define(
    "edge_backward(str name, Tensor[] saved, Tensor state, Tensor?[] gradients, SymInt[] sizes,"
    " bool[] needed) -> Tensor[]"
)


def _sort_edges(name: str, edge_index: Tensor, sizes: Sequence[int]) -> Tensor:
    return works[name].sort(edge_index, sizes)


def _edge_forward(
    name: str, tensors: Sequence[Tensor], state: Tensor, sizes: Sequence[int]
) -> list[Tensor]:
    return works[name].forward(tensors, state, sizes)


def _edge_backward(
    name: str,
    saved: Sequence[Tensor],
    state: Tensor,
    gradients: Sequence[Tensor | None],
    sizes: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    return works[name].backward(saved, state, gradients, sizes, needed)


for _name, _function in {
    "sort_edges": _sort_edges,
    "draw_and_sort_edges": _sort_edges,
    "edge_forward": _edge_forward,
    "edge_backward": _edge_backward,
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("gact_graph_edges::sort_edges")
@torch.library.register_fake("gact_graph_edges::draw_and_sort_edges")
def _(name: str, edge_index: Tensor, sizes: Sequence[Any]) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.register_fake("gact_graph_edges::edge_forward")
def _(name: str, tensors: Sequence[Tensor], state: Tensor, sizes: Sequence[Any]) -> list[Tensor]:
    work = works[name]
    results = zip(work.outputs, work.results, work.result_dtypes, strict=True)
    return [
        tensors[0].new_empty((sizes[0] if output.of_edges else sizes[1], *row), dtype=dtype)
        for output, row, dtype in results
    ]


@torch.library.register_fake("gact_graph_edges::edge_backward")
def _(
    name: str,
    saved: Sequence[Tensor],
    state: Tensor,
    gradients: Sequence[Tensor | None],
    sizes: Sequence[Any],
    needed: Sequence[bool],
) -> list[Tensor]:
    work = works[name]
    like = next(gradient for gradient in gradients if gradient is not None)
    return [
        like.new_empty(work.shape_of(i, sizes), dtype=work.dtypes[i])
        for i, needs in enumerate(needed)
        if needs
    ]

"""The backward of a backward in blocks, as for forces: computes each block and its gradients again.

No message, and no gradient of one, is alive for more than a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Use
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.backward import (
    BlockGraph,
    Input,
    graph_of_messages,
    leaves_of,
    parts_of,
    read_by,
)
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.outputs import Output
from gact_graph.layers.blocks.rows import rows_of, whole
from gact_graph.support.run_state import without_autocast


def double_backward(
    call: BlockedCall,
    tensors: Sequence[Input],
    constants: Sequence[Input],
    gradients: Sequence[Input | None],
    of_gradients: Sequence[Tensor | None],
) -> None:
    """Compute the second-order gradients of :func:`backward`.

    Args:
        call: The call.
        tensors: The tensors among the arguments.
        constants: The tensors that the layer reads beside the arguments.
        gradients: The gradient of each output; None for none.
        of_gradients: Of the gradient of each tensor, then of each constant; None for none.
    """
    attention = call.analysis.attention
    # Without dropout, whose mask is the operator's own, the traced graph computes the same.
    if attention is not None and attention.dropout:
        _of_attention(call, attention, tensors, constants, gradients, of_gradients)
        return
    values = [None if gradient is None else gradient.tensor for gradient in gradients]
    with call.run_state.restored(), without_autocast(tensors[0].value.device):
        leaves = leaves_of(constants)
        shared = [
            _Target(leaf, of_gradient, constant.add)
            for constant, leaf, of_gradient in zip(
                constants, leaves, of_gradients[len(tensors) :], strict=True
            )
            if constant.requires_grad
        ]
        for block in call.blocks:
            # Contiguous: rows that share memory would share their gradient.
            parts = [
                None if part is None else part.detach().contiguous().requires_grad_()
                for part in parts_of(call, block, values)
            ]
            graph = graph_of_messages(call, tensors, leaves, block, parts)
            targets = shared + [
                _Target(
                    leaf,
                    _rows(call, use, block, graph, of_gradients[use.index]),
                    partial(tensors[use.index].add_part, use, call.order, block, graph.sources),
                )
                for use, leaf in graph.leaves
            ]
            ends = [
                _End(part, partial(_add, gradient, output, call, block))
                for part, gradient, output in zip(parts, gradients, call.outputs, strict=True)
                if part is not None and gradient is not None
            ]
            _differentiate(graph, targets, ends)


@dataclass(frozen=True)
class _Target:
    """A leaf of a block's graph.

    Attributes:
        leaf: The leaf.
        of_gradient: The gradient of its gradient; None for none.
        add: Takes its gradient.
    """

    leaf: Tensor
    of_gradient: Tensor | None
    add: Callable[[Tensor], None]


@dataclass(frozen=True)
class _End:
    """A part of the gradient of an output, and what takes the gradient of that."""

    part: Tensor
    add: Callable[[Tensor], None]


def _differentiate(graph: BlockGraph, targets: Sequence[_Target], ends: Sequence[_End]) -> None:
    if not graph.computed or not targets:
        return
    first = torch.autograd.grad(
        [end.tensor for end in graph.computed],
        [target.leaf for target in targets],
        [end.gradient for end in graph.computed],
        create_graph=True,
        allow_unused=True,
    )
    reached = [
        (gradient, target.of_gradient)
        for gradient, target in zip(first, targets, strict=True)
        if gradient is not None and gradient.requires_grad and target.of_gradient is not None
    ]
    if not reached:
        return
    outputs, of_outputs = zip(*reached, strict=True)
    leaves = [*(target.leaf for target in targets), *(end.part for end in ends)]
    second = torch.autograd.grad(outputs, leaves, of_outputs, allow_unused=True)
    adds = [*(target.add for target in targets), *(end.add for end in ends)]
    for add, gradient in zip(adds, second, strict=True):
        if gradient is not None:
            add(gradient)


def _of_attention(
    call: BlockedCall,
    attention: Attention,
    tensors: Sequence[Input],
    constants: Sequence[Input],
    gradients: Sequence[Input | None],
    of_gradients: Sequence[Tensor | None],
) -> None:
    """The same for all edges at once."""
    read = read_by(attention, tensors, constants)
    given = [gradient for gradient in gradients if gradient is not None]
    of_read = read_by(attention, of_gradients[: len(tensors)], of_gradients[len(tensors) :])
    leaves, parts = (
        [whole(entry.value).detach().requires_grad_() for entry in entries]
        for entries in (read, given)
    )
    with call.run_state.restored(), torch.enable_grad():
        outputs = attention.written_out(leaves, call.order)
        reached = [o for o, given in zip(outputs, gradients, strict=True) if given is not None]
        first = torch.autograd.grad(reached, leaves, parts, create_graph=True, allow_unused=True)
    wanted = [
        (gradient, of_gradient)
        for gradient, of_gradient in zip(first, of_read, strict=True)
        if gradient is not None and of_gradient is not None
    ]
    if not wanted:
        return
    differentiated, of_outputs = zip(*wanted, strict=True)
    second = torch.autograd.grad(differentiated, [*leaves, *parts], of_outputs, allow_unused=True)
    for entry, gradient in zip((*read, *given), second, strict=True):
        if gradient is not None and entry.requires_grad:
            entry.add(gradient)


def _rows(
    call: BlockedCall, use: Use, block: Block, graph: BlockGraph, of_gradient: Tensor | None
) -> Tensor | None:
    """What a leaf has of the gradient of its tensor's gradient."""
    if of_gradient is None or use.level == "whole":
        return of_gradient
    if use.level == "source":
        return rows_of(of_gradient, graph.sources)
    if use.level == "edge":
        return rows_of(of_gradient, call.order.positions(block))
    return of_gradient[block.nodes]


def _add(gradient: Input, output: Output, call: BlockedCall, block: Block, of_part: Tensor) -> None:
    """Adds the gradient of a part of an output's gradient, which no other block has."""
    output.write(gradient.total(), call.order, block, of_part)

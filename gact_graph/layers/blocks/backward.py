"""The backward of a call in blocks: computes each block again, and adds its gradients up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Use
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, add_rows, rows_of
from gact_graph.layers.blocks.sums.weighted_sum import CollectedWeights


@dataclass
class Input:
    """An input of the call: a tensor among the arguments, or a parameter of the layer.

    Attributes:
        value: The saved tensor, which may be coded.
        learns: Whether its gradient is needed.
        gradient: The gradient; None until a block has one.
    """

    value: Tensor | Rows
    learns: bool
    gradient: Tensor | None = None

    def total(self) -> Tensor:
        """The gradient to add to, zeros to begin with."""
        if self.gradient is None:
            value = self.value
            self.gradient = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return self.gradient

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient of the whole input, which may be changed in place from then on."""
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def add_part(
        self, use: Use, order: Order, block: Block, sources: Tensor, gradient: Tensor
    ) -> None:
        """Adds the gradient of what a block used of the input."""
        total = self.total()
        if use.level == "source":
            add_rows(total, sources, gradient)
        elif use.level == "edge":
            add_rows(total, order.positions(block), gradient)
        elif use.level == "whole":
            total += gradient
        else:
            total[block.nodes] += gradient


@dataclass(frozen=True)
class Computed:
    """A tensor that a block has computed again, and its gradient."""

    tensor: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class _Target:
    """A leaf of a block's graph, and what takes its gradient."""

    leaf: Tensor
    add: Callable[[Tensor], None]


@dataclass(frozen=True)
class BlockGraph:
    """A block that was computed again with a graph.

    Attributes:
        computed: Where backward begins.
        leaves: Where it ends, beside parameters.
        sources: The sources of the block's edges.
    """

    computed: list[Computed]
    leaves: list[tuple[Use, Tensor]]
    sources: Tensor


@dataclass(frozen=True)
class _Graph:
    """A block, or what all edges are given, computed again with a graph.

    Attributes:
        computed: Where backward begins.
        targets: Where it ends, beside parameters.
    """

    computed: list[Computed]
    targets: list[_Target]


def backward(
    call: BlockedCall,
    tensors: Sequence[Input],
    parameters: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    """Sets the gradients of the inputs, where they are needed.

    Args:
        call: The call.
        tensors: The tensors among the arguments.
        parameters: The parameters of ``call.snapshot.learning``.
        gradients: The gradient of each output; None for none.
    """
    if call.attention is not None:
        _backward_of_attention(call, call.attention, tensors, parameters, gradients)
    else:
        _backward_of_blocks(call, tensors, parameters, gradients)


def _backward_of_blocks(
    call: BlockedCall,
    tensors: Sequence[Input],
    parameters: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    values: list[Any] = [one.value for one in parameters]
    with call.snapshot.replica(values) as replica, call.run_state.restored():
        module: Any = replica.module
        of_parameters = [
            _Target(leaf, one.add)
            for one, leaf in zip(parameters, replica.parameters, strict=True)
            if one.learns
        ]
        graph = _graph_of_graph_sum(call, module, tensors, gradients)
        if graph is not None:
            _run(graph, of_parameters)
        weights = CollectedWeights(call.order)
        for block in call.blocks if graph is None else ():
            parts = parts_of(call, block, gradients)
            found = _graph_of_sum(call, module, tensors, block, parts, weights)
            if found is None:
                found = graph_of_messages(call, module, tensors, block, parts)
            _run(_graph(call, tensors, block, found), of_parameters)
        _add_gradient_of_x(call, tensors, gradients, weights)


def parts_of(
    call: BlockedCall, block: Block, gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """What a block reads of the gradients of the outputs."""
    return [
        None if gradient is None else output.read(gradient, call.order, block)
        for output, gradient in zip(call.outputs, gradients, strict=True)
    ]


def _backward_of_attention(
    call: BlockedCall,
    attention: Attention,
    tensors: Sequence[Input],
    parameters: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    if all(gradient is None for gradient in gradients):
        return
    values: list[Any] = [one.value for one in (*tensors, *parameters)]
    given = values[: len(tensors)], values[len(tensors) :]
    learns = [one.learns for one in tensors]
    with call.run_state.restored():
        found = attention.gradients(*given, call.order, gradients, learns)
    for one, gradient in zip(read_by(attention, tensors, parameters), found, strict=True):
        if one.learns and gradient is not None:
            one.add(gradient)


_Of = TypeVar("_Of")


def read_by(attention: Attention, tensors: Sequence[_Of], parameters: Sequence[_Of]) -> list[_Of]:
    """What belongs to what the attention reads, in the order of its gradients."""
    return [
        *(tensors[index] for index in attention.tensors),
        *(parameters[index] for index in attention.parameters),
    ]


def graph_of_messages(
    call: BlockedCall,
    module: Any,
    tensors: Sequence[Input],
    block: Block,
    parts: Sequence[Tensor | None],
) -> BlockGraph:
    """The graph of all that a block computes.

    Args:
        call: The call.
        module: A replica of the layer.
        tensors: The tensors among the arguments.
        block: The block.
        parts: What :func:`parts_of` gives.
    """
    values, learns = [one.value for one in tensors], [one.learns for one in tensors]
    given, leaves = call.arguments.part(values, call.order, block, learns)
    edge_function = call.edge_function.in_backward(module)
    out, computed = edge_function(module, given), []
    gradient = parts[0]
    if gradient is not None and out.requires_grad:
        if edge_function is not call.edge_function:
            gradient = rows_of(gradient, given["index"]).expand_as(out)
        computed.append(Computed(out, gradient))
    computed += _left_behind(call, module, parts)
    return BlockGraph(computed, leaves, given["edge_index_j"])


def _graph_of_sum(
    call: BlockedCall,
    module: Any,
    tensors: Sequence[Input],
    block: Block,
    parts: Sequence[Tensor | None],
    weights: CollectedWeights,
) -> BlockGraph | None:
    """The graph of the weights of a weighted sum, which are collected for the gradient of x."""
    values, learns = [one.value for one in tensors], [one.learns for one in tensors]
    found = call.sum_of(module, values, block, learns)
    if found is None or call.weighted_sum is None:
        return None
    block_sum, leaves = found
    computed: list[Computed] = []
    gradient = parts[0]
    if gradient is not None:
        if tensors[call.weighted_sum.index].learns:
            weights.put(block, block_sum.weight.detach())
        if block_sum.weight.requires_grad:
            of_weights = block_sum.gradient_of_weights(gradient)
            computed.append(Computed(block_sum.weight, of_weights))
    computed += _left_behind(call, module, parts)
    return BlockGraph(computed, leaves, block_sum.sources)


def _add_gradient_of_x(
    call: BlockedCall,
    tensors: Sequence[Input],
    gradients: Sequence[Tensor | None],
    weights: CollectedWeights,
) -> None:
    """Adds the gradient of the rows of a weighted sum, whose weights the blocks gave."""
    if call.weighted_sum is None or gradients[0] is None:
        return
    x = tensors[call.weighted_sum.index]
    found = weights.sum(x.value, call.size)
    if found is not None:
        x.add(found.gradient_of_x(gradients[0]))


def _graph_of_graph_sum(
    call: BlockedCall, module: Any, tensors: Sequence[Input], gradients: Sequence[Tensor | None]
) -> _Graph | None:
    """The graph from what all edges are given to their weights; adds the gradient of x."""
    values, learns = [one.value for one in tensors], [one.learns for one in tensors]
    found = call.graph_sum_of(module, values, learns)
    if found is None or call.weighted_sum is None:
        return None
    graph_sum, leaves = found
    computed: list[Computed] = []
    if gradients[0] is not None:
        x = tensors[call.weighted_sum.index]
        if graph_sum.weight.requires_grad:
            of_x, of_weight = graph_sum.gradients(gradients[0])
            computed.append(Computed(graph_sum.weight, of_weight))
        elif x.learns:
            of_x = graph_sum.gradient_of_x(gradients[0])
        if x.learns:
            x.add(of_x)
    return _Graph(computed, [_Target(leaf, tensors[use.index].add) for use, leaf in leaves])


def _graph(call: BlockedCall, tensors: Sequence[Input], block: Block, found: BlockGraph) -> _Graph:
    """The graph of a block, with what takes its gradients."""
    targets = [
        _Target(leaf, partial(tensors[use.index].add_part, use, call.order, block, found.sources))
        for use, leaf in found.leaves
    ]
    return _Graph(found.computed, targets)


def _run(graph: _Graph, of_parameters: Sequence[_Target]) -> None:
    """Runs the graph's backward, and adds what it gives to its targets."""
    if not graph.computed:
        return
    targets = [*of_parameters, *graph.targets]
    found = torch.autograd.grad(
        [one.tensor for one in graph.computed],
        [target.leaf for target in targets],
        [one.gradient for one in graph.computed],
        allow_unused=True,
    )
    for target, gradient in zip(targets, found, strict=True):
        # An input that no block uses has no gradient, as in stock autograd.
        if gradient is not None:
            target.add(gradient)


def _left_behind(call: BlockedCall, module: Any, parts: Sequence[Tensor | None]) -> list[Computed]:
    """The tensors that the layer has left in attributes."""
    found = []
    for output, gradient in zip(call.outputs[1:], parts[1:], strict=True):
        left = output.left_in(module)
        if gradient is not None and left.requires_grad:
            found.append(Computed(left, gradient))
    return found

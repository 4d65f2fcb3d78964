"""The backward of a call in blocks: computes each block again, and adds its gradients up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Use
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, add_rows, rows_of
from gact_graph.layers.blocks.sums.weighted_sum import CollectedWeights
from gact_graph.support.run_state import without_autocast


@dataclass
class Input:
    """An input of the call: a tensor among the arguments, or one that the layer reads beside them.

    Attributes:
        value: The saved tensor, which may be coded.
        requires_grad: Whether its gradient is needed.
        gradient: The gradient; None until a block has one.
    """

    value: Tensor | Rows
    requires_grad: bool
    gradient: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The value of an input that is never coded."""
        assert isinstance(self.value, Tensor)
        return self.value

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
    constants: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    """Compute the gradients of the inputs, where they are needed.

    Args:
        call: The call.
        tensors: The tensors among the arguments.
        constants: The tensors that the layer reads beside the arguments.
        gradients: The gradient of each output; None for none.
    """
    if call.analysis.attention is not None:
        _backward_of_attention(call, call.analysis.attention, tensors, constants, gradients)
    else:
        _backward_of_blocks(call, tensors, constants, gradients)


def _backward_of_blocks(
    call: BlockedCall,
    tensors: Sequence[Input],
    constants: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    weighted_sum = call.analysis.weighted_sum
    with call.run_state.restored(), without_autocast(tensors[0].value.device):
        leaves = leaves_of(constants)
        shared = [
            _Target(leaf, constant.add)
            for constant, leaf in zip(constants, leaves, strict=True)
            if constant.requires_grad
        ]
        if weighted_sum is not None and weighted_sum.of_edges:
            _run(_graph_of_graph_sum(call, tensors, leaves, gradients), shared)
            return
        weights = CollectedWeights(call.order)
        for block in call.blocks:
            parts = parts_of(call, block, gradients)
            if weighted_sum is None:
                graph = graph_of_messages(call, tensors, leaves, block, parts)
            else:
                graph = _graph_of_sum(call, tensors, leaves, block, parts, weights)
            _run(_graph(call, tensors, block, graph), shared)
        if weighted_sum is not None and gradients[0] is not None:
            x = tensors[weighted_sum.index]
            graph_sum = weights.sum(x.value, call.size)
            if graph_sum is not None:
                x.add(graph_sum.gradient_of_x(gradients[0]))


def leaves_of(constants: Sequence[Input]) -> list[Tensor]:
    """A leaf for each tensor that the layer reads beside its arguments."""
    return [
        constant.tensor.detach().requires_grad_(constant.requires_grad) for constant in constants
    ]


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
    constants: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    if all(gradient is None for gradient in gradients):
        return
    values = [tensor.value for tensor in tensors]
    beside = [constant.tensor for constant in constants]
    requires_grad = [tensor.requires_grad for tensor in tensors]
    with call.run_state.restored():
        of_read = attention.gradients(values, beside, call.order, gradients, requires_grad)
    for read, gradient in zip(read_by(attention, tensors, constants), of_read, strict=True):
        if read.requires_grad and gradient is not None:
            read.add(gradient)


_Of = TypeVar("_Of")


def read_by(attention: Attention, tensors: Sequence[_Of], constants: Sequence[_Of]) -> list[_Of]:
    """The entries of the inputs that the attention reads, in the order of its gradients."""
    return [
        *(tensors[index] for index in attention.tensors),
        *(constants[index] for index in attention.parameters),
    ]


def graph_of_messages(
    call: BlockedCall,
    tensors: Sequence[Input],
    constants: Sequence[Tensor],
    block: Block,
    parts: Sequence[Tensor | None],
) -> BlockGraph:
    """The graph of all that a block computes.

    Args:
        call: The call.
        tensors: The tensors among the arguments.
        constants: A leaf for each tensor that the layer reads beside them.
        block: The block.
        parts: The parts of the gradients that :func:`parts_of` gives.
    """
    values = [tensor.value for tensor in tensors]
    requires_grad = [tensor.requires_grad for tensor in tensors]
    graph = call.analysis.backward
    given, leaves = call.arguments.part(values, call.order, block, graph.inputs, requires_grad)
    out, *kept = graph(given, constants)
    gradient, *of_kept = parts
    if gradient is not None and call.analysis.sums:
        gradient = rows_of(gradient, given["index"]).expand_as(out)
    return BlockGraph(_computed([out, *kept], [gradient, *of_kept]), leaves, given["edge_index_j"])


def _computed(results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Computed]:
    return [
        Computed(result, gradient)
        for result, gradient in zip(results, gradients, strict=True)
        if gradient is not None and result.requires_grad
    ]


def _graph_of_sum(
    call: BlockedCall,
    tensors: Sequence[Input],
    constants: Sequence[Tensor],
    block: Block,
    parts: Sequence[Tensor | None],
    weights: CollectedWeights,
) -> BlockGraph:
    """The graph of the weights of a weighted sum, which are collected for the gradient of x."""
    weighted_sum = call.analysis.weighted_sum
    assert weighted_sum is not None
    values = [tensor.value for tensor in tensors]
    requires_grad = [tensor.requires_grad for tensor in tensors]
    block_sum, kept, leaves = call.block_sum(values, constants, block, requires_grad)
    gradient, *of_kept = parts
    of_weights = None
    if gradient is not None:
        if tensors[weighted_sum.index].requires_grad:
            weights.put(block, block_sum.weight.detach())
        if block_sum.weight.requires_grad:
            of_weights = block_sum.gradient_of_weights(gradient)
    computed = _computed([block_sum.weight, *kept], [of_weights, *of_kept])
    return BlockGraph(computed, leaves, block_sum.sources)


def _graph_of_graph_sum(
    call: BlockedCall,
    tensors: Sequence[Input],
    constants: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> _Graph:
    """The graph from tensors of all edges to their weights; adds the gradient of x."""
    weighted_sum = call.analysis.weighted_sum
    assert weighted_sum is not None
    values = [tensor.value for tensor in tensors]
    requires_grad = [tensor.requires_grad for tensor in tensors]
    graph_sum, leaves = call.graph_sum(values, constants, requires_grad)
    computed: list[Computed] = []
    if gradients[0] is not None:
        x = tensors[weighted_sum.index]
        if graph_sum.weight.requires_grad:
            of_x, of_weight = graph_sum.gradients(gradients[0])
            computed.append(Computed(graph_sum.weight, of_weight))
        elif x.requires_grad:
            of_x = graph_sum.gradient_of_x(gradients[0])
        if x.requires_grad:
            x.add(of_x)
    return _Graph(computed, [_Target(leaf, tensors[use.index].add) for use, leaf in leaves])


def _graph(call: BlockedCall, tensors: Sequence[Input], block: Block, found: BlockGraph) -> _Graph:
    """The graph of a block, with what takes its gradients."""
    targets = [
        _Target(leaf, partial(tensors[use.index].add_part, use, call.order, block, found.sources))
        for use, leaf in found.leaves
    ]
    return _Graph(found.computed, targets)


def _run(graph: _Graph, shared: Sequence[_Target]) -> None:
    """Runs the graph's backward, and adds what it gives to its targets."""
    if not graph.computed:
        return
    targets = [*shared, *graph.targets]
    if not targets:
        return
    of_targets = torch.autograd.grad(
        [end.tensor for end in graph.computed],
        [target.leaf for target in targets],
        [end.gradient for end in graph.computed],
        allow_unused=True,
    )
    for target, gradient in zip(targets, of_targets, strict=True):
        # An input that no block uses has no gradient, as in stock autograd.
        if gradient is not None:
            target.add(gradient)

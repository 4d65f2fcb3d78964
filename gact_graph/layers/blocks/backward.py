"""The backward of a call in blocks, and the backward of that backward, as for forces.

Each block runs again, and its gradients are added up. No message, and no gradient of a message, is
alive for more than a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Input, Leaf
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.layers.blocks.order import Block
from gact_graph.layers.blocks.rows import rows_of, whole, write_rows
from gact_graph.layers.blocks.weighted_sum import (
    WeightedSum,
    sum_edges,
    sum_gradients,
    weight_gradient,
)
from gact_graph.support.run_state import without_autocast


def backward(
    call: BlockedCall,
    inputs: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    """Compute the gradients of the inputs, where they are needed.

    Args:
        call: The call.
        inputs: The tensors among the arguments, and the constants.
        gradients: The gradient of each output; None for no gradient.
    """
    device = inputs[0].value.device
    analysis = call.analysis
    if analysis.attention is not None:
        _backward_of_attention(call, analysis.attention, inputs, gradients)
    else:
        with call.run_state.restored(), without_autocast(device):
            if analysis.weighted_sum is not None:
                _backward_of_sum(call, analysis.weighted_sum, inputs, gradients)
            else:
                for block in call.blocks:
                    parts = _parts_of(call, block, gradients)
                    _run_again(call, inputs, block, parts).backward()


def double_backward(
    call: BlockedCall,
    inputs: Sequence[Input],
    gradients: Sequence[Input | None],
) -> None:
    """Compute the second-order gradients of :func:`backward`.

    Args:
        call: The call.
        inputs: The inputs of the call, with the gradients of their gradients.
        gradients: The gradient of each output; None for no gradient.
    """
    attention = call.analysis.attention
    # The operator draws its own dropout mask, which the traced graph would not draw. Without
    # dropout both compute the same, and the graph is differentiated block by block below.
    if attention is not None and attention.dropout:
        _double_backward_of_attention(call, attention, inputs, gradients)
        return
    with call.run_state.restored(), without_autocast(inputs[0].value.device):
        for block in call.blocks:
            rows = [output.rows(call.order, block) for output in call.outputs]
            parts, leaves = _as_leaves(gradients, rows)
            _run_again(call, inputs, block, parts).double_backward(leaves)


def _as_leaves(
    gradients: Sequence[Input | None], rows: Sequence[Tensor | slice | None]
) -> tuple[list[Tensor | None], list[Leaf]]:
    """Return rows of the gradients of the outputs, and the same as leaves."""
    parts, leaves = list[Tensor | None](), list[Leaf]()
    for gradient, index in zip(gradients, rows, strict=True):
        if gradient is None:
            parts.append(None)
            continue
        part = gradient.tensor if index is None else rows_of(gradient.tensor, index)
        # Contiguous: rows that share memory would share their gradient.
        part = part.detach().contiguous().requires_grad_()
        parts.append(part)
        leaves.append(Leaf(part, gradient, index))
    return parts, leaves


def _parts_of(
    call: BlockedCall, block: Block, gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the parts of the gradients of the outputs that belong to a block."""
    return [
        None if gradient is None else rows_of(gradient, output.rows(call.order, block))
        for output, gradient in zip(call.outputs, gradients, strict=True)
    ]


def _run_again(
    call: BlockedCall, inputs: Sequence[Input], block: Block, gradients: Sequence[Tensor | None]
) -> BlockGraph:
    """Run the traced graph for a block, with the gradients of its outputs."""
    graph = call.analysis.backward
    values, leaves = call.arguments.inputs(inputs, graph.inputs, call.order, block)
    results = graph(values)
    of_result, *of_kept = gradients
    if of_result is not None and call.analysis.sums:
        of_result = rows_of(of_result, values["index"]).expand_as(results[0])
    return BlockGraph(results, [of_result, *of_kept], leaves)


def _backward_of_sum(
    call: BlockedCall,
    weighted_sum: WeightedSum,
    inputs: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    """Compute the gradients of the rows x that a layer sums, and of their weights."""
    x, of_sum = inputs[weighted_sum.index], gradients[0]
    order, graph = call.order, weighted_sum.weights
    weights: Tensor | None = None  # of all edges
    for block in [None] if weighted_sum.of_edges else call.blocks:
        values, leaves = call.arguments.inputs(inputs, graph.inputs, order, block)
        weight, *kept = graph(values)
        of_weight, of_kept = None, list[Tensor | None]()
        if block is None:
            weights = weight.detach()
            if of_sum is not None and weight.requires_grad:
                of_x, of_weight = sum_gradients(of_sum, x.value, weight, order, call.size)
                x.add(of_x)
                weights = None
        else:
            part, *of_kept = _parts_of(call, block, gradients)
            if part is not None and x.requires_grad:
                if weights is None:
                    weights = weight.new_empty(order.num_edges, *weight.shape[1:])
                write_rows(weights, order.positions(block), weight.detach())
            if part is not None and weight.requires_grad:
                sources, starts = values["edge_index_j"], order.starts_of(block)
                of_weight = weight_gradient(part, x.value, weight, sources, starts)
        BlockGraph([weight, *kept], [of_weight, *of_kept], leaves).backward()
    if weights is not None and of_sum is not None and x.requires_grad:
        of_x = torch.empty(x.value.shape, dtype=x.value.dtype, device=x.value.device)
        sum_edges(of_x, of_sum, weights, order.by_source, call.size)
        x.add(of_x)


def _backward_of_attention(
    call: BlockedCall,
    attention: Attention,
    inputs: Sequence[Input],
    gradients: Sequence[Tensor | None],
) -> None:
    if all(gradient is None for gradient in gradients):
        return
    inputs = [inputs[index] for index in attention.inputs]
    with call.run_state.restored(), torch.no_grad():
        of_inputs = attention.gradients(inputs, gradients, call.order)
    for entry, gradient in zip(inputs, of_inputs, strict=True):
        entry.add(gradient)


def _double_backward_of_attention(
    call: BlockedCall,
    attention: Attention,
    inputs: Sequence[Input],
    gradients: Sequence[Input | None],
) -> None:
    """Differentiate the reference implementation twice, for all edges at once."""
    inputs = [inputs[index] for index in attention.inputs]
    values = [whole(entry.value).detach().requires_grad_(entry.requires_grad) for entry in inputs]
    with call.run_state.restored():
        outputs = attention.reference(values, call.order)
    pairs = zip(values, inputs, strict=True)
    leaves = [Leaf(value, entry) for value, entry in pairs if entry.requires_grad]
    incoming, of_incoming = _as_leaves(gradients, [None] * len(gradients))
    BlockGraph(outputs, incoming, leaves).double_backward(of_incoming)


@dataclass(frozen=True)
class BlockGraph:
    """The autograd graph of a block that has run again.

    Attributes:
        results: The results of the block.
        gradients: Their gradients; None for no gradient.
        leaves: The leaves whose gradients are needed.
    """

    results: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    leaves: Sequence[Leaf]

    def backward(self) -> None:
        """Add the gradients of the leaves to those of their inputs."""
        _add(self.leaves, self._differentiated(create_graph=False))

    def double_backward(self, gradients: Sequence[Leaf]) -> None:
        """Add the second-order gradients of :meth:`backward`.

        Args:
            gradients: The incoming gradients of :meth:`backward`, as leaves.
        """
        first = self._differentiated(create_graph=True)
        pairs = [
            (gradient, leaf.of_gradient)
            for leaf, gradient in zip(self.leaves, first, strict=True)
            if gradient is not None
            and gradient.requires_grad
            and leaf.input.of_gradient is not None
        ]
        if not pairs:
            return
        outputs, of_outputs = zip(*pairs, strict=True)
        leaves = [*self.leaves, *gradients]
        inputs = [leaf.tensor for leaf in leaves]
        _add(leaves, torch.autograd.grad(outputs, inputs, of_outputs, allow_unused=True))

    def _differentiated(self, create_graph: bool) -> Sequence[Tensor | None]:
        """Return the gradient of each leaf; None where none arrives."""
        pairs = [
            (result, gradient)
            for result, gradient in zip(self.results, self.gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        if not pairs or not self.leaves:
            return [None] * len(self.leaves)
        results, gradients = zip(*pairs, strict=True)
        inputs = [leaf.tensor for leaf in self.leaves]
        return torch.autograd.grad(
            results, inputs, gradients, create_graph=create_graph, allow_unused=True
        )


def _add(leaves: Sequence[Leaf], gradients: Sequence[Tensor | None]) -> None:
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.input.add(gradient, leaf.rows)

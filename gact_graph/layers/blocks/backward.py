"""The backward of a call in blocks, and the backward of that backward, as for forces.

Each block runs again, and its gradients are added up. No message, and no gradient of a message, is
alive for more than a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Use
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.inputs import BlockGraph, Input, Leaf
from gact_graph.layers.blocks.outputs import Output
from gact_graph.layers.blocks.rows import Rows, rows_of, whole
from gact_graph.layers.blocks.sums.weighted_sum import CollectedWeights, WeightedSum
from gact_graph.support.run_state import without_autocast


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
        with call.run_state.restored(), without_autocast(tensors[0].value.device):
            beside = [constant.leaf_of_all() for constant in constants]
            if call.analysis.weighted_sum is not None:
                _backward_of_sum(call, call.analysis.weighted_sum, tensors, beside, gradients)
            else:
                for block in call.blocks:
                    parts = _parts_of(call, block, gradients)
                    _run_again(call, tensors, beside, block, parts).backward()


def double_backward(
    call: BlockedCall,
    tensors: Sequence[Input],
    constants: Sequence[Input],
    gradients: Sequence[Input | None],
) -> None:
    """Compute the second-order gradients of :func:`backward`.

    Args:
        call: The call.
        tensors: The tensors among the arguments, with the gradients of their gradients.
        constants: The same of the tensors that the layer reads beside the arguments.
        gradients: The gradient of each output; None for none.
    """
    attention = call.analysis.attention
    # Without dropout, whose mask is the operator's own, the traced graph computes the same.
    if attention is not None and attention.dropout:
        _double_backward_of_attention(call, attention, tensors, constants, gradients)
        return
    values = [None if gradient is None else gradient.tensor for gradient in gradients]
    with call.run_state.restored(), without_autocast(tensors[0].value.device):
        beside = [constant.leaf_of_all() for constant in constants]
        for block in call.blocks:
            # Contiguous: rows that share memory would share their gradient.
            parts = [
                None if part is None else part.detach().contiguous().requires_grad_()
                for part in _parts_of(call, block, values)
            ]
            _run_again(call, tensors, beside, block, parts).double_backward(
                [
                    Leaf(part, partial(_write, gradient, output, call, block))
                    for part, gradient, output in zip(parts, gradients, call.outputs, strict=True)
                    if part is not None and gradient is not None
                ]
            )


def _write(gradient: Input, output: Output, call: BlockedCall, block: Block, part: Tensor) -> None:
    """Write a part of the gradient of an output's gradient; no other block has it."""
    output.write(gradient.total(), call.order, block, part)


def _parts_of(
    call: BlockedCall, block: Block, gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The parts of the gradients of the outputs that belong to a block."""
    return [
        None if gradient is None else output.read(gradient, call.order, block)
        for output, gradient in zip(call.outputs, gradients, strict=True)
    ]


def _run_again(
    call: BlockedCall,
    tensors: Sequence[Input],
    beside: Sequence[Leaf],
    block: Block,
    gradients: Sequence[Tensor | None],
) -> BlockGraph:
    """Run the traced graph for a block.

    Args:
        call: The call.
        tensors: The tensors among the arguments.
        beside: The tensors that the layer reads beside them.
        block: The block.
        gradients: The gradient of each output, for the block.
    """
    graph = call.analysis.backward
    inputs, leaves = call.arguments.part(
        _values(tensors), call.order, block, graph.inputs, _require_grad(tensors)
    )
    results = graph(inputs, [leaf.tensor for leaf in beside])
    of_result, *of_kept = gradients
    if of_result is not None and call.analysis.sums:
        of_result = rows_of(of_result, inputs["index"]).expand_as(results[0])
    sources = inputs["edge_index_j"]
    return BlockGraph(
        results, [of_result, *of_kept], _leaves(call, tensors, beside, leaves, block, sources)
    )


def _leaves(
    call: BlockedCall,
    tensors: Sequence[Input],
    beside: Sequence[Leaf],
    leaves: Sequence[tuple[Use, Tensor]],
    block: Block,
    sources: Tensor,
) -> list[Leaf]:
    """All leaves of a block: those of the tensors beside the arguments first."""
    parts = [
        tensors[use.index].leaf_of_part(leaf, use, call.order, block, sources)
        for use, leaf in leaves
    ]
    return [*(leaf for leaf in beside if leaf.tensor.requires_grad), *parts]


def _values(tensors: Sequence[Input]) -> list[Tensor | Rows]:
    return [tensor.value for tensor in tensors]


def _require_grad(tensors: Sequence[Input]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]


def _backward_of_sum(
    call: BlockedCall,
    weighted_sum: WeightedSum,
    tensors: Sequence[Input],
    beside: Sequence[Leaf],
    gradients: Sequence[Tensor | None],
) -> None:
    """The gradients of a weighted sum: of its weights, and of the rows x that it adds up."""
    x = tensors[weighted_sum.index]
    constants = [leaf.tensor for leaf in beside]
    of_sum, *of_kept = gradients
    if weighted_sum.of_edges:
        if of_sum is None:
            return
        graph_sum, edge_leaves = call.graph_sum(_values(tensors), constants, _require_grad(tensors))
        of_x, of_weight = None, None
        if graph_sum.weight.requires_grad:
            of_x, of_weight = graph_sum.gradients(of_sum)
        elif x.requires_grad:
            of_x = graph_sum.gradient_of_x(of_sum)
        if x.requires_grad and of_x is not None:
            x.add(of_x)
        leaves = [leaf for leaf in beside if leaf.tensor.requires_grad]
        leaves += [Leaf(leaf, tensors[use.index].add) for use, leaf in edge_leaves]
        BlockGraph([graph_sum.weight], [of_weight], leaves).backward()
        return
    weights = CollectedWeights(call.order)
    for block in call.blocks:
        block_sum, kept, block_leaves = call.block_sum(
            _values(tensors), constants, block, _require_grad(tensors)
        )
        part, *of_kept = _parts_of(call, block, gradients)
        of_weight = None
        if part is not None:
            if x.requires_grad:
                weights.put(block, block_sum.weight.detach())
            if block_sum.weight.requires_grad:
                of_weight = block_sum.gradient_of_weights(part)
        leaves = _leaves(call, tensors, beside, block_leaves, block, block_sum.sources)
        BlockGraph([block_sum.weight, *kept], [of_weight, *of_kept], leaves).backward()
    whole_sum = weights.sum(x.value, call.size)
    if whole_sum is not None and of_sum is not None:
        x.add(whole_sum.gradient_of_x(of_sum))


_Item = TypeVar("_Item")


def _read_by(
    attention: Attention, tensors: Sequence[_Item], constants: Sequence[_Item]
) -> list[_Item]:
    """The entries that the attention reads, in the order of its gradients."""
    return [
        *(tensors[index] for index in attention.tensors),
        *(constants[index] for index in attention.parameters),
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
    beside = [constant.tensor for constant in constants]
    with call.run_state.restored():
        of_inputs = attention.gradients(
            _values(tensors), beside, call.order, gradients, _require_grad(tensors)
        )
    inputs = _read_by(attention, tensors, constants)
    for entry, gradient in zip(inputs, of_inputs, strict=True):
        if entry.requires_grad and gradient is not None:
            entry.add(gradient)


def _double_backward_of_attention(
    call: BlockedCall,
    attention: Attention,
    tensors: Sequence[Input],
    constants: Sequence[Input],
    gradients: Sequence[Input | None],
) -> None:
    """Differentiate the reference implementation twice, for all edges at once."""
    inputs = _read_by(attention, tensors, constants)
    values = [whole(entry.value).detach().requires_grad_(entry.requires_grad) for entry in inputs]
    incoming = [
        None if entry is None else entry.tensor.detach().contiguous().requires_grad_()
        for entry in gradients
    ]
    with call.run_state.restored(), torch.enable_grad():
        outputs = attention.written_out(values, call.order)
    leaves = [
        Leaf(value, entry.add, entry.of_gradient)
        for value, entry in zip(values, inputs, strict=True)
        if entry.requires_grad
    ]
    BlockGraph(outputs, incoming, leaves).double_backward(
        [
            Leaf(value, entry.add)
            for value, entry in zip(incoming, gradients, strict=True)
            if value is not None and entry is not None
        ]
    )

"""A call in blocks as one operation of autograd, which saves node tensors and no messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Input
from gact_graph.layers.blocks.backward import backward, double_backward
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.layers.blocks.rows import saved_tensors
from gact_graph.layers.recompute import runs
from gact_graph.support.current import Product, capture_disabled_in_backward, with_advice
from gact_graph.support.edits import glimpse_of
from gact_graph.support.torch_private import is_batched


def run_in_blocks(
    call: BlockedCall, tensors: Sequence[Tensor], module: Any, product: Product | None = None
) -> Tensor:
    """Run a call, with an autograd graph if a gradient is needed, and return its result.

    Args:
        call: The call.
        tensors: The tensors of its arguments and the constants of its layer.
        module: The user's layer, which gets the tensors that the call leaves in attributes.
        product: The product for which a tensor without memory stands, if any.

    Raises:
        CannotBlock: See :meth:`BlockedCall.forward`.
    """
    run = runs.current()
    reused = runs.Reuse() if run is None else run.next()
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        with nullcontext() if run is None else run.saves():
            results = _Blocked.apply(call, reused, product, *tensors)
    else:
        results = call.forward(tensors, reused.shape_only, product)
    result: Tensor = results[0]
    if run is not None:
        run.ended_in_blocks(result, call.outputs[0].of_edges and len(call.outputs) == 1)
    for output, tensor in zip(call.outputs[1:], results[1:], strict=True):
        assert output.attribute is not None
        setattr(module, output.attribute, tensor)
    return result


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: BlockedCall,
        reused: runs.Reuse,
        product: Product | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        never_read = call.analysis.never_read
        ctx.call = call
        ctx.set_materialize_grads(False)
        # NaN in place of values that backward does not read: wrong reads would show in gradients.
        ctx.never_read = {
            i: inputs[i].new_full((), math.nan).expand(inputs[i].shape) for i in never_read
        }
        ctx.saved = [i for i in range(len(inputs)) if i not in never_read]
        ctx.glimpses = [glimpse_of(inputs[i]) for i in ctx.saved]
        # Through the hooks that compress saved tensors.
        ctx.save_for_backward(*(inputs[i] for i in ctx.saved))
        if reused.result is not None:
            results = [reused.result.detach()]
        else:
            results = call.forward(inputs, reused.shape_only, product)
        outputs = zip(results, call.analysis.differentiable, strict=False)  # reused: the first one
        ctx.mark_non_differentiable(*(result for result, passes in outputs if not passes))
        return tuple(results)

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: BlockedCall = ctx.call
        if any(gradient is not None and is_batched(gradient) for gradient in gradients):
            raise RuntimeError(
                "Expected one gradient of a layer in blocks (got a batch of gradients, from "
                "is_grads_batched=True or vectorize=True); differentiate one output after the "
                "other, or wrap the model with blocks=False."
            )
        requires_grad = ctx.needs_input_grad[3:]
        create_graph = torch.is_grad_enabled()
        if create_graph:
            saved = ctx.saved_tensors
        else:
            of_nodes, gathers = call.arguments.rows_of_nodes, not call.outputs[0].of_edges
            saved = saved_tensors(ctx, ctx.saved, of_nodes, gathers)
        for glimpse, tensor in zip(ctx.glimpses, saved, strict=True):
            if glimpse is not None and isinstance(tensor, Tensor):
                glimpse.check(
                    tensor,
                    "an input of a layer that is computed again in backward",
                    "blocks=False",
                )
        values = ctx.never_read | dict(zip(ctx.saved, saved, strict=True))
        del saved
        if create_graph:
            ordered = [values[i] for i in range(len(requires_grad))]
            results = _Gradient.apply(call, requires_grad, *ordered, *gradients)
            return (None, None, None, *results)
        inputs = [Input(values[i], needed) for i, needed in enumerate(requires_grad)]
        del values
        with capture_disabled_in_backward():
            backward(call, inputs, gradients)
        return (None, None, None, *(entry.gradient for entry in inputs))


class _Gradient(torch.autograd.Function):
    """The backward of :class:`_Blocked` as a differentiable operation.

    ``_Gradient.apply(call, requires_grad, *inputs, *gradients)`` takes the inputs of the call, and
    the gradient of each output or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: BlockedCall,
        requires_grad: Sequence[bool],
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.needed = call, requires_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        values, gradients = tensors[: len(requires_grad)], tensors[len(requires_grad) :]
        inputs: list[Input] = [*map(Input, values, requires_grad)]  # type: ignore[arg-type]
        with capture_disabled_in_backward():
            backward(call, inputs, gradients)
        return tuple(entry.gradient for entry in inputs)

    @staticmethod
    def backward(ctx: Any, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Expected a backward without create_graph=True (got one through the gradient of a "
                "layer in blocks, which cannot be differentiated again). For third derivatives "
                "wrap the model with level='L1' or level='lossless', and blocks=False."
            )
        number = len(ctx.needed)
        values, gradients = ctx.saved_tensors[:number], ctx.saved_tensors[number:]
        inputs = [*map(Input, values, ctx.needed, of_gradients)]
        incoming = [None if value is None else Input(value, True) for value in gradients]
        with capture_disabled_in_backward():
            double_backward(ctx.call, inputs, incoming)
        entries = (*inputs, *incoming)
        return (None, None, *(None if e is None else e.gradient for e in entries))

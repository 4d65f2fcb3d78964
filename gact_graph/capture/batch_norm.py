"""Batch norm whose backward works in the memory of the decoded input.

PyTorch's backward allocates two tensors of the input's size on a CPU, beside the input and the
gradient. A decoded input is nobody else's, so the gradient takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.capture.derivatives import Replacement
from gact_graph.capture.in_place import owns_first
from gact_graph.capture.trace import Call
from gact_graph.ops.batch_norm import batch_norm_backward
from gact_graph.support.current import is_transformed, may_write, saved_by, with_advice
from gact_graph.support.storage import is_plain

INPUT = "input"
"""The position of the input in slots."""


def batch_norm(call: Call) -> Replacement | None:
    """Return the replacement of a batch norm over the rows of a matrix on a CPU, in training."""
    if call.func is not F.batch_norm or is_transformed():
        return None
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    x, *others, training = (call.argument(i, name) for i, name in enumerate(names))
    momentum, eps = call.argument(6, "momentum", default=0.1), call.argument(7, "eps", default=1e-5)
    tensors = [x, *(other for other in others if other is not None)]
    if not training or not all(isinstance(t, Tensor) and is_plain(t) for t in tensors):
        return None
    if x.dim() != 2 or len(x) < 2 or not x.requires_grad or not torch.is_grad_enabled():
        return None
    if any(t.device.type != "cpu" or t.dtype != torch.float32 for t in tensors):
        return None
    if torch.is_autocast_enabled("cpu") or not x.is_contiguous():
        return None
    if eps <= 0 or any(t.shape != x.shape[1:] for t in tensors[1:]):
        return None  # PyTorch's own function raises the error: the operator checks nothing
    running_mean, running_var, weight, bias = others

    def run(label: str) -> Tensor:
        settings = running_mean, running_var, momentum, eps
        result: Tensor = _BatchNorm.apply(x, weight, bias, *settings)
        return result

    return Replacement(x, INPUT, run)


class _BatchNorm(torch.autograd.Function):
    # Named as in PyTorch's own batch norm, so that capture compresses the same tensors.
    differentiates = "native_batch_norm", ("input", "weight", "result1", "result2")

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        ctx._saved_training, ctx._saved_eps = True, eps  # as attributes of PyTorch's own node
        result, mean, deviation = torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, deviation)
        return result

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        if gradient is None:
            return (None,) * 7
        needed, packed = ctx.needs_input_grad[:3], saved_by(ctx)
        x, weight, mean, deviation = ctx.saved_tensors
        if not may_write(gradient):
            results = torch.ops.aten.native_batch_norm_backward(
                *(gradient, x, weight, None, None, mean, deviation, True, ctx._saved_eps),
                [*needed],
            )
        else:
            out = x.detach() if owns_first(packed) else torch.empty_like(x)
            results = _backward(gradient, x, weight, mean, deviation, out)
        return *(r if need else None for r, need in zip(results, needed, strict=True)), *[None] * 4


def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the weight and the bias.

    Args:
        gradient: The gradient of the result [N, C].
        x: The input [N, C].
        weight: The weight [C]; None for 1.
        mean: The mean of each column [C].
        deviation: 1 / sqrt(variance + eps) of each column [C].
        out: A tensor for the gradient of the input, which may be the input itself.
    """
    scale = deviation if weight is None else deviation * weight
    statistics = torch.stack([mean, deviation, scale])
    of_bias, product = batch_norm_backward(out, gradient.contiguous(), x, statistics)
    return out, product * deviation, of_bias

"""Dropout on a CPU: noise that is drawn in a fraction of the time, and exists as bits alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.capture.nodes import saved_as
from gact_graph.capture.trace import Call
from gact_graph.codecs import Saved
from gact_graph.ops.bernoulli import DropoutNoise, dropout_noise
from gact_graph.support.current import may_write
from gact_graph.support.storage import is_plain

_LEAST = 1 << 12
"""The least number of elements: fewer are drawn sooner than the generator's state is copied."""


def dropout(call: Call, saves_noise: Callable[[int], bool]) -> Callable[[], Tensor] | None:
    """Return a function to run in place of a dropout on a CPU; None for another operation.

    The result, its gradient and the generator's state are PyTorch's.

    Args:
        call: The operation.
        saves_noise: Returns for a number of bytes whether the noise that the operation saves is
            that of :attr:`Call.noise`, so that a placeholder on the meta device can stand for it.
    """
    if call.func is not F.dropout and call.func is not torch.dropout:
        return None
    x, p = call.argument(0, "input"), call.argument(1, "p", default=0.5)
    if not isinstance(x, Tensor) or not is_plain(x) or not isinstance(p, float) or not 0 < p < 1:
        return None
    if x.device.type != "cpu" or not x.is_contiguous() or not x.is_floating_point():
        return None
    if x.numel() < _LEAST or not call.argument(2, "training", "train", default=True):
        return None

    def run() -> Tensor:
        noise = dropout_noise(x, p)
        if noise is None:
            result: Tensor = call.func(*call.args, **call.kwargs)
            return result
        if saves_noise(x.nbytes) and not call.argument(3, "inplace"):
            call.noise = noise
            result = _Dropout.apply(x, noise)
            return result
        factor = noise.tensor(x.shape, x.dtype)
        return x.mul_(factor) if call.argument(3, "inplace") else x * factor

    return run


def noise_of(result: Tensor) -> Saved | None:
    """Return the saved noise of which a tensor is the product with another; None for no product."""
    return saved_as(result, "Dropout", "other") or saved_as(result, "Mul", "other")


class _Dropout(torch.autograd.Function):
    """The product with noise, of which no more than the bits exist outside of backward."""

    differentiates = "dropout", ("other",)

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: DropoutNoise) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(x.shape, dtype=x.dtype, device="meta"))
        return noise.tensor(x.shape, x.dtype).mul_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:
            return None, None
        (noise,) = ctx.saved_tensors
        # In the memory of the noise, unless PyTorch's product would have other strides.
        in_place = may_write(gradient) and gradient.is_contiguous()
        return noise.mul_(gradient) if in_place else gradient * noise, None

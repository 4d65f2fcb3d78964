"""``VarAggregation`` saves how far messages are from the mean at their destination.

PyG takes the variance of messages as the mean of their squares less the square of their mean.
Autograd saves the messages for the one and the means for the other, and backward subtracts what
both give: where means are large beside deviations, nearly all of it cancels, and of noise nothing
does. Here the difference is taken in forward, while messages are exact, and saved in place of both.
Backward brings the sum of its noise at each destination to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import VarAggregation

from gact_graph.capture.derivatives import Once, Shadow, is_opaque
from gact_graph.capture.trace import Call
from gact_graph.support.storage import is_plain

POSITION = "deviation"
"""The position of the difference among the tensors that are saved, in slots."""


class Variance:
    """One call of a ``VarAggregation``.

    Args:
        x: Its messages.
        index: Their destinations.
        dim_size: How many destinations there are; None for as many as ``index`` names.
        dim: Of ``x``, along which messages lie.
    """

    def __init__(self, x: Tensor, index: Tensor, dim_size: int | None, dim: int) -> None:
        self.x = x
        self._index = index
        self._size = dim_size
        self._dim = dim % x.dim()
        self._is_centered = False

    def square_of_mean(self, call: Call) -> Callable[[], Tensor] | None:
        """What computes the square of the mean without a gradient, if this call is that square.

        The gradient of the deviations has its gradient in it already.
        """
        mean = _squared(call)
        if not self._is_centered or mean is None or mean is self.x:
            return None
        return lambda: mean.detach().square()

    def is_square(self, call: Call) -> bool:
        """Whether this call takes the square of the messages."""
        return _squared(call) is self.x

    def square(self, call: Call, label: str) -> Tensor:
        """The square of the messages. It saves their deviations from the mean for backward."""
        self._is_centered = True
        index = self._index
        size = self._size if self._size is not None else int(index.max()) + 1
        shadow = Shadow.apply(self.x)
        result: Tensor = _Square.apply(self.x, index, size, self._dim, call, label, shadow)
        return result


def variance_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Variance | None:
    """The call of a ``VarAggregation`` that starts, if it can save deviations; else None."""
    if type(module) is not VarAggregation or module.semi_grad or not torch.is_grad_enabled():
        return None
    names = ("x", "index", "ptr", "dim_size", "dim")
    given = {"dim": -2} | dict(zip(names, args, strict=False)) | kwargs
    x, index = given.get("x"), given.get("index")
    if given.get("ptr") is not None or not isinstance(x, Tensor) or not isinstance(index, Tensor):
        return None
    if not is_plain(x) or not x.is_floating_point() or not x.requires_grad or not x.numel():
        return None
    if index.dim() != 1 or is_opaque():
        return None
    return Variance(x, index, given.get("dim_size"), given["dim"])


def _squared(call: Call) -> Tensor | None:
    if call.name != "mul" or len(call.args) != 2 or call.args[0] is not call.args[1]:
        return None
    x = call.args[0]
    return x if isinstance(x, Tensor) else None


def _centered(x: Tensor, index: Tensor, size: int, dim: int) -> Tensor:
    """``x`` less the mean at its destination, computed in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = list(x.shape)
    shape[dim] = size
    count = torch.zeros(size, dtype=dtype, device=x.device)
    count.index_add_(0, index, torch.ones_like(index, dtype=dtype))
    mean = torch.zeros(shape, dtype=dtype, device=x.device).index_add_(dim, index, x.to(dtype))
    mean /= count.clamp_(min=1).view([-1 if d == dim else 1 for d in range(x.dim())])
    return mean.index_select(dim, index).neg_().add_(x).to(x.dtype)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        size: int,
        dim: int,
        call: Call,
        label: str,
        shadow: Tensor,
    ) -> Tensor:
        deviation = _centered(x, index, size, dim)
        call.tensors = {POSITION: deviation, "index": index}
        ctx.save_for_backward(deviation, index)
        ctx.size, ctx.dim, ctx.label, ctx.dtype, ctx.shadow = size, dim, label, x.dtype, shadow
        ctx.set_materialize_grads(False)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        if gradient is None:
            return (None,) * 7
        deviation, index = ctx.saved_tensors
        derivative = 2 * _centered(deviation, index, ctx.size, ctx.dim)
        product = Once.apply(gradient, derivative, ctx.dtype, ctx.label, ctx.shadow)
        return product, None, None, None, None, None, None

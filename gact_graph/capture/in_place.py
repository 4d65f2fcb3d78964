"""Operations whose backward works in the memory of a decoded tensor.

PyTorch's own nodes decode all saved tensors first and hold them until they have made all gradients,
each in new memory. A decoded tensor is nobody else's: here a gradient takes its place as soon as
nothing reads it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.capture.trace import Call
from gact_graph.codecs.mask import Joint
from gact_graph.support.current import is_transformed, may_write, saved_by, with_advice
from gact_graph.support.part import in_proportion, piece
from gact_graph.support.storage import is_plain

aten: Final = torch.ops.aten

_LEAST = 1 << 16
"""The least elements of an argument: fewer take less time in PyTorch's own nodes."""

_PART = 1 << 19
"""The elements of a part of a sum of products: temporary tensors of a part stay in the cache."""


def backward_in_place(call: Call, may_reorder: bool) -> Callable[[], Tensor] | None:
    """Return a function to run in place of an operation; None for the operation itself.

    Args:
        call: The operation.
        may_reorder: Whether gradients may add up in another order: with codes, and in blocks.
    """
    match = _MATCHES.get(call.func)
    if match is None or not torch.is_grad_enabled() or is_transformed():
        return None
    return match(call) if may_reorder or match is _relu else None


def _fits(*tensors: Any) -> bool:
    """Return whether tensors of floating-point numbers may be arguments; the first is large."""
    return all(
        isinstance(t, Tensor) and is_plain(t) and t.is_floating_point() for t in tensors
    ) and (
        tensors[0].numel() >= in_proportion(_LEAST)
        and tensors[0].is_contiguous()
        and len({(t.dtype, t.device) for t in tensors}) == 1
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )


def owns_first(packed: Sequence[Any] | None) -> bool:
    """Return whether the first decoded tensor is memory that nothing else holds."""
    return packed is not None and packed[0].context.sample.makes_memory


# ReLU.


def _relu(call: Call) -> Callable[[], Tensor] | None:
    x = call.argument(0, "input", "self")
    if call.argument(1, "inplace", default=False) or not _fits(x) or not x.requires_grad:
        return None
    return lambda: _Relu.apply(x)


class _Relu(torch.autograd.Function):
    differentiates = "relu", ("result",)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.relu()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None]:
        packed, [gradient] = saved_by(ctx), gradients
        if gradient is None:
            return (None,)
        joint = packed is not None and isinstance(packed[0].context.sample, Joint)
        if joint and may_write(gradient) and gradient.sum().isfinite():
            # The dropout's backward has zeros wherever this one would, unless zero met infinity or
            # NaN. Strides are PyTorch's.
            return (gradient.contiguous(),)
        (result,) = ctx.saved_tensors
        if not may_write(gradient) or not owns_first(packed):
            return (aten.threshold_backward(gradient, result, 0),)
        result = result.detach()
        return (aten.threshold_backward.grad_input(gradient, result, 0, grad_input=result),)


# Products of rows and a factor that all rows share, and matrix products.


def _save(ctx: Any, x: Tensor, weight: Tensor, of_x: bool) -> None:
    """Save the factors of a product for backward, as PyTorch's own nodes do.

    Without a gradient of x, the weight is not saved, and may change before backward.
    """
    ctx.save_for_backward(x, weight if of_x else None)


def _scaled(call: Call) -> Callable[[], Tensor] | None:
    """``x * weight``, as the scores of GAT, where the weight broadcasts over the rows of x."""
    if call.kwargs or len(call.args) != 2:
        return None
    x, weight = call.args
    if not _fits(x, weight) or not weight.requires_grad or x.dim() < 2:
        return None
    tail = weight.shape[1:] if weight.dim() == x.dim() else weight.shape
    if weight.dim() == x.dim() and weight.size(0) != 1:
        return None
    return (lambda: _Scaled.apply(x, weight)) if tail == x.shape[1:] else None


class _Scaled(torch.autograd.Function):
    differentiates = "mul", ("self", "other")

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        _save(ctx, x, weight, of_x=ctx.needs_input_grad[0])
        ctx.shape = weight.shape
        return x * weight

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        packed = saved_by(ctx)
        [gradient], (of_rows, of_factor) = gradients, ctx.needs_input_grad
        if gradient is None:
            return None, None
        x, weight = ctx.saved_tensors
        if not may_write(gradient):
            of_x = gradient * weight if of_rows else None
            return of_x, (gradient * x).sum_to_size(ctx.shape) if of_factor else None
        of_weight = None
        if of_factor:
            rows = max(1, piece(_PART, x.device) // max(1, x[0].numel()))
            parts = zip(x.split(rows), gradient.split(rows), strict=True)
            of_weight = torch.stack([(a * b).sum(0) for a, b in parts]).sum(0).view(ctx.shape)
        if not of_rows:
            return None, of_weight
        out = x.detach() if owns_first(packed) else torch.empty_like(x)
        return torch.mul(gradient, weight, out=out), of_weight


def _linear(call: Call) -> Callable[[], Tensor] | None:
    x, weight = call.argument(0, "input"), call.argument(1, "weight")
    bias = call.argument(2, "bias")
    given = (x, weight) if bias is None else (x, weight, bias)
    if not _fits(*given) or x.dim() != 2 or weight.dim() != 2 or not weight.requires_grad:
        return None
    if bias is not None and bias.dim() > 1:
        return None
    return lambda: _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    differentiates = "addmm", ("mat1", "mat2")

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        _save(ctx, x, weight, of_x=ctx.needs_input_grad[0])
        return F.linear(x, weight, bias)

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, packed = ctx.needs_input_grad, saved_by(ctx)
        [gradient] = gradients
        if gradient is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        of_bias = gradient.sum(0) if needed[2] else None
        of_weight = gradient.t() @ x if needed[1] else None
        of_x = _of_rows(gradient, weight, x, packed) if needed[0] else None
        return of_x, of_weight, of_bias


def _addmm(call: Call) -> Callable[[], Tensor] | None:
    if len(call.args) != 3 or not call.kwargs.keys() <= {"beta", "alpha"}:
        return None
    added, x, weight = call.args
    if not _fits(x, weight, added) or x.dim() != 2 or weight.dim() != 2:
        return None
    if added.shape != (x.size(0), weight.size(1)) or not weight.requires_grad:
        return None
    beta, alpha = (call.kwargs.get(name, 1) for name in ("beta", "alpha"))
    if not all(isinstance(factor, int | float) for factor in (beta, alpha)):
        return None
    return lambda: _Addmm.apply(added, x, weight, beta, alpha)


class _Addmm(torch.autograd.Function):
    differentiates = "addmm", ("mat1", "mat2")

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, x: Tensor, weight: Tensor, beta: float, alpha: float
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        _save(ctx, x, weight, of_x=ctx.needs_input_grad[1])
        ctx.beta, ctx.alpha = beta, alpha
        return torch.addmm(added, x, weight, beta=beta, alpha=alpha)

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, packed = ctx.needs_input_grad, saved_by(ctx)
        [gradient] = gradients
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        of_weight = (x.t() @ gradient) * ctx.alpha if needed[2] else None
        of_x = None
        if needed[1]:
            of_x = _of_rows(gradient, weight.t(), x, packed, ctx.alpha)
        of_added = None
        if needed[0]:
            of_added = gradient if ctx.beta == 1 else gradient * ctx.beta
        return of_added, of_x, of_weight, None, None


def _of_rows(
    gradient: Tensor,
    weight: Tensor,
    x: Tensor,
    packed: Sequence[Any] | None,
    factor: float = 1,
) -> Tensor:
    """Return the gradient of the rows x of a product, ``factor * gradient @ weight``."""
    if not may_write(gradient) or not owns_first(packed):
        of_x = gradient @ weight
        return of_x if factor == 1 else of_x * factor
    of_x = torch.mm(gradient, weight, out=x.detach())
    return of_x if factor == 1 else of_x.mul_(factor)


_MATCHES: dict[Any, Callable[[Call], Callable[[], Tensor] | None]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _scaled),
    F.linear: _linear,
    torch.addmm: _addmm,
}

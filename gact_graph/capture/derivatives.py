"""Pointwise operations that save their derivative, in place of what it is computed from.

Autograd saves the argument x of ``gelu``, and backward multiplies by the derivative there. The
derivative of a noisy x is wrong on average: the mean of f'(x + noise) is not f'(x). So where x
would get noise, the derivative is computed in forward, while x is exact, and saved in its place: it
takes as many bits, and what backward multiplies by is right on average.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.capture.trace import Call
from gact_graph.support.current import advises
from gact_graph.support.storage import is_plain
from gact_graph.support.transforms import is_transformed

POSITION = "derivative"
"""The position of the derivative among the tensors that an operation saves, in slots."""

# Operations whose derivative is not linear in what autograd saves. tanh and sigmoid are not among
# them: they save their result, which the next operation often saves too.
BOUNDED = frozenset(
    {
        *("gelu", "silu", "mish", "softplus", "elu", "selu", "celu", "log_sigmoid", "logsigmoid"),
        *("hardswish", "hardsigmoid", "softsign", "tanhshrink", "hardshrink", "softshrink"),
        *("sin", "cos", "sinc", "atan", "arctan", "asinh", "arcsinh", "sinh", "cosh"),
        *("erf", "erfc", "special_erf", "special_erfc", "pow"),
    }
)
# The derivative of these has poles and spans orders of magnitude: its error has to be relative.
UNBOUNDED = frozenset(
    {
        *("log1p", "special_log1p", "logit", "special_logit", "tan", "erfinv", "special_erfinv"),
        *("acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh"),
        *("lgamma", "digamma", "special_gammaln", "special_digamma"),
    }
)

_APART = (Tensor.detach, lambda tensor: tensor)


class Pointwise:
    """A pointwise operation about to run, on one tensor that needs a gradient."""

    def __init__(self, call: Call, x: Tensor, function: Callable[[Tensor], Tensor], dirty: bool):
        self.x = x
        self._call = call
        self._function = function
        self._dirty = dirty

    def run(self, label: str) -> Tensor:
        """The operation's result. Its derivative is saved as ``label.derivative``."""
        shadow = Shadow.apply(self.x)
        result: Tensor = _Multiply.apply(
            self.x, self._function, self._call, self._dirty, label, shadow
        )
        return result


def pointwise(call: Call) -> Pointwise | None:
    """The operation, if its derivative can be saved in place of its argument; else None."""
    if call.name not in BOUNDED and call.name not in UNBOUNDED:
        return None
    x = call.argument(0, "input", "self")
    if not isinstance(x, Tensor) or not is_plain(x) or not x.is_floating_point():
        return None
    if not x.requires_grad or not torch.is_grad_enabled() or is_opaque():
        return None
    others = [*call.args[1:], *call.kwargs.values()]
    if any(isinstance(other, Tensor) and other is not x for other in others):
        return None
    if call.name == "pow" and not _is_curved(call.argument(1, "exponent")):
        return None
    function, dirty = _out_of_place(call)
    if function is None or (dirty and (x.is_leaf or x._is_view())):
        return None
    return Pointwise(call, x, function, dirty)


def _is_curved(exponent: object) -> bool:
    """Whether the derivative of this power is not linear, but has no pole at zero."""
    return isinstance(exponent, int | float) and exponent > 1 and exponent != 2


def is_opaque() -> bool:
    """Whether forward-mode derivatives, ``torch.func`` or a tracer are active.

    They look into each operation, and could not look into an autograd function in Python.
    """
    return forward_ad._current_level >= 0 or is_transformed()


def _out_of_place(call: Call) -> tuple[Callable[[Tensor], Tensor] | None, bool]:
    """The operation without its effect in place, and whether it has one."""
    func, kwargs = call.func, dict(call.kwargs)
    name = getattr(func, "__name__", "")
    in_place_method = name.endswith("_") and not name.startswith("_")
    if in_place_method:
        homes: tuple[Any, ...] = (Tensor, torch, F)
        home = next((home for home in homes if hasattr(home, call.name)), None)
        if home is None:
            return None, False
        func = getattr(home, call.name)
    names = _arguments(func)
    args = [*call.args]
    dirty = in_place_method
    at = names.index("inplace") if "inplace" in names else len(args)
    if at < len(args):
        dirty, args[at] = bool(args[at]), False
    elif "inplace" in kwargs:
        dirty, kwargs["inplace"] = bool(kwargs["inplace"]), False
    if args:
        rest = args[1:]
        return (lambda x: func(x, *rest, **kwargs)), dirty
    [key] = (key for key in ("input", "self") if key in kwargs)
    return (lambda x: func(**(kwargs | {key: x}))), dirty


@functools.lru_cache(maxsize=4096)  # a library may make functions as it goes
def _arguments(func: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments of a function in Python; none of a builtin one."""
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return ()


class _Multiply(torch.autograd.Function):
    """Computes an operation and saves its derivative; backward multiplies by that."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        call: Call,
        dirty: bool,
        label: str,
        shadow: Tensor,
    ) -> Tensor:
        # The operation itself saves tensors, too. They live no longer than this block.
        with torch.enable_grad(), saved_tensors_hooks(*_APART):
            leaf = x.detach().requires_grad_()
            result = function(leaf)
            ones = torch.ones((), dtype=result.dtype, device=x.device).expand_as(result)
            [derivative] = torch.autograd.grad(result, leaf, ones)
        result = result.detach()
        if dirty:
            x.copy_(result)
            result = x
            ctx.mark_dirty(x)
        call.tensors = {POSITION: derivative}
        ctx.save_for_backward(derivative)
        ctx.label, ctx.dtype, ctx.shadow = label, x.dtype, shadow
        ctx.set_materialize_grads(False)  # what has no gradient hands none on, as in stock
        return result

    @staticmethod
    @advises
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        if gradient is None:
            return (None,) * 6
        [derivative] = ctx.saved_tensors
        if torch.is_grad_enabled():
            product = Once.apply(gradient, derivative, ctx.dtype, ctx.label, ctx.shadow)
        else:
            product = _product(gradient, derivative, ctx.dtype)
        return product, None, None, None, None, None


class Shadow(torch.autograd.Function):
    """An empty tensor that hangs on the graph of ``x``, and holds none of the memory of ``x``.

    Through it a second backward reaches :class:`Once`, which tells the user why it cannot be had.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None  # what comes after it raises


class Once(torch.autograd.Function):
    """The product in backward. It has no gradient: the second derivative is not known."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        derivative: Tensor,
        dtype: torch.dtype,
        label: str,
        shadow: Tensor,
    ) -> Tensor:
        ctx.label = label
        return _product(gradient, derivative, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            f"Expected one backward through {ctx.label} (got a second one, through the gradient): "
            "its derivative is saved, in few bits, and not what that depends on. Keep its argument "
            f"instead, with pin={{{ctx.label + '.*'!r}: 32}}, or take level='lossless'."
        )


def _product(gradient: Tensor, derivative: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient * derivative).to(dtype)

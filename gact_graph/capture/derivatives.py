"""Pointwise operations that save their derivative in place of their argument.

Autograd saves the argument x of ``gelu``, and backward multiplies by the derivative at x. The
derivative at a noisy x is biased: the mean of f'(x + noise) is not f'(x). So where x would get
noise, the derivative is computed in forward, from the exact x, and saved in its place: it takes as
many bits, and is unbiased.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.capture.trace import Call
from gact_graph.support.current import is_transformed, with_advice
from gact_graph.support.storage import is_plain

POSITION = "derivative"
"""The position of the derivative in slots."""

# Operations whose derivative is not linear in the saved tensor, except tanh and sigmoid: these save
# their result, which the next operation often saves too.
BOUNDED = frozenset(
    {
        *("gelu", "silu", "mish", "softplus", "elu", "selu", "celu", "log_sigmoid", "logsigmoid"),
        *("hardswish", "hardsigmoid", "softsign", "tanhshrink", "hardshrink", "softshrink"),
        *("sin", "cos", "sinc", "atan", "arctan", "asinh", "arcsinh", "sinh", "cosh"),
        *("erf", "erfc", "special_erf", "special_erfc", "pow"),
    }
)
# Their derivative has poles and spans orders of magnitude, so its error has to be relative.
UNBOUNDED = frozenset(
    {
        *("log1p", "special_log1p", "logit", "special_logit", "tan", "erfinv", "special_erfinv"),
        *("acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh"),
        *("lgamma", "digamma", "special_gammaln", "special_digamma"),
    }
)

_STEPS = frozenset({"hardshrink", "softshrink", "hardsigmoid"})
"""Those with a derivative of 0 and another number. Where it is 0, the gradient is 0, also for an
incoming gradient of infinity or NaN."""

_NO_HOOKS = (Tensor.detach, lambda tensor: tensor)


class Replacement(NamedTuple):
    """A form of an operation that saves another tensor in place of its argument.

    Args:
        x: The argument.
        position: The name of the other tensor in slots.
        run: A function from the label of the operation to its result.
    """

    x: Tensor
    position: str
    run: Callable[[str], Tensor]


def pointwise(call: Call) -> Replacement | None:
    """Return the replacement of an operation whose derivative can be saved."""
    if call.name not in BOUNDED and call.name not in UNBOUNDED:
        return None
    x = call.argument(0, "input", "self")
    if not isinstance(x, Tensor) or not is_plain(x) or not x.is_floating_point():
        return None
    if not x.requires_grad or not torch.is_grad_enabled() or is_transformed():
        return None
    others = [*call.args[1:], *call.kwargs.values()]
    if any(isinstance(other, Tensor) and other is not x for other in others):
        return None
    if call.name == "pow" and not _is_curved(call.argument(1, "exponent")):
        return None
    function, in_place = _out_of_place(call)
    if function is None or (in_place and (x.is_leaf or x._is_view())):
        return None

    def forward(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # The tensors that the operation itself saves live no longer than this block.
        with torch.enable_grad(), saved_tensors_hooks(*_NO_HOOKS):
            leaf = x.detach().requires_grad_()
            result = function(leaf)
            ones = torch.ones((), dtype=result.dtype, device=x.device).expand_as(result)
            [derivative] = torch.autograd.grad(result, leaf, ones)
        return result.detach(), {POSITION: derivative}

    def run(label: str) -> Tensor:
        arguments = forward, None, call, in_place, label
        result: Tensor = Factored.apply(x, *arguments, GraphAnchor.apply(x))
        return result

    return Replacement(x, POSITION, run)


def _is_curved(exponent: object) -> bool:
    """Return whether the derivative of this power is not linear and has no pole at zero."""
    return isinstance(exponent, int | float) and exponent > 1 and exponent != 2


def _out_of_place(call: Call) -> tuple[Callable[[Tensor], Tensor] | None, bool]:
    """Return the operation without its effect in place, and whether it has one."""
    func, args, kwargs = call.func, [*call.args], dict(call.kwargs)
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("_")
    if in_place:
        namespaces: tuple[Any, ...] = (Tensor, torch, F)
        home = next((home for home in namespaces if hasattr(home, call.name)), None)
        if home is None:
            return None, False
        func = getattr(home, call.name)
    names = _parameters(func)
    at = names.index("inplace") if "inplace" in names else len(args)
    if at < len(args):
        in_place, args[at] = bool(args[at]), False
    elif "inplace" in kwargs:
        in_place, kwargs["inplace"] = bool(kwargs["inplace"]), False
    if args:
        return (lambda x: func(x, *args[1:], **kwargs)), in_place
    [key] = (key for key in ("input", "self") if key in kwargs)
    return (lambda x: func(**(kwargs | {key: x}))), in_place


@functools.lru_cache(maxsize=4096)  # libraries may create functions at run time
def _parameters(func: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a Python function; none of a builtin one."""
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return ()


class Factored(torch.autograd.Function):
    """Runs an operation and saves its derivative, by which backward multiplies.

    Args:
        x: The argument.
        forward: A function from ``x`` to the result, which carries no graph, and the tensors to
            save, by their names in slots.
        derivative: A function from these tensors to the derivative, which holds no other tensor;
            None if the first of them is the derivative.
        call: The call of the operation.
        in_place: Whether the result replaces ``x``.
        label: The label of the operation.
        anchor: The :class:`GraphAnchor` of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]],
        derivative: Callable[..., Tensor] | None,
        call: Call,
        in_place: bool,
        label: str,
        anchor: Tensor,
    ) -> Tensor:
        result, call.tensors = forward(x)
        if in_place:
            x.copy_(result)
            result = x
            ctx.mark_dirty(x)
        ctx.save_for_backward(*call.tensors.values())
        ctx.derivative, ctx.label, ctx.dtype, ctx.anchor = derivative, label, x.dtype, anchor
        ctx.is_step = call.name in _STEPS
        ctx.set_materialize_grads(False)  # no gradient in, no gradient out, as in stock autograd
        return result

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        if gradient is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        derivative = saved[0] if ctx.derivative is None else ctx.derivative(*saved)
        if ctx.is_step:
            gradient = torch.where(derivative == 0, 0, gradient)
        if torch.is_grad_enabled():
            arguments = gradient, derivative, ctx.dtype, ctx.label, ctx.anchor
            product = _OnceDifferentiable.apply(*arguments)
        else:
            product = (gradient * derivative).to(ctx.dtype)
        return product, None, None, None, None, None, None


class GraphAnchor(torch.autograd.Function):
    """Returns an empty tensor in the graph of ``x`` that holds no memory of ``x``.

    Through it a second backward reaches :class:`_OnceDifferentiable`, which raises the error.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None  # the error was raised before


class _OnceDifferentiable(torch.autograd.Function):
    """The product in backward. It has no gradient, since the second derivative is unknown."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        derivative: Tensor,
        dtype: torch.dtype,
        label: str,
        anchor: Tensor,
    ) -> Tensor:
        ctx.label = label
        return (gradient * derivative).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            f"Expected one backward through {ctx.label} (got a second one, through the gradient): "
            "only its derivative is saved, in few bits. Keep its argument instead, with "
            f"pin={{{ctx.label + '.*'!r}: 32}}, or take level='lossless'."
        )

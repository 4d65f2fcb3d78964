"""``VarAggregation`` saves the deviations of messages from the mean at their destination.

PyG computes the variance of messages as the mean of their squares minus the square of their mean.
Autograd saves the messages for the former and the means for the latter, and backward subtracts the
two gradients: where means are large beside deviations, nearly all of the gradient cancels and none
of the noise does. Here the difference is computed in forward, from exact messages, and saved in
place of both. Backward shifts the noise at each destination so that it sums to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import VarAggregation

from gact_graph.capture.derivatives import (
    Factored,
    GraphAnchor,
    Replacement,
)
from gact_graph.capture.trace import Call
from gact_graph.support.current import is_transformed
from gact_graph.support.storage import is_plain

POSITION = "deviation"
"""The position of the deviations in slots."""


class Variance:
    """One call of a ``VarAggregation``.

    Args:
        x: The messages.
        index: Their destinations.
        dim_size: The number of destinations; None to read it from ``index``.
        dim: The dimension of ``x`` along which messages lie.
    """

    def __init__(self, x: Tensor, index: Tensor, dim_size: int | None, dim: int) -> None:
        self._x = x
        self._index = index
        self._size = dim_size
        self._dim = dim % x.dim()
        self._is_centered = False

    def square_of_mean(self, call: Call) -> Callable[[], Tensor] | None:
        """Return a function for the square of the mean without a gradient, if this call is it.

        The gradient of the deviations contains its gradient.
        """
        mean = _squared(call)
        if not self._is_centered or mean is None or mean is self._x:
            return None
        return lambda: mean.detach().square()

    def square(self, call: Call) -> Replacement | None:
        """Return the replacement of this call, which saves deviations, if it squares messages."""
        if _squared(call) is not self._x:
            return None

        def run(label: str) -> Tensor:
            self._is_centered = True
            index, dim = self._index, self._dim
            size = self._size if self._size is not None else int(index.max()) + 1

            def forward(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                deviation = _centered(x, index, size, dim)
                return x * x, {POSITION: deviation, "index": index}

            def derivative(deviation: Tensor, index: Tensor) -> Tensor:
                return 2 * _centered(deviation, index, size, dim)

            arguments = forward, derivative, call, False, label
            result: Tensor = Factored.apply(self._x, *arguments, GraphAnchor.apply(self._x))
            return result

        return Replacement(self._x, POSITION, run)


def variance_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Variance | None:
    """Return the call of a ``VarAggregation`` that starts, if it can save deviations."""
    if type(module) is not VarAggregation or module.semi_grad or not torch.is_grad_enabled():
        return None
    names = ("x", "index", "ptr", "dim_size", "dim")
    arguments = {"dim": -2} | dict(zip(names, args, strict=False)) | kwargs
    x, index = arguments.get("x"), arguments.get("index")
    if (
        not (isinstance(x, Tensor) and isinstance(index, Tensor))
        or arguments.get("ptr") is not None
    ):
        return None
    if not is_plain(x) or not x.is_floating_point() or not x.requires_grad or not x.numel():
        return None
    if index.dim() != 1 or is_transformed():
        return None
    return Variance(x, index, arguments.get("dim_size"), arguments["dim"])


def _squared(call: Call) -> Tensor | None:
    if call.name != "mul" or len(call.args) != 2 or call.args[0] is not call.args[1]:
        return None
    x = call.args[0]
    return x if isinstance(x, Tensor) else None


def _centered(x: Tensor, index: Tensor, size: int, dim: int) -> Tensor:
    """``x`` minus the mean at its destination, computed in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = list(x.shape)
    shape[dim] = size
    count = torch.zeros(size, dtype=dtype, device=x.device)
    count.index_add_(0, index, torch.ones_like(index, dtype=dtype))
    mean = torch.zeros(shape, dtype=dtype, device=x.device).index_add_(dim, index, x.to(dtype))
    mean /= count.clamp_(min=1).view([-1 if d == dim else 1 for d in range(x.dim())])
    return mean.index_select(dim, index).neg_().add_(x).to(x.dtype)

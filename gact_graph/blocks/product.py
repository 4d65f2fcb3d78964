"""Products seen from outside: which one a function's result is, and of what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.multiply})


class Products(TorchFunctionMode):
    """Inside, products of two tensors are counted; one may be left out.

    Args:
        left_out: Its number. It has no memory and no graph, and zeros in place of its values.

    Attributes:
        count: Of the products so far.
        result: Of the last one, or of the one left out.
        factors: The same one's.
    """

    def __init__(self, left_out: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self.result: Tensor | None = None
        self.factors: tuple[Tensor, Tensor] | None = None
        self._left_out = left_out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operation gives, or zeros for the product that is left out."""
        if func not in _PRODUCTS or kwargs or not all(type(given) is Tensor for given in args):
            return func(*args, **(kwargs or {}))
        number, self.count = self.count, self.count + 1
        if number == self._left_out:
            self.factors, self.result = args, _zeros(*args)
            return self.result
        result = func(*args)
        if self._left_out is None:
            self.factors, self.result = args, result
        return result


def _zeros(one: Tensor, other: Tensor) -> Tensor:
    kind = torch.result_type(one, other)
    zero = torch.zeros((), dtype=kind, device=one.device)
    return zero.expand(torch.broadcast_shapes(one.shape, other.shape))

"""The products of tensors that a function makes, counted; one of them may be left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gact_graph.layers.blocks.steps import Recorder

_PRODUCTS = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.multiply})

_OF_SHAPES = frozenset({"size", "dim", "numel", "__len__", "is_floating_point"})
"""Functions that ask for no more than a tensor's shape and type."""

_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "is_cuda", "layout"})
"""Attributes that tell no more than that."""


class Products(Recorder):
    """Within, products of two tensors are counted from 0.

    Args:
        left_out: The number of a product that is not computed: its result has the right shape and
            type, but zeros for values, no memory and no graph.
        x_j: A tensor that no other operation should read.

    Attributes:
        count: Number of products so far.
        factors: The two factors of the product left out; without one, those of the last product.
        result: The result of the same product.
        x_j_is_read: Whether another operation read the values of ``x_j``.
    """

    def __init__(self, left_out: int | None = None, x_j: Tensor | None = None) -> None:
        super().__init__()
        self.count = 0
        self.result: Tensor | None = None
        self.factors: tuple[Tensor, Tensor] | None = None
        self.x_j_is_read = False
        self._left_out = left_out
        self._x_j = x_j

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.record(func, args, kwargs)
        if func not in _PRODUCTS or kwargs or not all(type(given) is Tensor for given in args):
            self._look(func, args, kwargs)
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        if number == self._left_out:
            self.factors, self.result = args, _zeros(*args)
            return self.result
        self._look(func, args, kwargs)
        result = func(*args)
        if self._left_out is None:
            self.factors, self.result = args, result
        return result

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            harmless = getattr(getattr(func, "__self__", None), "__name__", "") in _ATTRIBUTES
        else:
            harmless = name in _OF_SHAPES
        if self._x_j is not None and not harmless:
            self.x_j_is_read |= any(value is self._x_j for value in tree_leaves((args, kwargs)))


def _zeros(one: Tensor, other: Tensor) -> Tensor:
    kind = torch.result_type(one, other)
    zero = torch.zeros((), dtype=kind, device=one.device)
    return zero.expand(torch.broadcast_shapes(one.shape, other.shape))

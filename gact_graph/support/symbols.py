"""Sizes of tensors while a compiler traces them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def expected(size: Any) -> float:
    """Return a size, which may be a symbol, as far as a compiler knows it.

    The size in the call that is traced; if that depends on values, the largest possible size, which
    may be infinite. A comparison of the symbol itself would bind the graph to its result.
    """
    if isinstance(size, int):
        return size
    node = size.node
    known = node.hint if node.has_hint() else None
    if known is None:
        largest = float(node.shape_env.bound_sympy(node.expr).upper)
        return largest if largest < 2**62 else math.inf
    return float(known)


def expected_bytes(x: Tensor) -> float:
    """Return the bytes of a tensor, as far as a compiler knows its size."""
    return expected(x.numel()) * x.element_size()

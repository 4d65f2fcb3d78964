"""What the backward of an operation reads of a tensor that it saved.

Autograd saves whole tensors. Some operations read no more of them than on which side of a bound
each element lies, or nothing at all; and some must have them exactly, for they compare elements for
equality. What is not listed here reads values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.bitmask import pack_bits
from gact_graph.trace import Call


@dataclass(frozen=True)
class Values:
    """Values, which may carry noise that is zero on average.

    Args:
        least_bits: The width below which the noise would not be zero on average any more.
        sign: Whether the noise must not move an element across zero.
    """

    least_bits: int = 1
    sign: bool = False


@dataclass(frozen=True)
class Exact:
    """Values that are compared with others for equality."""


@dataclass(frozen=True)
class Nothing:
    """Nothing: the tensor is saved in vain."""


@dataclass(frozen=True)
class Side:
    """Whether each element passes a test.

    Args:
        test: ``above`` (x > bound), ``not_at_most`` (not x <= bound, so also NaN), ``within`` (both
            bounds included) or ``strictly_within``.
        bounds: One number, or two.
        low: Does not pass the test, and stands for all elements that do not.
        high: Passes it, and stands for all that do.
    """

    test: str
    bounds: tuple[float, ...]
    low: float
    high: float

    def words(self, x: Tensor) -> Tensor:
        """One bit an element, packed as in :func:`gact_graph.bitmask.pack_bits`."""
        if self.test in ("above", "not_at_most"):
            return pack_bits(x, self.test, self.bounds[0])
        low, high = self.bounds
        passed = (x >= low) & (x <= high) if self.test == "within" else (x > low) & (x < high)
        return pack_bits(passed)


@dataclass(frozen=True)
class Sign:
    """The sign: -1, 0 or 1."""


Reads = Values | Exact | Nothing | Side | Sign

VALUES = Values()
# Backward divides by these. The mean of 1 / x under noise is not 1 / (the mean of x): at a few bits
# a group that spans orders of magnitude would turn its small elements into anything.
DIVISORS = frozenset(
    {
        ("div", "other"),
        ("true_divide", "other"),
        ("divide", "other"),
        ("log", "input"),
        ("log2", "input"),
        ("log10", "input"),
        ("log1p", "input"),
        ("sqrt", "result"),
        ("rsqrt", "result"),
        ("reciprocal", "result"),
        ("std", "result"),
    }
)
_DIVISOR = Values(least_bits=16)

EXACT = frozenset(
    {
        *("amax", "amin", "aminmax", "max", "min", "maximum", "minimum", "fmax", "fmin"),
        *("scatter_reduce", "index_reduce", "segment_reduce", "cummax", "cummin", "cumprod"),
        *("prod", "cdist", "median", "nanmedian", "kthvalue", "mode", "renorm"),
    }
)


def reads_of(call: Call, position: str) -> Reads:
    """What the backward of the operation reads of the tensor in this position."""
    special = _SPECIAL.get(call.name)
    if special is not None:
        return special(call, position)
    if call.name in EXACT:
        return Exact()
    return _DIVISOR if (call.name, position) in DIVISORS else VALUES


def _norm(call: Call, position: str) -> Reads:
    """A norm of infinity is a maximum; others divide by their result."""
    power = call.argument(1, "p", "ord", default=2)
    if isinstance(power, int | float) and math.isinf(power):
        return Exact()
    return _DIVISOR if position == "result" else VALUES


def _distance(call: Call, position: str) -> Reads:
    at = 2 if call.name == "dist" else 1
    return Exact() if math.isinf(call.argument(at, "p", default=2)) else VALUES


def _relu(call: Call, position: str) -> Reads:
    return Side("not_at_most", (0.0,), 0.0, 1.0)


def _leaky_relu(call: Call, position: str) -> Reads:
    return Side("above", (0.0,), 0.0, 1.0)


def _threshold(call: Call, position: str) -> Reads:
    bound = call.argument(1, "threshold")
    if _is_rounded(call, bound):
        return Exact()
    return Side("not_at_most", (bound,), -math.inf, math.inf)


def _prelu(call: Call, position: str) -> Reads:
    return Values(sign=True) if position == "input" else VALUES


def _abs(call: Call, position: str) -> Reads:
    return Sign()


def _relu6(call: Call, position: str) -> Reads:
    return Side("strictly_within", (0.0, 6.0), 0.0, 3.0)


def _hardtanh(call: Call, position: str) -> Reads:
    low = float(call.argument(1, "min_val", default=-1.0))
    high = float(call.argument(2, "max_val", default=1.0))
    if _is_rounded(call, low, high):
        return Exact()
    return Side("strictly_within", (low, high), low, _between(low, high))


def _between(low: float, high: float) -> float:
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2
    if math.isfinite(low):
        return low + max(1.0, abs(low))
    return high - max(1.0, abs(high)) if math.isfinite(high) else 0.0


def _is_rounded(call: Call, *bounds: float) -> bool:
    """Whether a narrow type cannot hold the bounds: kernels differ in what they then compare."""
    x = call.argument(0, "input")
    if not isinstance(x, Tensor) or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.tensor(bounds, dtype=x.dtype).tolist() != [float(b) for b in bounds]


def _clamp(call: Call, position: str) -> Reads:
    return _within(call.argument(1, "min"), call.argument(2, "max"))


def _clamp_min(call: Call, position: str) -> Reads:
    return _within(call.argument(1, "min"), None)


def _clamp_max(call: Call, position: str) -> Reads:
    return _within(None, call.argument(1, "max"))


def _within(low: object, high: object) -> Reads:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return Exact()  # saved beside the bounds, and compared with them
    bounds = (
        -math.inf if low is None else float(low),  # type: ignore[arg-type]
        math.inf if high is None else float(high),  # type: ignore[arg-type]
    )
    # NaN lies within no bounds, and a bound within its own.
    inside = bounds[0] if math.isfinite(bounds[0]) else bounds[1]
    return Side("within", bounds, math.nan, inside)


def _reduction(call: Call, position: str) -> Reads:
    """``scatter_reduce`` and ``segment_reduce`` save all they have, whatever the reduction is."""
    if position in ("index", "lengths", "offsets", "indices"):
        return VALUES
    reduce = call.argument(4 if call.name == "scatter_reduce" else 1, "reduce")
    return Nothing() if reduce in ("sum", "mean") else Exact()


def _sparse_mm(call: Call, position: str) -> Reads:
    """``torch.sparse.mm`` with a reduction saves the dense operand for the values' gradient."""
    sparse, dense = call.argument(0, "sparse", "input"), call.argument(1, "dense", "mat2")
    if len(call.args) + len(call.kwargs) < 3 or not isinstance(sparse, Tensor):
        return VALUES
    if sparse.requires_grad or not isinstance(dense, Tensor):
        return VALUES
    return Nothing() if call.position_of(dense) == position else VALUES


_SPECIAL: dict[str, Callable[[Call, str], Reads]] = {
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "threshold": _threshold,
    "prelu": _prelu,
    "abs": _abs,
    "absolute": _abs,
    "relu6": _relu6,
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "scatter_reduce": _reduction,
    "segment_reduce": _reduction,
    "sparse_mm": _sparse_mm,
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "dist": _distance,
    "pdist": _distance,
}

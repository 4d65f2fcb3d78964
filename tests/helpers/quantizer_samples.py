"""The sample inputs that every backend of the quantizer is held to, and comparisons of bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEVICES = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
)
WIDTHS = tuple(range(1, 17))
GROUP = 256
CHANNELS = (
    ((500, 10), 10, 1),
    ((70, 64), 64, 1),
    ((51, 100), 51, 100),
    ((7, 3, 90), 3, 90),
    ((9,), 1, 1),
    ((1,), 1, 1),
)
"""Shapes of normalized tensors, the number of channels, and the consecutive elements of each."""
# Around a vector, a tile and a group, and several groups with a short last one.
SIZES = (0, 1, 3, 63, 64, 65, 255, 256, 257, 1000, 5000)


@dataclass(frozen=True)
class Sample:
    """A named input on the CPU; ``tensor()`` makes it anew, the same each time."""

    kind: str
    size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind}-{self.size}-{str(self.dtype).removeprefix('torch.')}"

    def tensor(self) -> Tensor:
        return _KINDS[self.kind](self.size, self.dtype)


def normal(size: int, dtype: torch.dtype, scale: float = 10.0) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


def _offset(size: int, dtype: torch.dtype) -> Tensor:
    """Far from zero, with a range small beside it."""
    return normal(size, dtype, 1e-2).abs() + 100


def _with(value: float, size: int, dtype: torch.dtype) -> Tensor:
    x = normal(size, dtype)
    x[size // 2] = value
    return x


def _zeros_of_both_signs(size: int, dtype: torch.dtype) -> Tensor:
    x = torch.zeros(size, dtype=dtype)
    x[1::2] = -0.0
    return x


def _close_to_maximum(size: int, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Evenly from ``low`` to ``high`` maxima of the dtype (of float32 for float64)."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    share = torch.linspace(low, high, max(size, 2), dtype=torch.float64)[:size]
    return (share * limit).to(dtype)


def _subnormal(size: int, dtype: torch.dtype) -> Tensor:
    """A range of some thousand of the dtype's (or float32's) smallest steps above zero."""
    smallest = torch.finfo(dtype if dtype.itemsize < 4 else torch.float32).smallest_normal
    return (normal(size, torch.float64).clamp(-20, 20) * smallest / 100).to(dtype)


_KINDS = {
    "normal": normal,
    "offset": _offset,
    "tiny": lambda n, t: normal(n, t, 1e-6),
    "two-values": lambda n, t: (normal(n, t) > 0).to(t),
    "constant": lambda n, t: torch.full((n,), 0.1, dtype=t),
    "minus-zero": lambda n, t: torch.full((n,), -0.0, dtype=t),
    "zeros": _zeros_of_both_signs,
    "constant-max": lambda n, t: torch.full((n,), torch.finfo(t).max, dtype=t),
    "constant-min": lambda n, t: torch.full((n,), torch.finfo(t).min, dtype=t),
    "nan": lambda n, t: _with(torch.nan, n, t),
    "inf": lambda n, t: _with(torch.inf, n, t),
    "minus-inf": lambda n, t: _with(-torch.inf, n, t),
    "all-nan": lambda n, t: torch.full((n,), torch.nan, dtype=t),
    "max-both": lambda n, t: _close_to_maximum(n, t, -1.0, 1.0),
    "max-above": lambda n, t: _close_to_maximum(n, t, 0.9, 1.0),
    "max-below": lambda n, t: _close_to_maximum(n, t, -1.0, -0.9),
    "subnormal": _subnormal,
    "transposed": lambda n, t: normal(n, t).view(-1, 5 if n % 5 == 0 else 1).t(),
    "sliced": lambda n, t: normal(2 * n + 1, t)[1::2],
    "expanded": lambda n, t: normal(n, t)[:, None].expand(n, 3),
}
_EDGE_SIZES = (1, 65, 257, 1000)
SAMPLES = tuple(
    Sample(kind, size, dtype)
    for kind, dtype in itertools.product(_KINDS, DTYPES)
    for size in (SIZES if kind == "normal" else _EDGE_SIZES)
)


def _is_long(sample: Sample) -> bool:
    sizes = SIZES if sample.kind == "normal" else _EDGE_SIZES
    place = [*_KINDS].index(sample.kind) + DTYPES.index(sample.dtype) + sizes.index(sample.size)
    return place % len(DTYPES) != 0


SAMPLE_CASES = [
    pytest.param(sample, marks=pytest.mark.long if _is_long(sample) else ()) for sample in SAMPLES
]
"""The samples as parameters of a test. ``make test`` runs a quarter of them, in which each kind
comes in each dtype and in each of its sizes."""


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())
    return bool(same.all())


def steps_of(stats: Tensor, n: int, group_size: int = GROUP) -> Tensor:
    """The step of each of ``n`` elements, float64."""
    return stats[:, 1].to(torch.float64).repeat_interleave(group_size)[:n]

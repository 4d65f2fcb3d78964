"""The operators of masks on a device beside the pure-torch reference, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

import gact_graph.bitmask  # noqa: F401  defines the operators
from gact_graph.kernels import bitmask_reference
from gact_graph.quantizer import DTYPES

Cases: TypeAlias = Iterator[tuple[str, Callable[[], bool]]]
"""What a case is called, and whether it gives what the reference gives."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPS = torch.ops.gact_graph


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and all bits agree, on whatever device; any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a = a.to(b.device)
    integer = _INTEGERS[a.element_size()]
    same = a.contiguous().view(integer) == b.contiguous().view(integer)
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return bool(same.all())


def mask_cases(device: torch.device, sizes: Sequence[int]) -> Cases:
    """All operators of :mod:`gact_graph.bitmask`, of every dtype, test and size."""
    for dtype in (*DTYPES, torch.bool, torch.uint8, torch.int64):
        for size in sizes:
            x = torch.randn(size, generator=torch.Generator().manual_seed(size))
            x[::7], x[3::7] = 0.0, math.nan
            x = x.to(dtype) if dtype.is_floating_point else (x > 0).to(dtype)
            tests = [(0, 0.0)]
            if dtype.is_floating_point:
                tests += [(test, t) for test in (1, 2) for t in (0.0, 0.1, math.inf)]
            for test, threshold in tests:

                def same(x: Tensor = x, how: tuple[int, float] = (test, threshold)) -> bool:
                    return _same_mask(x, device, *how)

                yield f"mask of {size} {dtype}, test {test}, threshold {threshold}", same
            if dtype.is_floating_point:
                for stranger in (False, True):

                    def same_pair(
                        size: int = size, dtype: torch.dtype = dtype, stranger: bool = stranger
                    ) -> bool:
                        return _same_pair(device, size, dtype, stranger)

                    yield f"pair of {size} {dtype}, stranger {stranger}", same_pair


def _same_mask(x: Tensor, device: torch.device, test: int, threshold: float) -> bool:
    words = bitmask_reference.pack_bits(x, test, threshold)
    found = _OPS.pack_bits(x.to(device), test, threshold)
    y = bitmask_reference.unpack_bits(words, list(x.shape), 0.0, 1.0, x.dtype)
    return same_bytes(found, words) and same_bytes(
        _OPS.unpack_bits(found, x.shape, 0.0, 1.0, x.dtype), y
    )


def _same_pair(device: torch.device, size: int, dtype: torch.dtype, stranger: bool) -> bool:
    x = torch.zeros(size, dtype=dtype)
    x[1::3] = 1.25
    if stranger and size:
        x[size - 1] = -0.0
    words, matched = bitmask_reference.pack_pair(x, 0.0, 1.25)
    found, found_matched = _OPS.pack_pair(x.to(device), 0.0, 1.25)
    if bool(found_matched) != bool(matched):
        return False
    if not matched:
        return True  # the words mean nothing
    y = bitmask_reference.unpack_bits(words, [size], 0.0, 1.25, dtype)
    return same_bytes(found, words) and same_bytes(
        _OPS.unpack_bits(found, [size], 0.0, 1.25, dtype), y
    )

"""pack_bits, pack_pair and unpack_bits in pure torch: see :mod:`gact_graph.ops.bitmask`."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.checks import (
    TILE,
    check_coded,
    check_strided,
    check_tensor,
    checked_numel,
)

# Words are made in slices of about this many elements, so that their int64 temporaries stay small.
_SLICE = 1 << 22

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_bits(x: Tensor, test: int, threshold: float) -> Tensor:
    """Words [ceil(numel / 64)] int64. Tests: 0 nonzero, 1 above, 2 not at most."""
    check_mask_test(x, test)
    if test == 0:
        return _words(x if x.dtype == torch.bool else x != 0)
    # As torch's own thresholds: types narrower than float32 are compared in float32.
    x = x if x.dtype == torch.float64 else x.float()
    return _words(x > threshold) if test == 1 else _words((x <= threshold).logical_not())


def pack_pair(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Words, and a bool tensor [] that tells whether all elements were one of both."""
    check_pair(x)
    raw = x.contiguous().view(_INTEGERS[x.element_size()])
    raw_low, raw_high = raw_pair(low, high, x.dtype)
    is_high = raw == raw_high
    return _words(is_high), (is_high | (raw == raw_low)).all()


def unpack_bits(
    words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """The tensor of ``shape`` and ``dtype``, contiguous."""
    check_words(words, shape, dtype)
    raw_low, raw_high = raw_pair(low, high, dtype)
    out = torch.full(shape, raw_low, dtype=_INTEGERS[dtype.itemsize], device=words.device)
    flat = out.view(-1)
    lane = torch.arange(TILE, device=words.device)
    for start in range(0, flat.numel(), _SLICE):
        part = flat[start : start + _SLICE]
        chunk = words[start // TILE : -(-(start + part.numel()) // TILE), None]
        part.masked_fill_(((chunk >> lane) & 1).view(-1)[: part.numel()].bool(), raw_high)
    return out.view(dtype)


def check_mask_test(x: Tensor, test: int) -> None:
    """That this test can be made of such a tensor."""
    check_strided("x", x, x.device)
    if not 0 <= test <= 2:
        raise ValueError(f"Expected test from 0 to 2 (got {test})")
    if test:
        check_coded("x", x.dtype)
    elif x.dtype.is_complex:
        raise TypeError(f"Expected x to be real (got {x.dtype})")


def check_pair(x: Tensor) -> None:
    """That it may be one of two numbers."""
    check_strided("x", x, x.device)
    if not x.dtype.is_floating_point:
        raise TypeError(f"Expected x to be floating-point (got {x.dtype})")


def check_words(words: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    """That they are those of a real tensor of this shape."""
    n = checked_numel(shape)
    if dtype.is_complex:
        raise TypeError(f"Expected a real dtype (got {dtype})")
    check_tensor("words", words.contiguous(), torch.int64, [-(-n // TILE)], words.device)


def raw_pair(low: float, high: float, dtype: torch.dtype) -> list[int]:
    """The bits of both in ``dtype``: every dtype can be filled and compared as integers.

    They are computed on the CPU, whatever the default device: another one would be waited for.
    """
    pair = torch.tensor([low, high], dtype=torch.float64, device="cpu").to(dtype)
    return pair.view(_INTEGERS[dtype.itemsize]).tolist()


def _words(mask: Tensor) -> Tensor:
    flat = mask.reshape(-1)
    words = torch.empty(-(-flat.numel() // TILE), dtype=torch.int64, device=mask.device)
    lane = torch.arange(TILE, device=mask.device)
    for start in range(0, flat.numel(), _SLICE):
        part = flat[start : start + _SLICE]
        bits = torch.nn.functional.pad(part, (0, -part.numel() % TILE)).view(-1, TILE)
        # The bits of a word are disjoint, so their sum is their union, also when it wraps.
        words[start // TILE : start // TILE + len(bits)] = (bits.long() << lane).sum(1)
    return words

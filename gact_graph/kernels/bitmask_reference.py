"""pack_bits, pack_pair and unpack_bits in pure torch: see :mod:`gact_graph.bitmask`."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.kernels.reference import TILE

# Words are made in slices of about this many elements, so that their int64 temporaries stay small.
_SLICE = 1 << 22

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_bits(x: Tensor, test: int, threshold: float) -> Tensor:
    """Words [ceil(numel / 64)] int64. Tests: 0 nonzero, 1 above, 2 not at most."""
    if test == 0:
        return _words(x if x.dtype == torch.bool else x != 0)
    # As torch's own thresholds: types narrower than float32 are compared in float32.
    x = x if x.dtype == torch.float64 else x.float()
    return _words(x > threshold) if test == 1 else _words((x <= threshold).logical_not())


def pack_pair(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Words, and a bool tensor [] that tells whether all elements were one of both."""
    raw = x.contiguous().view(_INTEGERS[x.element_size()])
    raw_low, raw_high = _raw(low, high, x.dtype)
    is_high = raw == raw_high
    return _words(is_high), (is_high | (raw == raw_low)).all()


def unpack_bits(
    words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """The tensor of ``shape`` and ``dtype``, contiguous."""
    raw_low, raw_high = _raw(low, high, dtype)
    out = torch.full(shape, raw_low, dtype=_INTEGERS[dtype.itemsize], device=words.device)
    flat = out.view(-1)
    lane = torch.arange(TILE, device=words.device)
    for start in range(0, flat.numel(), _SLICE):
        part = flat[start : start + _SLICE]
        chunk = words[start // TILE : -(-(start + part.numel()) // TILE), None]
        part.masked_fill_(((chunk >> lane) & 1).view(-1)[: part.numel()].bool(), raw_high)
    return out.view(dtype)


def _raw(low: float, high: float, dtype: torch.dtype) -> list[int]:
    """The bits of both in ``dtype``: every dtype can be filled and compared as integers."""
    pair = torch.tensor([low, high], dtype=torch.float64).to(dtype)
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

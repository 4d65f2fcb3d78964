"""Bit masks in pure torch: see :mod:`gact_graph.ops.bitmask` for the format."""

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
from gact_graph.ops.registration import operator

TESTS = ("nonzero", "above", "not_at_most")
"""The tests of an element x: x != 0, x > threshold, and not x <= threshold (which NaN passes)."""

# Elements of a slice that is processed at a time, so that int64 temporaries stay small.
_SLICE = 1 << 22

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@operator()
def pack_bits(x: Tensor, test: int, threshold: float) -> Tensor:
    """Return words [ceil(numel / 64)], int64; ``test`` is an index into :data:`TESTS`."""
    check_mask_test(x, test)
    if test == 0:
        return _words(x if x.dtype == torch.bool else x != 0)
    # As in torch's threshold, types narrower than float32 are compared in float32.
    x = x if x.dtype == torch.float64 else x.float()
    return _words(x > threshold) if test == 1 else _words((x <= threshold).logical_not())


@torch.library.register_fake("gact_graph::pack_bits")
def _pack_bits_fake(x: Tensor, test: int, threshold: float) -> Tensor:
    return x.new_empty((x.numel() + TILE - 1) // TILE, dtype=torch.int64)


@operator()
def pack_pair(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return words, and a bool tensor [] that is true if each element equals low or high."""
    check_pair(x)
    raw = x.contiguous().view(_INTEGERS[x.element_size()])
    raw_low, raw_high = raw_pair(low, high, x.dtype)
    is_high = raw == raw_high
    return _words(is_high), (is_high | (raw == raw_low)).all()


@torch.library.register_fake("gact_graph::pack_pair")
def _pack_pair_fake(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return _pack_bits_fake(x, 0, 0.0), x.new_empty((), dtype=torch.bool)


@operator()
def unpack_bits(
    words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """Return the tensor of ``shape`` and ``dtype``, contiguous."""
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


@torch.library.register_fake("gact_graph::unpack_bits")
def _unpack_bits_fake(
    words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    return words.new_empty(shape, dtype=dtype)


@operator()
def masked_select(x: Tensor, words: Tensor, with_negative_zeros: bool) -> tuple[Tensor, Tensor]:
    """Return the elements whose bit is set, and a bool tensor []: whether the others are 0.

    Others may be -0 only ``with_negative_zeros``.
    """
    check_pair(x)
    check_words(words, [x.numel()], x.dtype)
    mask = unpack_bits(words, [x.numel()], 0.0, 1.0, torch.bool)
    flat = x.reshape(-1)
    values = flat[mask]
    if not with_negative_zeros:
        kind = _INTEGERS[x.element_size()]
        return values, flat.view(kind).count_nonzero() == values.view(kind).count_nonzero()
    return values, flat.count_nonzero() == values.count_nonzero()


@torch.library.register_fake("gact_graph::masked_select")
def _masked_select_fake(
    x: Tensor, words: Tensor, with_negative_zeros: bool
) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(count), x.new_empty((), dtype=torch.bool)


@operator()
def masked_scatter(values: Tensor, words: Tensor, numel: int) -> Tensor:
    """Return a tensor [numel] with the values where bits are set, in order, and 0 elsewhere.

    Raises:
        ValueError: If the words are not those of so many elements; or (on the CPU) if the number of
            values is not that of bits that are set.
    """
    check_words(words, [numel], values.dtype)
    mask = unpack_bits(words, [numel], 0.0, 1.0, torch.bool)
    if values.device.type == "cpu" and values.numel() != (bits := int(mask.sum())):
        raise ValueError(
            f"Expected values to have an element for each bit that is set: {bits} "
            f"(got {values.numel()})"
        )
    return values.new_zeros(numel).masked_scatter_(mask, values)


@torch.library.register_fake("gact_graph::masked_scatter")
def _masked_scatter_fake(values: Tensor, words: Tensor, numel: int) -> Tensor:
    return values.new_empty(numel)


def check_mask_test(x: Tensor, test: int) -> None:
    """Raise an error unless a test applies to a tensor."""
    check_strided("x", x, x.device)
    if not 0 <= test < len(TESTS):
        raise ValueError(f"Expected test from 0 to 2 (got {test})")
    if test:
        check_coded("x", x.dtype)
    elif x.dtype.is_complex:
        raise ValueError(f"Expected x to be real (got {x.dtype})")


def check_pair(x: Tensor) -> None:
    """Raise an error unless a tensor is floating-point."""
    check_strided("x", x, x.device)
    if not x.dtype.is_floating_point:
        raise ValueError(f"Expected x to be floating-point (got {x.dtype})")


def check_words(words: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    """Raise an error unless ``words`` are those of a tensor of this shape and a real dtype."""
    n = checked_numel(shape)
    if dtype.is_complex:
        raise ValueError(f"Expected a real dtype (got {dtype})")
    check_tensor("words", words.contiguous(), torch.int64, [-(-n // TILE)], words.device)


def raw_pair(low: float, high: float, dtype: torch.dtype) -> list[int]:
    """Return two numbers as the bits of ``dtype``: integers fill and compare any dtype.

    The conversion runs on the CPU, whatever the default device, to wait for no other device.
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

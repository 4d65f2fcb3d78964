"""One bit per element: masks, comparisons and tensors of two values.

Format: ``words`` [ceil(numel / 64)] int64; bit i of word w is that of element 64 w + i in
contiguous order. Bits after the last element are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from gact_graph.ops.reference import bitmask as reference
from gact_graph.ops.reference.bitmask import TESTS
from gact_graph.ops.registration import dispatched

_pack_bits = dispatched(reference.pack_bits)
_pack_pair = dispatched(reference.pack_pair)
_unpack_bits = dispatched(reference.unpack_bits)
_masked_select = dispatched(reference.masked_select)
masked_scatter: Final = dispatched(reference.masked_scatter)


def pack_bits(x: Tensor, test: str = "nonzero", threshold: float = 0.0) -> Tensor:
    """Return one bit for each element: whether it passes a test.

    Args:
        x: A bool, integer or floating-point tensor of any shape and strides.
        test: One of :data:`TESTS`.
        threshold: The bound of ``above`` and ``not_at_most``. Types narrower than float32 are
            compared in float32.

    Returns:
        The words [ceil(numel / 64)], int64.

    Raises:
        ValueError: If there is no such test; if ``x`` is not a dense real tensor, or is compared
            and not of float16, bfloat16, float32 or float64.
    """
    if test not in TESTS:
        names = ", ".join(map(repr, TESTS))
        raise ValueError(f"Expected test to be one of {names} (got {test!r})")
    return _pack_bits(x.detach(), TESTS.index(test), threshold)


def pack_pair(x: Tensor, low: float, high: float) -> tuple[Tensor, bool]:
    """Return one bit for each element of a tensor of two values: whether it equals ``high``.

    Args:
        x: A floating-point tensor of any shape and strides.
        low: The value of bit 0; rounded to the dtype of x.
        high: The value of bit 1; rounded likewise.

    Returns:
        The words [ceil(numel / 64)], int64, and whether each element has the bits of ``low`` or of
        ``high`` (0 and -0 differ). The words are meaningless if not.

    Raises:
        ValueError: If ``x`` is not a dense floating-point tensor.
    """
    words, matched = _pack_pair(x.detach(), low, high)
    return words, bool(matched)


def unpack_bits(
    words: Tensor, shape: Sequence[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """Return a contiguous tensor: ``high`` where the bit is set, else ``low``.

    Args:
        words: [ceil(numel / 64)], int64, from :func:`pack_bits` or :func:`pack_pair`.
        shape: A shape of that many elements.
        low: The value of bit 0; rounded to ``dtype``.
        high: The value of bit 1; rounded likewise.
        dtype: A real dtype; bool too.

    Raises:
        ValueError: If the words are not those of a tensor of this shape, or not a dense int64
            tensor; or if ``dtype`` is complex.
    """
    return _unpack_bits(words, [*shape], low, high, dtype)


def masked_select(
    x: Tensor, words: Tensor, *, with_negative_zeros: bool = False
) -> tuple[Tensor, bool]:
    """Return the elements of a tensor whose bit is set, in order. Waits for the device.

    Args:
        x: A floating-point tensor of any shape and strides.
        words: [ceil(numel / 64)], int64.
        with_negative_zeros: Whether -0 counts as 0.

    Returns:
        The elements [K], and whether all other elements are 0.

    Raises:
        ValueError: If the words are not those of a tensor of this shape, or not a dense int64
            tensor; or if ``x`` is not a dense floating-point tensor.
    """
    values, others_are_zero = _masked_select(x.detach(), words, with_negative_zeros)
    return values, bool(others_are_zero)

"""Checks of the arguments of operators in Python; ``csrc/cpu/checks.h`` has those in C++.

Operators may be called directly with any arguments, and kernels read and write memory without
further checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 64
"""Elements of a tile, of which each bit plane is one 64-bit word."""

MOST_BITS = 16

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that the quantizer encodes."""


def check_quantization(bits: int, group_size: int) -> None:
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"Expected bits from 1 to {MOST_BITS} (got {bits})")
    if group_size <= 0 or group_size % TILE:
        raise ValueError(
            f"Expected group_size to be a positive multiple of {TILE} (got {group_size})"
        )


def clamp_group_size(group_size: int, n: int) -> int:
    """Return the smallest group size that gives n elements the same bytes, for small buffers."""
    return min(group_size, max(1, -(-n // TILE)) * TILE)


def check_coded(name: str, dtype: torch.dtype) -> None:
    """Raise an error unless a dtype is one that the quantizer takes."""
    if dtype not in DTYPES:
        raise ValueError(
            f"Expected {name} of float16, bfloat16, float32 or float64 (got {name_of(dtype)})"
        )


def check_strided(name: str, x: Tensor, device: torch.device) -> None:
    """Raise an error unless a tensor is strided, on a device, and inside its storage."""
    if x.layout != torch.strided:
        raise ValueError(f"Expected {name} to be a strided tensor (got {x.layout})")
    if x.device != device:
        raise ValueError(f"Expected {name} on {device} (got {x.device})")
    if x.numel() and not x.is_meta:
        # untyped_storage().resize_() shrinks a storage without regard to its tensors.
        sizes = zip(x.stride(), x.shape, strict=True)
        last = x.storage_offset() + sum(step * (size - 1) for step, size in sizes)
        held = x.untyped_storage().nbytes() // x.element_size()
        if last >= held:
            raise ValueError(f"Expected {name} to have its memory (got {held} elements of storage)")


def check_elements(x: Tensor, bits: int, group_size: int) -> None:
    """Raise an error unless ``x`` can be packed in these bits and groups of this size."""
    check_quantization(bits, group_size)
    check_strided("x", x, x.device)
    check_coded("x", x.dtype)


def check_tensor(
    name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> None:
    """Raise an error unless a tensor is contiguous and has a dtype, shape and device."""
    check_strided(name, x, device)
    if x.dtype != dtype:
        raise ValueError(f"Expected {name} of {name_of(dtype)} (got {name_of(x.dtype)})")
    if [*x.shape] != [*shape] or not x.is_contiguous():
        how = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(f"Expected {name} of {[*shape]}, contiguous (got {[*x.shape]}{how})")


def check_widths(widths: Tensor, words: int, n: int, group_size: int, device: torch.device) -> None:
    """Raise an error unless the widths are those of n elements' groups, with so many words.

    Tensors of other devices than the CPU are not read: that would wait for the device.
    """
    check_tensor("widths", widths, torch.uint8, [-(-n // group_size)], device)
    if device.type != "cpu":
        return
    for wrong in widths[(widths < 1) | (widths > MOST_BITS)][:1].tolist():
        raise ValueError(f"Expected widths from 1 to {MOST_BITS} (got {wrong})")
    total = int(count_words(widths, n, group_size))
    if total != words:
        raise ValueError(f"Expected widths of {words} words (got {total})")


def check_weight(
    weight: Tensor, seed: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise an error unless a weight of the decorrelated decoding goes with the other arguments."""
    check_tensor("weight", weight, torch.float32, [1], device)
    if seed is None:
        raise ValueError("Expected a seed with a weight (got none)")
    if dtype != torch.float32:
        raise ValueError(f"Expected a dtype of float32 with a weight (got {dtype})")


def count_words(widths: Tensor, n: int, group_size: int) -> Tensor:
    """Return the words of n elements' codes, an int64 tensor []."""
    of_group = group_size // TILE
    missing = len(widths) * of_group - -(-n // TILE)  # in a last, short group
    last = widths[-1:].sum(dtype=torch.int64)
    return widths.sum(dtype=torch.int64) * of_group - last * missing


def check_packed(
    codes: Tensor,
    stats: Tensor,
    n: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    groups: Tensor | None,
    values: Tensor | None,
    widths: Tensor | None,
) -> None:
    """Raise an error unless the arguments are n quantized elements."""
    check_quantization(bits, group_size)
    check_coded("a dtype", dtype)
    device = codes.device
    shape = [-(-n // TILE), bits] if widths is None else [codes.numel()]
    check_tensor("codes", codes, torch.int64, shape, device)
    check_tensor("stats", stats, torch.bfloat16, [-(-n // group_size), 2], device)
    if widths is not None:
        check_widths(widths, codes.numel(), n, group_size, device)
    if groups is not None and values is not None:
        check_tensor("groups", groups, torch.int64, [groups.numel()], device)
        check_tensor("values", values, dtype, [len(groups), min(group_size, n)], device)
    elif groups is not values:
        raise ValueError("Expected groups and values, or none of both (got one)")


def checked_numel(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape; raise an error for an invalid shape."""
    if any(size < 0 for size in shape):
        raise ValueError(f"Expected a shape of sizes from 0 on (got {[*shape]})")
    numel = math.prod(shape)
    if numel >= 2**63:
        raise ValueError(f"Expected a shape of less than 2^63 elements (got {[*shape]})")
    return numel


def check_rows(rows: Tensor, numel: int, width: int, device: torch.device) -> None:
    """Raise an error unless the indices are those of rows of a tensor with numel elements."""
    if numel < 0:
        raise ValueError(f"Expected numel from 0 on (got {numel})")
    if width < 1:
        raise ValueError(f"Expected rows of 1 element or more (got {width})")
    check_strided("rows", rows, device)
    if rows.dtype != torch.int64:
        raise ValueError(f"Expected rows of int64 (got {name_of(rows.dtype)})")
    if rows.dim() != 1:
        raise ValueError(f"Expected rows of 1 dimension(s) (got {[*rows.shape]})")


def check_range(name: str, x: Tensor, last: int) -> None:
    """Raise an error unless all elements are from 0 to ``last``.

    Tensors of other devices than the CPU are not read: that would wait for the device.
    """
    if x.device.type != "cpu" or not x.numel():
        return
    for wrong in x[(x < 0) | (x > last)][:1].tolist():
        raise IndexError(f"Expected {name} from 0 to {last} (got {wrong})")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")

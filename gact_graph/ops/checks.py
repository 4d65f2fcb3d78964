"""What the operators require of their arguments, where no C++ checks them (``csrc/cpu/checks.h``).

They may be called directly, with anything: what is let through here is read without a further look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 64
"""Elements a tile: one 64-bit word for each bit of the code."""

MOST_BITS = 16
CODED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_quantization(bits: int, group_size: int) -> None:
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"Expected bits from 1 to {MOST_BITS} (got {bits})")
    if group_size <= 0 or group_size % TILE:
        raise ValueError(
            f"Expected group_size to be a positive multiple of {TILE} (got {group_size})"
        )


def used_size(group_size: int, n: int) -> int:
    """A group size that gives the same bytes of n elements, and is little longer than they are."""
    return min(group_size, max(1, -(-n // TILE)) * TILE)


def check_coded(name: str, dtype: torch.dtype) -> None:
    if dtype not in CODED:
        raise TypeError(
            f"Expected {name} of float16, bfloat16, float32 or float64 (got {_name(dtype)})"
        )


def check_strided(name: str, x: Tensor, device: torch.device) -> None:
    if x.layout != torch.strided:
        raise TypeError(f"Expected {name} to be a strided tensor (got {x.layout})")
    if x.device != device:
        raise ValueError(f"Expected {name} on {device} (got {x.device})")
    if x.numel() and not x.is_meta:
        # A storage may have been resized under its tensors.
        sizes = zip(x.stride(), x.shape, strict=True)
        last = x.storage_offset() + sum(step * (size - 1) for step, size in sizes)
        held = x.untyped_storage().nbytes() // x.element_size()
        if last >= held:
            raise ValueError(f"Expected {name} to have its memory (got {held} elements of storage)")


def check_tensor(
    name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> None:
    """That it is of this dtype, shape and device, and contiguous."""
    check_strided(name, x, device)
    if x.dtype != dtype:
        raise TypeError(f"Expected {name} of {_name(dtype)} (got {_name(x.dtype)})")
    if [*x.shape] != [*shape] or not x.is_contiguous():
        how = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(f"Expected {name} of {[*shape]}, contiguous (got {[*x.shape]}{how})")


def check_record(codes: Tensor, stats: Tensor, n: int, bits: int, group_size: int) -> None:
    """Words read past their end would be a silent error, or a crash."""
    check_tensor("codes", codes, torch.int64, [-(-n // TILE), bits], codes.device)
    check_tensor("stats", stats, torch.bfloat16, [-(-n // group_size), 2], codes.device)


def check_exact(
    groups: Tensor | None,
    values: Tensor | None,
    n: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """That there are both or none, the values of as many groups as there are numbers."""
    if groups is None or values is None:
        if groups is not values:
            raise ValueError("Expected groups and values, or none of both (got one)")
        return
    check_tensor("groups", groups, torch.int64, [groups.numel()], device)
    check_tensor("values", values, dtype, [len(groups), min(group_size, n)], device)


def check_packed(
    codes: Tensor,
    stats: Tensor,
    n: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    groups: Tensor | None,
    values: Tensor | None,
) -> None:
    """All that decoding n elements requires of what was packed, for the whole and for rows."""
    check_quantization(bits, group_size)
    check_coded("a dtype", dtype)
    check_record(codes, stats, n, bits, group_size)
    check_exact(groups, values, n, group_size, dtype, codes.device)


def checked_numel(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    if any(size < 0 for size in shape):
        raise ValueError(f"Expected a shape of sizes from 0 on (got {[*shape]})")
    numel = math.prod(shape)
    if numel >= 2**63:
        raise ValueError(f"Expected a shape of less than 2^63 elements (got {[*shape]})")
    return numel


def check_rows(rows: Tensor, numel: int, width: int, device: torch.device) -> None:
    if numel < 0:
        raise ValueError(f"Expected numel from 0 on (got {numel})")
    if width < 1:
        raise ValueError(f"Expected rows of 1 element or more (got {width})")
    check_strided("rows", rows, device)
    if rows.dtype != torch.int64:
        raise TypeError(f"Expected rows of int64 (got {_name(rows.dtype)})")
    if rows.dim() != 1:
        raise ValueError(f"Expected rows of 1 dimension(s) (got {[*rows.shape]})")


def check_range(name: str, x: Tensor, last: int) -> None:
    """That all are from 0 to ``last``; of tensors in host memory alone, to wait for no device."""
    if x.device.type != "cpu" or not x.numel():
        return
    for wrong in x[(x < 0) | (x > last)][:1].tolist():
        raise IndexError(f"Expected {name} from 0 to {last} (got {wrong})")


def check_edges(places: Tensor | None, starts: Tensor, edges: int, device: torch.device) -> int:
    """That each of the edges has a place, and a row; returns the number of rows."""
    if places is not None:
        check_places("places", places, edges, device)
    check_strided("starts", starts, device)
    if not starts.numel():
        raise ValueError("Expected starts of 1 number or more (got none)")
    check_tensor("starts", starts, torch.int64, [starts.numel()], device)
    if device.type == "cpu":
        if bool((starts[1:] < starts[:-1]).any()):
            raise ValueError("Expected starts that do not decrease (got some that do)")
        first, last = starts[0].item(), starts[-1].item()
        if last - first != edges:
            raise ValueError(f"Expected starts that span {edges} edges (got {first} to {last})")
    return starts.numel() - 1


def check_places(name: str, places: Tensor, edges: int, device: torch.device) -> None:
    """That there is an index for each edge."""
    check_strided(name, places, device)
    if places.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"Expected {name} of int32 or int64 (got {_name(places.dtype)})")
    check_tensor(name, places, places.dtype, [edges], device)


def check_matrix(name: str, x: Tensor, heads: int | None, device: torch.device) -> None:
    """That it has rows of float32 or float64, which the heads share evenly."""
    check_strided(name, x, device)
    if x.dim() != 2 or not x.is_contiguous():
        how = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(f"Expected {name} of 2 dimension(s), contiguous (got {[*x.shape]}{how})")
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"Expected {name} of float32 or float64 (got {_name(x.dtype)})")
    if heads is not None and (heads < 1 or x.size(1) % heads):
        raise ValueError(f"Expected heads that share {x.size(1)} columns evenly (got {heads})")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

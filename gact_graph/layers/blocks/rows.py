"""Reading and writing some rows of a tensor: the entries of its first dimension."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_DECODED_BYTES = 2 << 20
"""Bytes of rows that are decoded at a time."""


class Rows(Protocol):
    """A quantized node tensor [N, ...] that decodes some rows at a time."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def rows(self, index: Tensor | slice) -> Tensor: ...


def rows_of(tensor: Tensor | Rows, index: Tensor | slice) -> Tensor:
    """Return the rows of a tensor at an index [R] of int32 or int64, or at a slice."""
    if not isinstance(tensor, Tensor):
        return tensor.rows(index)
    if isinstance(index, slice):
        return tensor[index]
    if tensor.dim() and tensor.stride(0) == 0:
        return tensor[:1].expand(len(index), *tensor.shape[1:]).contiguous()
    if tensor.dim() < 3 or not tensor.is_contiguous():
        return tensor.index_select(0, index)
    # On a CPU, selecting rows of a matrix takes a half to a third of the time, as does its
    # backward.
    return tensor.flatten(1).index_select(0, index).unflatten(1, tensor.shape[1:])


def whole(tensor: Tensor | Rows) -> Tensor:
    """Return all rows of a tensor, contiguous."""
    return rows_of(tensor, slice(0, tensor.shape[0])).contiguous()


def rows_at_a_time(tensor: Tensor | Rows) -> int:
    """Return the number of rows to read at a time: all of a tensor, few of a quantized tensor."""
    if isinstance(tensor, Tensor):
        return max(1, tensor.shape[0])
    return max(1, _DECODED_BYTES // (tensor.shape[1:].numel() * tensor.dtype.itemsize))


def write_rows(tensor: Tensor, index: Tensor | slice, rows: Tensor) -> None:
    """Write the rows of a tensor at an index."""
    if isinstance(index, slice):
        tensor[index] = rows
    else:
        tensor.index_copy_(0, index.long(), rows)


def add_rows(tensor: Tensor, index: Tensor | slice, rows: Tensor) -> None:
    """Add to the rows of a contiguous tensor at an index."""
    if isinstance(index, slice):
        tensor[index] += rows
    elif tensor.dim() < 2:
        tensor.index_add_(0, index, rows)
    else:
        # On a CPU, a matrix and an int64 index take a third of the time.
        tensor.flatten(1).index_add_(0, index.long(), rows.flatten(1))

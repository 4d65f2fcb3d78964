"""Reading and writing some rows of a tensor: the entries of its first dimension.

Node tensors stay quantized while blocks are computed again: a block decodes the rows that it reads,
so the decoded tensor never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from gact_graph.codecs import Saved
from gact_graph.codecs.quantize import Quantized
from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import Packed
from gact_graph.support.current import saved_by
from gact_graph.support.part import piece

_DECODED_BYTES = 2 << 20
"""Bytes of rows that are decoded at a time."""


class CodedRows:
    """A quantized node tensor [N, ...], whose rows have the values of the decoded tensor."""

    def __init__(self, packed: Packed, shape: torch.Size) -> None:
        self.shape = shape
        self.dtype: torch.dtype = packed.dtype
        self.device: torch.device = packed.codes.device
        self._packed = packed
        self._width = shape[1:].numel()

    def rows(self, index: Tensor | slice) -> Tensor:
        """Return the rows [R, ...] at an index of int64, or at a slice with start and stop."""
        if isinstance(index, slice):
            index = torch.arange(index.start, index.stop, device=self.device)
        return self._packed.unpack_rows(index, self._width).view(-1, *self.shape[1:])


def rows_of(tensor: Tensor | CodedRows, index: Tensor | slice) -> Tensor:
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


def whole(tensor: Tensor | CodedRows) -> Tensor:
    """Return all rows of a tensor, contiguous."""
    return rows_of(tensor, slice(0, tensor.shape[0])).contiguous()


def rows_at_a_time(tensor: Tensor | CodedRows) -> int:
    """Return the number of rows to read at a time: all of a tensor, few of a quantized tensor."""
    if isinstance(tensor, Tensor):
        return max(1, tensor.shape[0])
    return max(
        1,
        piece(_DECODED_BYTES, tensor.device) // (tensor.shape[1:].numel() * tensor.dtype.itemsize),
    )


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


def saved_tensors(
    ctx: Any, indices: Sequence[int], of_nodes: Collection[int], gathers: bool
) -> list[Tensor | CodedRows]:
    """Return ``ctx.saved_tensors``, with quantized node tensors that are not decoded.

    Args:
        ctx: The context of an autograd function's backward.
        indices: The index of each saved tensor among the function's inputs.
        of_nodes: The indices of the inputs that are read by rows of nodes only.
        gathers: Whether messages gather these rows.
    """
    saved = None if set(of_nodes).isdisjoint(indices) else saved_by(ctx)
    if saved is None:
        return [*ctx.saved_tensors]
    return [
        _rows(tensor, gathers) if index in of_nodes else tensor.tensor()
        for tensor, index in zip(saved, indices, strict=True)
    ]


def _rows(saved: Saved, gathers: bool) -> Tensor | CodedRows:
    encoded, layout = saved.encoded(), saved.layout
    # Exactly this class: a subclass may decode in another way.
    if type(encoded) is Quantized and layout is not None and layout.shape:
        contiguous = torch.empty(layout.shape, device="meta").stride()
        whole = encoded.packed.shape.numel() == layout.shape.numel()
        dense = layout.dense and layout.offset == 0 and layout.stride == contiguous
        dense &= not layout.negative
        # A row is decoded by whole tiles.
        if whole and dense and layout.shape[1:].numel() >= TILE:
            decorrelate = saved.context.gathered and not gathers
            packed = encoded.packed.decorrelated() if decorrelate else encoded.packed
            return CodedRows(packed, layout.shape)
    return saved.source() if gathers else saved.tensor()

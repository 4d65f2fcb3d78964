"""Tensors of nodes that stay coded while blocks are computed again.

A block decodes the rows that it reads, so none of them is ever alive as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gact_graph.blocks.arguments import Use
from gact_graph.codecs import Saved
from gact_graph.codecs.quantize import Quantized
from gact_graph.hooks import saved_by
from gact_graph.kernels.reference import TILE
from gact_graph.quantizer import Packed

_OF_NODES = frozenset({"source", "target", "row"})


class CodedRows:
    """Stands for the decoded tensor [N, ...]; its rows have the very values that it would have."""

    def __init__(self, packed: Packed, shape: torch.Size) -> None:
        self.shape = shape
        self.dtype = packed.dtype
        self.device = packed.codes.device
        self._packed = packed
        self._width = shape[1:].numel()

    def rows(self, places: Tensor | slice) -> Tensor:
        """Some rows [R, ...]; places are int64, or a slice of two numbers."""
        if isinstance(places, slice):
            places = torch.arange(places.start, places.stop, device=self.device)
        return self._packed.unpack_rows(places, self._width).view(-1, *self.shape[1:])


def saved_tensors(ctx: Any, uses: Sequence[Use], kept: Sequence[int]) -> list[Tensor | CodedRows]:
    """``ctx.saved_tensors``, of which what can stay coded does.

    Args:
        ctx: Of an autograd function's backward.
        uses: What each tensor is for.
        kept: The place of each saved tensor among those that the uses tell of.
    """
    of_rows = {use.place for use in uses} - {
        use.place for use in uses if use.level not in _OF_NODES
    }
    if of_rows.isdisjoint(kept):
        return [*ctx.saved_tensors]
    held = saved_by(ctx)
    if held is None:
        return [*ctx.saved_tensors]
    return [
        (_coded(saved) if place in of_rows else None) or saved.tensor()
        for saved, place in zip(held, kept, strict=True)
    ]


def _coded(saved: Saved) -> CodedRows | None:
    encoded, layout = saved.context.encoded, saved.layout
    # Not a subclass, which may decode otherwise.
    if type(encoded) is not Quantized or layout is None or not layout.shape:
        return None
    contiguous = torch.empty(layout.shape, device="meta").stride()
    whole = encoded.packed.shape.numel() == layout.shape.numel()
    if not (layout.dense and layout.offset == 0 and whole and layout.stride == contiguous):
        return None
    # A row is decoded by whole tiles.
    wide = layout.shape[1:].numel() >= TILE
    return CodedRows(encoded.packed, layout.shape) if wide else None

"""Tensors that wait in codes while the backward of a layer that ran again is under way.

These tensors live only until that backward has run, but all at the same time. Node tensors that
blocks read are quantized to at least 8 bits, whose noise is small beside that of the layer's
inputs; each block decodes the rows that it reads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gact_graph.codecs import Context, Kept, Saved
from gact_graph.codecs.quantize import Quantized, exceeds_float32
from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import DTYPES, pack
from gact_graph.support.current import Coding
from gact_graph.support.part import in_proportion
from gact_graph.support.storage import is_plain, key_of, span_of, version_of

BITS = 8
"""The least width of node tensors that wait for blocks: 1/289 of the variance that 4 bits add."""

_LEAST_BYTES = 1 << 20
"""Smaller tensors are kept: quantizing them would save nothing that shows."""

_WHY = "a layer that is computed again"
"""The holder of a tensor that is kept by reference, for the error if the tensor is changed."""


def kept(tensor: Tensor) -> Saved:
    """Return a reference to a tensor."""
    return Saved(Context(Kept(tensor, _WHY)))


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties that distinguish a tensor from other views, and its version."""
    layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return tensor.dtype, version_of(tensor), tensor.is_conj(), tensor.is_neg(), *layout


class Waiting:
    """Encodes the tensors that a layer saves while it runs again.

    Args:
        coding: How node tensors that wait for blocks are quantized; None leaves them exact.
    """

    def __init__(self, coding: Coding | None) -> None:
        self._coding = coding
        self._packed: dict[tuple[Any, ...], Saved] = {}

    def pack(self, tensor: Tensor, for_blocks: bool) -> Saved:
        """Encode a tensor.

        Args:
            tensor: The tensor.
            for_blocks: Whether a call in blocks saves it.
        """
        if self._coding is None or not for_blocks or not _is_worth_it(tensor):
            return kept(tensor)
        span = span_of(tensor)
        if span is None or not span[1].dense:
            return kept(tensor)
        # The edge_update and the propagate of a layer may both read a tensor: quantized once.
        identity = key_of(tensor), *geometry(tensor)
        if identity not in self._packed:
            flat, layout = span
            if exceeds_float32(flat, None):
                return kept(tensor)
            bits, group_size, seed = self._coding
            packed = pack(flat, bits, group_size=group_size, seed=seed + len(self._packed))
            self._packed[identity] = Saved(Context(Quantized(packed, bits)), layout)
        return self._packed[identity]


def _is_worth_it(tensor: Tensor) -> bool:
    return (
        is_plain(tensor)
        and tensor.dtype in DTYPES
        and tensor.nbytes >= in_proportion(_LEAST_BYTES)
        and tensor.dim() > 1
        and tensor.size(0) > 0
        and tensor[0].numel() >= TILE
    )

"""What autograd saves while a layer is computed again in backward, and how it is kept.

These tensors live only until that layer's backward has run, but all at the same time. Two kinds
are kept in codes instead. The layer's inputs were compressed in forward, and are decoded once more
where the layer's backward reads them. Node tensors that blocks read are quantized to at least 8
bits, whose noise is small beside that of the inputs; each block decodes the rows that it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.codecs import Context, Kept, Saved
from gact_graph.codecs.quantize import Quantized
from gact_graph.layers.recompute.reuse import EdgeCalls
from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import DTYPES, pack
from gact_graph.support.current import Coding
from gact_graph.support.storage import (
    Layout,
    is_plain,
    key_of,
    parts_of,
    plain_of,
    span_of,
    tensors_held_by,
    version_of,
)

BITS = 8
"""The least width of node tensors that wait for blocks: 1/289 of the variance that 4 bits add."""

_LEAST_BYTES = 1 << 20
"""Smaller tensors stay as they are: quantizing them would save nothing that shows."""

_WHY = "a layer that is computed again"
"""Names the holder of a tensor that is kept by reference, for the error if it is changed."""


class LayerContexts:
    """Packs what autograd saves while a layer runs again.

    Args:
        module: The layer or its replica, with the parameters that it runs with.
        edge_calls: Its calls of ``propagate`` and ``edge_updater``.
        coding: How node tensors that wait for blocks are quantized; None leaves them as they are.
    """

    def __init__(self, module: nn.Module, edge_calls: EdgeCalls, coding: Coding | None) -> None:
        self._owned = {key_of(p) for t in tensors_held_by(module) for p in parts_of(t)}
        self._edge_calls = edge_calls
        self._coding = coding
        self._given: dict[StorageWeakRef, tuple[Saved, tuple[Any, ...]]] = {}
        self._packed: dict[tuple[Any, ...], Saved] = {}

    def given(self, saved: Saved) -> Tensor:
        """Decodes an input of the layer. If the layer saves it, its codes are kept instead."""
        tensor = saved.tensor()
        if is_plain(tensor) and not isinstance(saved.context.encoded, Kept):
            self._given[key_of(tensor)] = saved, _geometry(tensor)
        return tensor

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook, with :func:`gact_graph.support.current.unpack` as the unpack hook."""
        tensor = plain_of(tensor)
        if not is_plain(tensor):
            return Saved(Context(Kept(tensor, _WHY)))
        tensor = tensor.detach()
        key = key_of(tensor)
        saved, geometry = self._given.get(key, (None, None))
        if saved is not None and geometry == _geometry(tensor):
            return saved
        if self._waits_for_blocks(tensor) and key not in self._owned and saved is None:
            span = span_of(tensor)
            if span is not None and span[1].dense:
                # A layer's edge_update and its propagate may both read a tensor: quantized once.
                identity = key, *_geometry(tensor)
                if identity not in self._packed:
                    self._packed[identity] = self._quantized(*span)
                return self._packed[identity]
        return Saved(Context(Kept(tensor, _WHY)))

    def _waits_for_blocks(self, tensor: Tensor) -> bool:
        return (
            self._coding is not None
            and self._edge_calls.saving
            and tensor.dtype in DTYPES
            and tensor.nbytes >= _LEAST_BYTES
            and tensor.dim() > 1
            and tensor.size(0) > 0
            and tensor[0].numel() >= TILE
        )

    def _quantized(self, flat: Tensor, layout: Layout) -> Saved:
        assert self._coding is not None
        bits, group_size, seed = self._coding
        packed = pack(flat, bits, group_size=group_size, seed=seed + len(self._packed))
        return Saved(Context(Quantized(packed)), layout)


class Given(torch.autograd.Function):
    """Makes an input of the layer the result of an operation, so that the graph does not hold it.

    A leaf is held by the graph that begins at it. ``Given.apply(token, value)`` gives ``value``;
    the token is any tensor that requires a gradient. The gradient of ``value`` is asked for by
    :func:`torch.autograd.graph.get_gradient_edge`.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return tensor.dtype, version_of(tensor), tensor.is_conj(), tensor.is_neg(), *layout

"""What autograd saves while a layer is computed again in backward: alive for that layer alone.

Not the whole of it needs to be there at once. The layer's inputs are in their codes already, and
are decoded again where the layer's backward reads them. Tensors of nodes that blocks read wait in
codes of their own, wide enough that their noise is nothing beside that of the inputs, and each
block decodes its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.again import Calls
from gact_graph.codecs import Context, Kept, Saved
from gact_graph.codecs.quantize import Quantized
from gact_graph.kernels.reference import TILE
from gact_graph.quantizer import DTYPES, pack
from gact_graph.storage import (
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
"""At least, of tensors that wait for blocks: with 1/289 of the variance that 4 bits add."""

_LEAST_BYTES = 1 << 20
"""Below, codes would save nothing that shows."""


class Coding(NamedTuple):
    """How tensors wait for blocks."""

    bits: int
    group_size: int
    seed: int


class Inner:
    """Packs what autograd saves during one forward of a layer that is run again.

    Args:
        module: The layer, with the parameters that it runs with.
        calls: Its edge work in blocks.
        coding: Of tensors that wait for blocks; None keeps them as they are.
    """

    def __init__(self, module: nn.Module, calls: Calls, coding: Coding | None) -> None:
        self._owned = {key_of(p) for t in tensors_held_by(module) for p in parts_of(t)}
        self._calls = calls
        self._coding = coding
        self._given: dict[StorageWeakRef, tuple[Saved, tuple[Any, ...]]] = {}
        self._packed: dict[tuple[Any, ...], Saved] = {}

    def given(self, saved: Saved) -> Tensor:
        """An input, decoded. Where the layer saves it, its codes will do."""
        tensor = saved.tensor()
        if is_plain(tensor) and not isinstance(saved.context.encoded, Kept):
            self._given[key_of(tensor)] = saved, _geometry(tensor)
        return tensor

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook; :func:`gact_graph.hooks.unpack` is the other one."""
        tensor = plain_of(tensor)
        if not is_plain(tensor):
            return Saved(Context(Kept(tensor, "a layer that is computed again")))
        tensor = tensor.detach()
        key = key_of(tensor)
        saved, geometry = self._given.get(key, (None, None))
        if saved is not None and geometry == _geometry(tensor):
            return saved
        if self._waits_for_blocks(tensor) and key not in self._owned and saved is None:
            span = span_of(tensor)
            if span is not None and span[1].dense:
                # A layer's edge_update and its propagate may both read a tensor.
                place = key, *_geometry(tensor)
                if place not in self._packed:
                    self._packed[place] = self._quantized(*span)
                return self._packed[place]
        return Saved(Context(Kept(tensor, "a layer that is computed again")))

    def _waits_for_blocks(self, tensor: Tensor) -> bool:
        return (
            self._coding is not None
            and self._calls.running
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
    """An input of the layer, as the result of an operation: autograd holds no such tensor.

    A leaf would be held by the graph that it is the end of. ``Given.apply(token, value)`` needs a
    token that requires a gradient, and gives ``value``; its own gradient is asked for by edge.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return tensor.dtype, version_of(tensor), *place

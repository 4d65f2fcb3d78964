"""The elements that a mask does not make zero: the mask is saved already, by another operation.

The result of ReLU or of a dropout is zero where its mask has no bit, in a half to three quarters of
its elements. The next linear layer saves it. The others are stored one after another, quantized or
exact, and backward puts them in their places again.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from gact_graph.codecs.base import Copied, Encoded, Saved
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.mask import Masked
from gact_graph.codecs.quantize import Quantize
from gact_graph.codecs.reads import Exact, Values
from gact_graph.ops.bitmask import masked_scatter, masked_select, pack_bits, unpack_bits
from gact_graph.support.part import in_proportion

LEAST = 1 << 14
"""The least number of elements of a tensor whose mask is looked for."""

_LEAST_ON_DEVICE = 1 << 22
"""The same on a GPU, where the host waits for the number of elements that remain."""


class Nonzero(Encoded):
    """Elements that may differ from zero, encoded.

    Args:
        values: The elements.
        mask: A saved tensor that is zero where no element is.
        coded: The number of elements.
        numel: The number of all elements, zeros included.
    """

    makes_memory = True

    def __init__(self, values: Encoded, mask: Saved, coded: int, numel: int) -> None:
        self.codec: str = values.codec
        self.bits: float | None = values.bits
        self.coded: int | None = coded
        self.exact: bool = values.exact
        self.lossy: bool = not values.exact
        self.sources: tuple[Saved, ...] = (mask,)
        self._values, self._mask, self._numel = values, mask, numel

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def decode(self) -> Tensor:
        return masked_scatter(self._values.decode(), _words_of(self._mask), self._numel)

    def decorrelated(self) -> Encoded:
        return self._with(self._values.decorrelated())

    def min_variance(self) -> Encoded:
        return self._with(self._values.min_variance())

    def movable(self) -> tuple[Tensor, ...]:
        return self._values.movable()

    def moved(self, *tensors: Tensor) -> Encoded:
        return self._with(self._values.moved(*tensors))

    def _with(self, values: Encoded) -> Nonzero:
        nonzero = copy.copy(self)
        nonzero._values = values
        return nonzero


class NonzeroOnly(Codec):
    """Encodes tensors outside of whose mask all elements are zero, and leaves out these."""

    lossless = True
    name = "nonzero"

    def encode(self, request: Request) -> Nonzero | None:
        x, mask, reads = request.tensor, request.mask, request.reads
        if mask is None or not x.dtype.is_floating_point or not isinstance(reads, (Exact, Values)):
            return None
        if x.numel() < in_proportion(LEAST if x.device.type == "cpu" else _LEAST_ON_DEVICE):
            return None
        masked = mask.context.sample
        if not isinstance(masked, Masked) or masked.numel != x.numel():
            return None
        # A dropout turns negative elements into -0. Where noise may be added, 0 will do.
        lossy = request.bits < 32 and isinstance(reads, Values)
        values, others_are_zero = masked_select(x, masked.words, with_negative_zeros=lossy)
        # A mask is a guess, and this the proof: x may have been changed in place, or have had NaN
        # where ReLU has no bit.
        if not others_are_zero:
            return None
        inner = dataclasses.replace(
            request, tensor=values, mask=None, row_counts=_counts_of_rows(request, masked.words)
        )
        quantized = Quantize().encode(inner) if lossy else None
        return Nonzero(
            quantized or Copied(values, NonzeroOnly.name), mask, values.numel(), x.numel()
        )


def _counts_of_rows(request: Request, words: Tensor) -> Tensor | None:
    """Return the number of elements that remain in each row, where rows have weights."""
    if request.row_weights is None:
        return None
    rows = len(request.row_weights)
    shape = rows, request.tensor.numel() // rows
    return unpack_bits(words, shape, 0.0, 1.0, torch.bool).sum(1)


def _words_of(mask: Saved) -> Tensor:
    encoded = mask.encoded()
    # On a GPU, level L2 may have moved it.
    return encoded.words if isinstance(encoded, Masked) else pack_bits(encoded.decode())

"""The interface of codecs: a codec encodes a tensor that autograd saves into a smaller form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gact_graph.codecs.base import Encoded, Saved
from gact_graph.codecs.reads import Reads
from gact_graph.codecs.recipe import Recipe


@dataclass(frozen=True)
class Request:
    """A tensor for a codec to encode.

    Args:
        tensor: The elements, detached and flat [numel].
        slot: The stable name of the saved tensor, such as ``convs.1/lin/linear.input``.
        operation: The name of the operation that saves it, such as ``linear``.
        reads: The part of the tensor that the operation's backward reads; see
            :mod:`gact_graph.codecs.reads`.
        recipe: The computation of the tensor from saved tensors, if it is known.
        keep: A function that saves a tensor to which the encoded form refers, such as the source of
            a gather. Each tensor is encoded once, even if other operations save it too.
        bits: Bits per element of the slot in the scheme, on average over groups that have widths of
            their own; 32 for no loss of precision.
        group_size: Elements that share a minimum and a step in quantization.
        seed: The seed of this tensor's quantization noise.
        row_weights: The effect of each row's noise on the gradient, positive, in any unit: float32
            [rows]; None if it is unknown.
        row_counts: The number of elements in each row, int64 [rows]; None if all have the same.
        mask: A saved tensor that is probably zero only where this one is, such as the mask of a
            dropout; None if there is none.
    """

    tensor: Tensor
    slot: str
    operation: str
    reads: Reads
    recipe: Recipe | None
    keep: Callable[[Tensor], Saved]
    bits: float
    group_size: int
    seed: int
    row_weights: Tensor | None = None
    row_counts: Tensor | None = None
    mask: Saved | None = None


class Codec(ABC):
    """The base class of codecs. A codec is stateless: one instance serves all models.

    Attributes:
        lossless: Whether gradients stay bit-identical. ``L0`` asks no codec, and ``lossless`` only
            lossless ones. From ``L1`` on, all codecs are asked about slots with fewer than 32 bits,
            and lossless ones about the others.
    """

    lossless: ClassVar[bool] = False

    @abstractmethod
    def encode(self, request: Request) -> Encoded | None:
        """Return the encoded tensor, or None to leave the tensor to the next codec."""

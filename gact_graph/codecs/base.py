"""What a codec is: it takes a context, and gives something smaller that decodes to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gact_graph.gathers import Gathered
from gact_graph.operations import Reads
from gact_graph.storage import Layout


class Encoded(ABC):
    """An encoded context. It must not hold the tensor's autograd graph."""

    codec: str
    bits: int | None = None
    exact: bool = True
    """Whether it decodes to all values of the tensor as they were."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that it alone keeps alive."""

    @property
    def host_bytes(self) -> int:
        """How many of these were swapped to host memory."""
        return 0

    @abstractmethod
    def decode(self) -> Tensor:
        """The tensor of the request, any number of times, in any order, on any thread."""

    def restore(self, layout: Layout) -> Tensor:
        """The decoded elements with the shape and strides that the saved tensor had."""
        return layout.restore(self.decode())

    def movable(self) -> tuple[Tensor, ...]:
        """The tensors, its own and all on one device, that may lie elsewhere until it is decoded.

        None unless a codec says otherwise. Whoever moves them decodes :meth:`moved`.
        """
        return ()

    def moved(self, *tensors: Tensor) -> Encoded:
        """The same with other tensors in the place of :meth:`movable`, in that order."""
        assert not tensors  # it named none
        return self

    def fingerprint(self) -> Hashable:
        """What two equal contexts have in common; None for one that cannot be compared."""
        return None

    def equals(self, other: Encoded) -> bool:
        """Whether another one with this fingerprint decodes to the very same values."""
        return False


class Context:
    """One encoded context, shared by all saved tensors that show the same elements."""

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded


class Saved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("context", "layout")

    def __init__(self, context: Context, layout: Layout | None = None) -> None:
        self.context = context
        self.layout = layout

    def tensor(self) -> Tensor:
        """The tensor that was saved, with its values, dtype, shape and strides."""
        encoded = self.context.encoded
        return encoded.decode() if self.layout is None else encoded.restore(self.layout)


@dataclass(frozen=True)
class Request:
    """One context to encode.

    Args:
        tensor: Detached; for plain strided tensors the flat span [numel], else the tensor itself.
        slot: The context's stable name.
        operation: The name of the operation that saves it.
        reads: What the backward of that operation reads of it.
        constant: Whether it needs no gradient.
        gathered: How to rebuild it from another tensor, where it was gathered from one.
        keep: Saves another tensor that the encoded form refers to; shared with all that save it.
        bits: The width that the scheme gives to the slot; 32 asks for no quantization.
        group_size: Elements a quantization group.
        seed: Seed of the context's noise.
    """

    tensor: Tensor
    slot: str
    operation: str
    reads: Reads
    constant: bool
    gathered: Gathered | None
    keep: Callable[[Tensor], Saved]
    bits: int
    group_size: int
    seed: int


class Codec(ABC):
    """A way to keep contexts. Stateless: one instance serves all models."""

    exact: ClassVar[bool] = True
    """Whether gradients are bit-identical with it: the level ``lossless`` takes these alone."""

    @abstractmethod
    def encode(self, request: Request) -> Encoded | None:
        """The context in this codec's form; None where it has none, and the next is asked."""

"""What a codec is: it takes a tensor that autograd saves and gives a smaller form that decodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from gact_graph.codecs.reads import Reads
from gact_graph.support.advising import Advise
from gact_graph.support.storage import Layout


class Encoded(ABC):
    """The form in which a codec keeps one tensor. Each codec has a subclass of its own.

    It may hold tensors, but none with an autograd graph, and never the tensor of the request
    itself: the model may change that in place.

    Attributes:
        codec: The name that the report shows.
        bits: Bits an element, where the adaptive scheme decided them; None for all other forms.
        exact: Whether it decodes to the very values of the tensor. If so, it also serves other
            operations that save the same tensor, whatever their backward reads of it.
        lossy: Whether backward gets inexact values from it. The codec that made it says so.
    """

    codec: str
    bits: int | None = None
    exact: bool = False
    lossy: bool = False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that this form alone keeps alive."""

    @property
    def host_bytes(self) -> int:
        """How many of :attr:`nbytes` were swapped to host memory."""
        return 0

    @abstractmethod
    def decode(self) -> Tensor:
        """The values, with the shape [numel] and the dtype of the request's tensor.

        Backward calls it any number of times, in any order, on any thread.
        """

    def reread(self) -> Encoded:
        """The same tensors, decoded with noise that has no covariance with this one's.

        Itself, unless a codec says otherwise.
        """
        return self

    def alone(self) -> Encoded:
        """The same tensors, decoded with less noise, for whoever reads no other form of them.

        Itself, unless a codec says otherwise.
        """
        return self

    def restore(self, layout: Layout) -> Tensor:
        """The decoded values with the shape and strides of the tensor that autograd saved."""
        return layout.restore(self.decode())

    def movable(self) -> tuple[Tensor, ...]:
        """The tensors that level ``L2`` may move to host memory: its own, all on one device.

        None unless a subclass says otherwise. Whoever moves them decodes what :meth:`moved` gives.
        """
        return ()

    def moved(self, *tensors: Tensor) -> Encoded:
        """The same form with other tensors in place of those of :meth:`movable`, in that order."""
        assert not tensors  # it named none
        return self

    def fingerprint(self) -> Hashable:
        """A value that two forms with equal contents share; None for one that is never compared."""
        return None

    def equals(self, other: Encoded) -> bool:
        """Whether another form with the same fingerprint decodes to the very same values."""
        return False


class Form(NamedTuple):
    """What the report says of an encoded tensor; see :class:`Encoded`."""

    codec: str
    bits: int | None
    nbytes: int
    host_bytes: int


def form_of(encoded: Encoded) -> Form:
    """The form of an encoded tensor."""
    return Form(encoded.codec, encoded.bits, encoded.nbytes, encoded.host_bytes)


class Reading(Protocol):
    """See :class:`gact_graph.support.exact.Reading`."""

    @property
    def lossy(self) -> bool: ...

    def __call__(self, slot: str | None) -> None: ...


class Context:
    """One encoded tensor, shared by all saved tensors that show the same elements.

    Attributes:
        gathered: Whether other contexts are rows of it.
        reading: Sees who decodes it; None where nobody asks.
    """

    gathered = False
    reading: Reading | None = None

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded

    @property
    def form(self) -> Form:
        """The form in which training keeps the tensor."""
        return form_of(self.encoded)

    def move(self, leave: Callable[[Encoded], Encoded]) -> None:
        """Replaces the encoded form by the same one elsewhere."""
        self.encoded = leave(self.encoded)


class Saved:
    """What autograd holds in place of a tensor: a context, and the tensor's layout over it.

    Attributes:
        slot: The slot of the tensor; its context may be that of another one.
        advise: Tells what to do where backward runs out of memory; None where nobody knows.
    """

    __slots__ = ("advise", "context", "layout", "slot")

    def __init__(
        self, context: Context, layout: Layout | None = None, slot: str | None = None
    ) -> None:
        self.context = context
        self.layout = layout
        self.slot = slot
        self.advise: Advise | None = None

    def tensor(self) -> Tensor:
        """The tensor that was saved, with its values, dtype, shape and strides.

        Attention makes its scores and its messages from one tensor, and the gradient of the scores'
        parameters is a product of both: of one reading it would hold the noise squared. So where
        messages are gathered anew from the first reading, this is the second one.
        """
        encoded = self.encoded()
        return self._restored(encoded.reread() if self.context.gathered else encoded.alone())

    def source(self) -> Tensor:
        """The same for those that gather from it: always the first reading."""
        return self._restored(self.encoded())

    def encoded(self) -> Encoded:
        """The form of the tensor, for somebody who is about to decode it."""
        if self.context.reading is not None:
            self.context.reading(self.slot)
        return self.context.encoded

    def _restored(self, encoded: Encoded) -> Tensor:
        return encoded.decode() if self.layout is None else encoded.restore(self.layout)


class GatherOperation(Protocol):
    """An operation that gathers, with all its arguments but the source and the index."""

    def gather(self, source: Tensor, index: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Gathered:
    """How a tensor was gathered: from which source, by which index, with which operation.

    ``version``, ``dtype`` and ``numel`` are those of the gathered tensor.
    """

    source: Tensor
    source_version: int | None
    index: Saved
    operation: GatherOperation
    version: int | None
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Request:
    """One tensor for a codec to encode.

    Args:
        tensor: Its elements, detached and flat [numel].
        slot: The stable name of the saved tensor, such as ``convs.1/lin/linear.input``.
        operation: The name of the operation that saves it, such as ``linear``.
        reads: What the backward of that operation reads of it; see :mod:`gact_graph.codecs.reads`.
        gathered: How to rebuild the tensor from another one, if it was gathered.
        keep: Saves the tensor that the encoded form refers to, such as the source of a gather. That
            tensor is encoded once, whoever else saves it.
        bits: Bits an element that the scheme gives to the slot; 32 asks for no loss of precision.
        group_size: Elements that share a minimum and a step where the tensor is quantized.
        seed: Seed of the quantization noise for this tensor.
    """

    tensor: Tensor
    slot: str
    operation: str
    reads: Reads
    gathered: Gathered | None
    keep: Callable[[Tensor], Saved]
    bits: int
    group_size: int
    seed: int


class Codec(ABC):
    """A way to keep saved tensors. It holds no state: one instance serves all models.

    Attributes:
        lossless: Whether gradients are bit-identical with it. The level ``lossless`` asks only such
            codecs; the levels from ``L1`` on ask all of them.
    """

    lossless: ClassVar[bool] = False

    @abstractmethod
    def encode(self, request: Request) -> Encoded | None:
        """The tensor in this codec's form, or None to leave it to the next codec."""

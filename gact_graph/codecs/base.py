"""Encoded tensors, and the objects that autograd holds in their place."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from gact_graph.support.exact import Reading
from gact_graph.support.messages import Advise
from gact_graph.support.storage import Layout


class Form(NamedTuple):
    """The attributes of an encoded tensor in the report; see :class:`Encoded`."""

    codec: str
    bits: float | None
    coded: int | None
    nbytes: int
    host_bytes: int


class Encoded(ABC):
    """The encoded form of one tensor. Each codec has its own subclass.

    It may hold tensors, but none with an autograd graph, and never the tensor of the request
    itself, which the model may change in place.

    Attributes:
        codec: The codec's name in the report.
        bits: Bits per element, if the adaptive scheme decides them; otherwise None.
        coded: The number of elements that are encoded; None for all. Others follow from
            :attr:`sources`.
        exact: Whether it decodes to exactly the values of the tensor. If so, it also serves other
            operations that save the same tensor, whatever their backward reads of it.
        lossy: Whether backward gets inexact values from it. :func:`encode` sets it.
        makes_memory: Whether :meth:`decode` returns memory that nothing else holds.
        sources: The saved tensors that decoding reads.
        operations: The number of operations that decoding runs on them.
    """

    codec: str
    bits: float | None = None
    coded: int | None = None
    exact: bool = False
    lossy: bool = False
    makes_memory: bool = False
    sources: tuple[Saved, ...] = ()
    operations: int = 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of memory that only this form keeps alive."""

    @property
    def host_bytes(self) -> int:
        """The part of :attr:`nbytes` that was swapped to host memory."""
        return 0

    @property
    def form(self) -> Form:
        """The attributes in the report."""
        return Form(self.codec, self.bits, self.coded, self.nbytes, self.host_bytes)

    @abstractmethod
    def decode(self) -> Tensor:
        """Return the values, with shape [numel] and the dtype of the request's tensor.

        Backward may call it any number of times, in any order, on any thread.
        """

    def decorrelated(self) -> Encoded:
        """Return a form that decodes the same tensors with uncorrelated noise.

        The default is the form itself.
        """
        return self

    def min_variance(self) -> Encoded:
        """Return a form that decodes the same tensors with the least noise.

        Its noise is correlated with that of all other forms. The default is the form itself.
        """
        return self

    def restore(self, layout: Layout) -> Tensor:
        """Return the decoded values with the shape and strides of the saved tensor."""
        return layout.restore(self.decode())

    def movable(self) -> tuple[Tensor, ...]:
        """Return the tensors that level ``L2`` may move to host memory, all on one device.

        :meth:`moved` then replaces them. The default is no tensors.
        """
        return ()

    def moved(self, *tensors: Tensor) -> Encoded:
        """Return a copy with other tensors in place of those of :meth:`movable`, in that order."""
        assert not tensors
        return self

    def fingerprint(self) -> Hashable:
        """Return a value that forms with equal contents share; None to compare it with no form."""
        return None

    def equals(self, other: Encoded) -> bool:
        """Return whether another form with the same fingerprint decodes to equal values."""
        return False


@dataclass(eq=False)
class Movable(Encoded):
    """An encoded tensor that consists of tensors which level ``L2`` may move.

    Attributes:
        parts: The names of the attributes that hold them.
    """

    parts: ClassVar[tuple[str, ...]] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.movable())

    def movable(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, part) for part in self.parts)

    def moved(self, *tensors: Tensor) -> Encoded:
        return dataclasses.replace(self, **dict(zip(self.parts, tensors, strict=True)))


@dataclass(eq=False)
class Copied(Movable):
    """A copy of elements, of which nothing else changes the memory."""

    values: Tensor
    codec: str
    exact = True
    parts: ClassVar[tuple[str, ...]] = ("values",)

    def decode(self) -> Tensor:
        return self.values


class Context:
    """An encoded tensor, shared by all saved tensors that view the same elements.

    Attributes:
        gathered: Whether messages gather rows of it, or of a tensor that is computed from it again.
        reading: A callback for each decoding; None for none.
    """

    gathered: bool = False
    reading: Reading | None = None

    def __init__(self, encoded: Encoded) -> None:
        self.encoded: Encoded = encoded

    @property
    def form(self) -> Form:
        """The attributes of the form that training stores."""
        return self.encoded.form

    @property
    def sample(self) -> Encoded:
        """An encoded form with the attributes of all forms that :attr:`encoded` may return."""
        return self.encoded

    def gather(self) -> None:
        """Record that messages gather rows of it, or a product reads it, in the plain decoding."""
        self.gathered = True
        for source in self.encoded.sources:
            source.context.gather()

    def move(self, leave: Callable[[Encoded], Encoded]) -> None:
        """Replace the encoded form by a copy in other memory."""
        self.encoded = leave(self.encoded)


class Saved:
    """The object that autograd holds in place of a saved tensor: a context and a layout.

    Attributes:
        slot: The slot of the tensor; its context may belong to another slot.
        advise: The advice for backward that runs out of memory; None for none.
    """

    __slots__ = ("advise", "context", "layout", "slot")

    def __init__(
        self, context: Context, layout: Layout | None = None, slot: str | None = None
    ) -> None:
        self.context: Context = context
        self.layout: Layout | None = layout
        self.slot: str | None = slot
        self.advise: Advise | None = None

    def tensor(self) -> Tensor:
        """Return the saved tensor, with its values, dtype, shape and strides.

        Attention computes scores and messages from one tensor, and the gradient of the scores'
        parameters is a product of both, which would contain the square of the noise of a single
        decoding. So if messages gather from the plain decoding, the tensor itself is the
        decorrelated one.
        """
        encoded = self.encoded()
        gathered = self.context.gathered
        return self._restored(encoded.decorrelated() if gathered else encoded.min_variance())

    def source(self) -> Tensor:
        """Return the source for gathering: the saved tensor in the plain decoding."""
        return self._restored(self.encoded())

    def encoded(self) -> Encoded:
        """Return the encoded form of the tensor, and report the decoding that follows."""
        if self.context.reading is not None:
            self.context.reading(self.slot)
        return self.context.encoded

    def all_encoded(self) -> Iterator[Encoded]:
        """Yield the encoded forms that decoding reads, and report the decoding that follows."""
        encoded = self.encoded()
        yield encoded
        for source in encoded.sources:
            yield from source.all_encoded()

    def _restored(self, encoded: Encoded) -> Tensor:
        return encoded.decode() if self.layout is None else encoded.restore(self.layout)

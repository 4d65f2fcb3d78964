"""What a codec is: it takes a context, and gives something smaller that decodes to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One context to encode.

    Args:
        tensor: Detached; for plain strided tensors the flat span [numel], else the tensor itself.
        slot: The context's stable name.
        bits: The width that the scheme gives to the slot; 32 asks for no quantization.
        group_size: Elements a quantization group.
        seed: Seed of the context's noise.
    """

    tensor: Tensor
    slot: str
    bits: int
    group_size: int
    seed: int


class Encoded(ABC):
    """An encoded context. It must not hold the tensor's autograd graph."""

    codec: ClassVar[str]
    bits: int | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that it keeps alive."""

    @abstractmethod
    def decode(self) -> Tensor:
        """The tensor of the request, any number of times, in any order, on any thread."""


class Codec(ABC):
    """A way to keep contexts. Stateless: one instance serves all models."""

    @abstractmethod
    def accepts(self, request: Request) -> bool:
        """Whether this codec takes the context."""

    @abstractmethod
    def encode(self, request: Request) -> Encoded:
        """The context in this codec's form."""

"""The computation of a tensor from saved tensors, by the operations that computed it in forward.

A recipe is a tree. Its leaves are tensors that are saved or owned anyway, its inner nodes
operations. Leaves may be quantized. A recipe is unbiased if the mean of its value is the tensor:
each operation is linear in what carries noise, and its masks and factors are exact.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from gact_graph.codecs.base import Saved
from gact_graph.codecs.keep import Kept
from gact_graph.support.edits import Glimpse
from gact_graph.support.storage import Layout, version_of

Keep = Callable[[Tensor], Saved]


class Operand(ABC):
    """A tensor that backward can compute.

    Attributes:
        nbytes: The bytes of memory that only this operand keeps alive.
    """

    nbytes = 0

    @property
    def below(self) -> tuple[Operand, ...]:
        """The operands that it is computed from."""
        return ()

    @property
    def operations(self) -> int:
        """The number of operations that compute it."""
        return sum(operand.operations for operand in self.below)

    @property
    def products(self) -> int:
        """The number of matrix products among them."""
        return sum(operand.products for operand in self.below)

    @property
    def exact(self) -> bool:
        """Whether :meth:`value` returns the bits of the tensor in forward."""
        return all(operand.exact for operand in self.below)

    @property
    def unbiased(self) -> bool:
        """Whether the mean of :meth:`value` over the noise is the tensor in forward."""
        return all(operand.unbiased for operand in self.below)

    @abstractmethod
    def value(self) -> Tensor:
        """Return the tensor. It may be the memory of a saved tensor: it must not be changed."""

    def is_current(self) -> bool:
        """Return whether no tensor below has changed since the recipe was written."""
        return all(operand.is_current() for operand in self.below)

    def leaves(self) -> Iterator[Saved]:
        """Yield the saved tensors below."""
        return itertools.chain.from_iterable(operand.leaves() for operand in self.below)

    def references(self) -> Iterator[Tensor]:
        """Yield the tensors below that are read from the memory that they had in forward."""
        return itertools.chain.from_iterable(operand.references() for operand in self.below)

    def saved(self, keep: Keep) -> Operand:
        """Return the operand with saved tensors in place of live ones.

        Args:
            keep: A function that saves a tensor; each tensor is encoded once, whoever saves it.
        """
        return self

    def plain(self) -> Operand:
        """Return the operand with codes in the plain decoding, as rows of messages are."""
        return self


class Leaf(Operand):
    """A saved tensor.

    Args:
        saved: The tensor.
        may_change: Whether it may be memory of the user, who may change it behind autograd.
    """

    unbiased = True
    _plain = False

    def __init__(self, saved: Saved, may_change: bool) -> None:
        self._saved = saved
        encoded = saved.context.sample
        glimpsed = may_change and isinstance(encoded, Kept)
        self._glimpse = Glimpse(encoded.decode()) if glimpsed else None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return 0 if self._glimpse is None else self._glimpse.nbytes

    @property
    def kept(self) -> bool:
        """Whether the tensor is kept by reference."""
        return isinstance(self._saved.context.sample, Kept)

    @property
    def operations(self) -> int:
        return self._saved.context.sample.operations

    @property
    def exact(self) -> bool:
        return self._saved.context.sample.exact

    def is_current(self) -> bool:
        encoded = self._saved.context.sample
        return not isinstance(encoded, Kept) or version_of(encoded.tensor) == encoded.version

    def leaves(self) -> Iterator[Saved]:
        yield self._saved

    def references(self) -> Iterator[Tensor]:
        encoded = self._saved.context.sample
        if isinstance(encoded, Kept):
            yield encoded.tensor

    def plain(self) -> Leaf:
        leaf = copy.copy(self)
        leaf._plain = True
        return leaf

    def value(self) -> Tensor:
        if self._glimpse is not None:
            # Of all elements in memory, of which the tensor may be a view.
            memory = self._saved.context.encoded.decode()
            self._glimpse.check(memory, "from which backward computes again", "level='L0'")
        return self._saved.source() if self._plain else self._saved.tensor()


@dataclass(frozen=True)
class Source(Operand):
    """A tensor that is saved if the recipe is used.

    Args:
        tensor: The tensor, detached.
        may_change: Whether it may be memory of the user.
        lossy: Whether it may be quantized.
        version: The version of the tensor.
    """

    tensor: Tensor
    may_change: bool
    lossy: bool
    version: int | None
    unbiased = True

    @property
    def exact(self) -> bool:
        return not self.lossy

    def value(self) -> Tensor:
        return self.tensor

    def is_current(self) -> bool:
        return version_of(self.tensor) == self.version

    def references(self) -> Iterator[Tensor]:
        yield self.tensor

    def saved(self, keep: Keep) -> Leaf:
        return Leaf(keep(self.tensor), self.may_change)


@dataclass(frozen=True)
class Constant(Operand):
    """A small tensor: a copy of a parameter or of a result, which may change before backward."""

    tensor: Tensor
    exact = True
    unbiased = True

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.tensor.nbytes

    def value(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class View(Operand):
    """A view of another operand's memory."""

    base: Operand
    layout: Layout

    @property
    def below(self) -> tuple[Operand, ...]:
        return (self.base,)

    def value(self) -> Tensor:
        return self.layout.restore(self.base.value().reshape(-1))

    def saved(self, keep: Keep) -> View:
        return dataclasses.replace(self, base=self.base.saved(keep))

    def plain(self) -> View:
        return dataclasses.replace(self, base=self.base.plain())


@dataclass(frozen=True)
class Recipe(Operand):
    """An operation on operands. Its value is new memory.

    Args:
        run: A function from the operands to the tensor.
        operands: The operands.
        linear: A function of whether each operand is inexact: whether the operation is linear in
            the inexact ones together.
        gathers: Whether the operation gathers rows of its first operand.
        multiplies: Whether the operation is a matrix product.
    """

    run: Callable[..., Tensor]
    operands: tuple[Operand, ...]
    linear: Callable[[Sequence[bool]], bool]
    gathers: bool = False
    multiplies: bool = False

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(operand.nbytes for operand in self.operands)

    @property
    def below(self) -> tuple[Operand, ...]:
        return self.operands

    @property
    def operations(self) -> int:
        return 1 + sum(operand.operations for operand in self.operands)

    @property
    def products(self) -> int:
        return self.multiplies + sum(operand.products for operand in self.operands)

    @property
    def unbiased(self) -> bool:
        inexact = [not operand.exact for operand in self.operands]
        below = all(operand.unbiased for operand in self.operands)
        return below and (not any(inexact) or self.linear(inexact))

    def value(self) -> Tensor:
        return self.run(*self.operands)

    def saved(self, keep: Keep) -> Recipe:
        operands = tuple(operand.saved(keep) for operand in self.operands)
        return dataclasses.replace(self, operands=operands)

    def plain(self) -> Recipe:
        operands = tuple(operand.plain() for operand in self.operands)
        return dataclasses.replace(self, operands=operands)

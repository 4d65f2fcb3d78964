"""Nested arguments and results, taken apart into their tensors and all that is around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_TENSOR = object()
"""Marks where a tensor was."""


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors, which :meth:`filled` takes in the order of the leaves."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The nested value with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    @property
    def num_tensors(self) -> int:
        return sum(leaf is _TENSOR for leaf in self.leaves)

    @property
    def others(self) -> list[Any]:
        """The leaves that are no tensors."""
        return [leaf for leaf in self.leaves if leaf is not _TENSOR]


def taken_apart(value: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of a nested value (tuples, lists, dicts), and what is around them."""
    leaves, spec = tree_flatten(value)
    around = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Structure(around, spec)

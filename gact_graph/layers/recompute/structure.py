"""Nested arguments, split into their tensors and a structure around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gact_graph.support.torch_private import TreeSpec, tree_flatten, tree_unflatten

_TENSOR = object()
"""The mark of a tensor's place."""


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the nested value with these tensors, in the order of the leaves."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    @property
    def num_tensors(self) -> int:
        return sum(leaf is _TENSOR for leaf in self.leaves)

    @property
    def others(self) -> list[Any]:
        """The leaves that are not tensors."""
        return [leaf for leaf in self.leaves if leaf is not _TENSOR]


def taken_apart(value: Any) -> tuple[list[Tensor], Structure]:
    """Return the tensors of a nested value (tuples, lists, dicts) and the rest, its structure."""
    leaves, spec = tree_flatten(value)
    around = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Structure(around, spec)

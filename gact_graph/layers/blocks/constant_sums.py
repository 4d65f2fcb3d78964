r"""Sums over neighbors of rows that training does not change, such as the features of nodes.

The first graph convolution of a model computes :math:`Y = A X W^T` with constant :math:`A` and
:math:`X`. Its only gradient is :math:`\nabla W = (\nabla Y)^T (A X)`, for which rows of :math:`X`
are summed again. They are narrower than the rows of :math:`\nabla Y`, which autograd would sum in
the other direction. Where a plan has memory for it, the sums :math:`A X` are kept from one step to
the next.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.order import SortedEdges, identity_of
from gact_graph.layers.blocks.recent import Recent
from gact_graph.layers.blocks.weighted_sum import sum_edges, sum_products, sums_by_part
from gact_graph.support.content import checksum
from gact_graph.support.current import Product, capture_disabled_in_backward, with_advice
from gact_graph.support.storage import key_of
from gact_graph.support.torch_private import holders_of


@dataclass(frozen=True)
class ConstantSums:
    """Weighted sums of constant rows.

    Attributes:
        x: The rows [N, ...].
        weights: The weights [E, ..., 1], without a gradient.
        edges: The edges, sorted by destination.
        kept: The sums [D, ...], if they are kept.
    """

    x: Tensor
    weights: Tensor
    edges: SortedEdges
    kept: Tensor | None = None

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the sums [D, ...]."""
        if self.kept is not None:
            return self.kept.detach()
        out = self.x.new_empty(self.edges.num_nodes, *self.x.shape[1:])
        sum_edges(out, self.x, self.weights, self.edges, self.edges.num_edges)
        return out

    def times(self, factor: Tensor) -> Tensor:
        """Return the sums of rows [N, F], multiplied by a weight matrix [W, F]: [D, W].

        The autograd graph leads to the matrix alone.
        """
        result: Tensor = _Multiplied.apply(self, self.x, factor)
        return result

    def multiply(self, factor: Tensor) -> Tensor:
        """Return the result of :meth:`times` without a graph."""
        out = self.x.new_empty(self.edges.num_nodes, factor.size(0))
        if self.kept is not None:
            Product(self.kept, factor).write(out)
        else:
            sum_products(out, Product(self.x, factor), self.weights, self.edges)
        return out

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the weight matrix [W, F] from that of the result [D, W]."""
        if self.kept is not None:
            return gradient.t() @ self.kept
        total = gradient.new_zeros(gradient.size(1), self.x.size(1))
        for nodes, sums in sums_by_part(self.x, self.weights, self.edges):
            total.addmm_(gradient[nodes].t(), sums)
        return total


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: ConstantSums, x: Tensor, factor: Tensor) -> Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)  # for the error if it changes in place
        return sums.multiply(factor)

    @staticmethod
    @with_advice
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        sums: ConstantSums = ctx.sums
        (gradient,) = gradients
        if gradient is None:
            return None, None, None
        if torch.is_grad_enabled():  # the gradient may be differentiated again
            return None, None, gradient.t() @ sums.values()
        with capture_disabled_in_backward():
            return None, None, sums.gradient(gradient)


@dataclass
class _Entry:
    """Sums of one key.

    Attributes:
        forward: The last forward that computed them.
        content: The checksums of rows and weights.
        sums: The sums; None in the first forward.
        holders: The number of holders of their memory while nothing uses them.
        checksum: That of the sums, once the caller has got them and may change them, by NumPy even
            without a new version.
        multiplied: The sums that products multiply, while a backward may read them.
    """

    forward: int
    content: tuple[int, int] | None = None
    sums: Tensor | None = None
    holders: int = 0
    checksum: int | None = None
    multiplied: weakref.ref[ConstantSums] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing holds sums that an earlier call returned."""
        return self.sums is None or holders_of(self.sums) == self.holders

    def is_same(self, content: tuple[int, int]) -> bool:
        """Return whether the sums are those of this content, and unchanged."""
        return (
            self.sums is not None
            and self.content == content
            and (self.checksum is None or self.checksum == _content(self.sums))
        )

    def keep(self, sums: Tensor, content: tuple[int, int]) -> None:
        """Keep sums of this content."""
        self.sums, self.content = sums, content
        self.holders = holders_of(sums)
        self.checksum = self.multiplied = None

    def lend(self, sums: ConstantSums, to_product: bool) -> ConstantSums:
        """Return ``sums`` with the kept ones, unless the caller could change those of a product."""
        multiplied = None if self.multiplied is None else self.multiplied()
        if not to_product:
            if multiplied is not None:
                return sums
            if self.checksum is None:
                assert self.sums is not None
                self.checksum = _content(self.sums)
            return replace(sums, kept=self.sums)
        if multiplied is None:
            multiplied = replace(sums, kept=self.sums)
            self.multiplied = weakref.ref(multiplied)
        return multiplied


class KeptSums(Recent[_Entry]):
    """Keep sums of constant rows from the second forward on that computes them.

    Args:
        is_active: Whether to keep sums.
    """

    def __init__(self, is_active: bool) -> None:
        super().__init__()
        self.is_active = is_active

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        tensors = (entry.sums for entry in [*self._entries.values()])
        return sum(sums.nbytes for sums in tensors if sums is not None)

    def find(
        self, x: Tensor, weights: Tensor, edges: SortedEdges, to_product: bool
    ) -> ConstantSums:
        """Return the sums of rows, with those of an earlier forward if they are the same.

        Args:
            x: The rows [N, ...] of the caller.
            weights: The weights [E, ..., 1].
            edges: The edges, sorted by destination.
            to_product: Whether the sums are multiplied, rather than returned to the caller.
        """
        sums = ConstantSums(x.detach(), weights.detach(), edges)
        if not self.is_active or self._holds(x):  # in a plan's two steps, sums of sums are new
            return sums
        key = identity_of(x), edges  # their content may change without a trace in it
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(self._forward)
            return sums
        is_first = entry.forward < self._forward  # in this forward
        entry.forward = self._forward
        content = _content(sums.x), _content(sums.weights)
        is_same = entry.is_same(content)
        if not is_same and is_first and entry.is_free:
            entry.sums = None  # before the next ones take memory
            entry.keep(sums.values(), content)
            is_same = True
        if is_same and entry.is_free:
            return entry.lend(sums, to_product)
        return sums

    def _holds(self, x: Tensor) -> bool:
        key = key_of(x)
        tensors = (entry.sums for entry in [*self._entries.values()])
        return any(sums is not None and key_of(sums) == key for sums in tensors)


def _content(tensor: Tensor) -> int:
    return int(checksum(tensor.reshape(1, -1)))

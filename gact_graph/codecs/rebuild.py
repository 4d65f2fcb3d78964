"""``gather`` and ``rebuild``: tensors that backward computes again from tensors that are saved.

A message-passing layer saves ``x_j`` [E, C], which it gathered from a node tensor [N, C]. The node
tensor is encoded once, by any codec, and backward gathers again. A linear layer saves
``dropout(relu(norm(h)))``, of which the norm saves ``h``, the activation and the dropout a mask
each: backward runs the three operations again, on exact values with the same bits, and on codes of
``h`` without bias.

A norm and messages pass a gradient on that depends on the tensor that they read. If that is a
product ``W x``, the gradient of ``W`` is a product of this gradient and ``x``, and would contain
the square of the noise in both. So the product is computed from the plain decoding of the codes,
and all others read the decorrelated one.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded, Saved
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.compared import Compared
from gact_graph.codecs.reads import VALUES, Side, Sign, Values
from gact_graph.codecs.recipe import Recipe
from gact_graph.support.torch_private import at_end_of_backward, graph_task_id


class Rebuilt(Encoded):
    """A recipe from saved tensors.

    Attributes:
        readers: The number of operations that saved the tensor. An exact tensor, and one that a
            product of matrices makes, stays from the first to the last one that reads it in a
            backward.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._plain = True
        self.readers = 1
        self._shared = _Shared()
        self.codec = "gather" if recipe.gathers else "rebuild"
        self.exact: bool = recipe.exact
        self.lossy: bool = not recipe.exact
        self.products: int = 0 if recipe.exact else recipe.products
        self.sources: tuple[Saved, ...] = (*recipe.leaves(),)
        self.operations: int = recipe.operations
        if recipe.gathers or self.products:
            for source in self.sources:
                source.context.gather()

    @property
    def nbytes(self) -> int:
        return self._recipe.nbytes

    @property
    def makes_memory(self) -> bool:  # type: ignore[override]
        return self.readers == 1

    def decode(self) -> Tensor:
        in_backward = graph_task_id() != -1
        if self.readers == 1 or not in_backward or not self._is_shared():
            return self._compute()
        shared = self._shared
        if shared.value is None:
            shared.left = self.readers
            at_end_of_backward(shared.release)
        if shared.value is None or shared.plain != self._plain:
            shared.value = None  # first, so that both are never in memory together
            shared.value, shared.plain = self._compute(), self._plain
        value = shared.value
        shared.left -= 1
        if not shared.left:
            shared.release()
        return value

    def _is_shared(self) -> bool:
        """Return whether the next decoding in this backward has the same values."""
        if self.exact:
            return True
        # A measuring step reads codes in one of two widths.
        return self.products > 0 and not any(map(_is_compared, self.sources))

    def _compute(self) -> Tensor:
        recipe = self._recipe.plain() if self._plain else self._recipe
        # Forward ran without autocast, but backward may run inside.
        active = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        with ExitStack() as stack:
            for kind in active:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return recipe.value().reshape(-1)

    def decorrelated(self) -> Rebuilt:
        if self.exact or self._recipe.gathers:
            return self
        rebuilt = copy.copy(self)
        rebuilt._plain = False
        return rebuilt

    def min_variance(self) -> Rebuilt:
        return self if self.products else self.decorrelated()


@dataclass
class _Shared:
    """A rebuilt tensor between the first and the last operation that reads it.

    Attributes:
        value: The tensor; None outside of that time.
        plain: Whether it was computed from plain decodings.
        left: The number of operations that have not read it.
    """

    value: Tensor | None = None
    plain: bool = True
    left: int = 0

    def release(self) -> None:
        self.value = None


def _is_compared(saved: Saved) -> bool:
    context = saved.context
    return isinstance(context, Compared) or any(map(_is_compared, context.sample.sources))


class Rebuild(Codec):
    """Encodes tensors that backward can compute from tensors that are saved anyway.

    Noise of the latter is allowed where the former may carry noise and the recipe is unbiased.
    """

    lossless = True

    def encode(self, request: Request) -> Rebuilt | None:
        if request.recipe is None:
            return None
        recipe, reads = request.recipe, request.reads
        # Rows of a source are read as the source is, so its codes are fit for them.
        if not recipe.gathers:
            if isinstance(reads, (Side, Sign)):
                return None  # one bit is read sooner than an operation runs
            if not recipe.exact and not _may_be_inexact(recipe, request):
                return None
        return Rebuilt(recipe.saved(request.keep))


def _may_be_inexact(recipe: Recipe, request: Request) -> bool:
    reads = request.reads
    if request.bits == 32 or not recipe.unbiased:
        return False
    if not recipe.products:
        return reads == VALUES
    # Codes have two decodings: readers of a product, of its factor and of a factor of that would
    # need three.
    if recipe.products + sum(map(_products, recipe.leaves())) > 1:
        return False
    return isinstance(reads, Values) and dataclasses.replace(reads, slices=None) == VALUES


def _products(saved: Saved) -> int:
    """Return the number of products on the way from codes to a saved tensor."""
    encoded = saved.context.sample
    if not isinstance(encoded, Rebuilt):
        return 0
    return encoded.products + sum(map(_products, encoded.sources))

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

import torch
from torch import Tensor
from torch.autograd import Variable

from gact_graph.codecs.base import Encoded, Saved
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.reads import VALUES, Side, Sign, Values
from gact_graph.codecs.recipe import Recipe


class Rebuilt(Encoded):
    """A recipe from saved tensors.

    Attributes:
        readers: The number of operations that saved the tensor. An exact tensor stays from the
            first to the last one that reads it in a backward.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._plain = True
        self.readers = 1
        self._value: Tensor | None = None
        self._left = 0
        self.codec = "gather" if recipe.gathers else "rebuild"
        self.exact = recipe.exact
        self.lossy = not recipe.exact
        self.products = 0 if recipe.exact else recipe.products
        self.sources = (*recipe.leaves(),)
        self.operations = recipe.operations
        if recipe.gathers or self.products:
            for source in self.sources:
                source.context.gather()

    @property
    def nbytes(self) -> int:
        return self._recipe.nbytes

    def decode(self) -> Tensor:
        # Codes may be read in another width or decoding next time.
        in_backward = torch._C._current_graph_task_id() != -1
        if self.readers == 1 or not in_backward or not self._recipe.exact:
            return self._compute(self._recipe.plain() if self._plain else self._recipe)
        value = self._value
        if value is None:
            value = self._value = self._compute(self._recipe)
            self._left = self.readers
            Variable._execution_engine.queue_callback(self._release)
        self._left -= 1
        if not self._left:
            self._release()
        return value

    @staticmethod
    def _compute(recipe: Recipe) -> Tensor:
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

    def _release(self) -> None:
        self._value = None


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
    encoded = saved.context.encoded
    if not isinstance(encoded, Rebuilt):
        return 0
    return encoded.products + sum(map(_products, encoded.sources))

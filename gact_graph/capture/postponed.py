"""Products of a layer that need no memory of their own.

A graph convolution multiplies the rows of nodes by a weight, and sums the products over neighbors:
nothing but the sum reads the product. So ``x @ weight.T`` is postponed: ``propagate`` gets a tensor
without memory, and if it sums rows with fixed weights, it sums rows of ``x`` and multiplies a few
sums at a time by the weight (:mod:`gact_graph.layers.blocks.call`).

The next operation of the model, whichever it is, first finds out whether the tensor still exists.
If so, the tensor gets its values before that operation runs, and no later product of the same place
is postponed. A product is postponed in the first call too, so that all calls round alike.

Scripted functions, extensions and hooks read memory without an operation that the library sees, and
end the process if there is none. So only layers are tried whose code is known to pass the product
to ``propagate`` alone, and the product has its values at the latest when the layer ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCNConv, PDNConv

from gact_graph.capture.places import Places
from gact_graph.capture.replaced import replaced
from gact_graph.capture.running import RunningModules
from gact_graph.capture.trace import Call
from gact_graph.support.current import Product, capture_disabled
from gact_graph.support.storage import is_plain


@dataclass
class _Postponed:
    """A tensor without memory, the product that it stands for, and the operation that made it."""

    call: Call
    result: weakref.ref[Tensor]
    product: Product

    def is_read(self, call: Call) -> bool:
        """Return whether the tensor is an argument of an operation."""
        result = self.result()
        return result is not None and any(argument is result for argument in call.args)


class PostponedProducts:
    """Postpones products in one forward.

    Args:
        places: The operations of the model for which this works; None to postpone nothing.
        running: The submodules that run.
        computed: A callback for an operation whose result gets its values late.
    """

    def __init__(
        self,
        places: Places | None,
        running: RunningModules,
        computed: Callable[[Call, Tensor], None],
    ) -> None:
        self._is_active, self._places = places is not None, places or Places()
        self._running, self._computed = running, computed
        self._postponed: list[_Postponed] = []

    def settle(self, call: Call | None = None, *, may_wait: bool = False) -> None:
        """Compute the values that an operation may read, or code after a layer or the forward.

        Args:
            call: The operation; None after a layer or the forward.
            may_wait: Whether a product waits that is no argument of the operation: a layer has the
                product in a variable while it adds the bias.
        """
        for postponed in [*self._postponed]:
            if not may_wait or call is None or postponed.is_read(call):
                if self._evaluate(postponed) and call is not None:
                    # Edge work that does not sum rows in one call may do so in the next.
                    self._places.refute(postponed.call.label)
                self._postponed.remove(postponed)

    def instead(self, call: Call, label: Callable[[Call], str]) -> Callable[[], Any] | None:
        """Return a function to run in place of an operation; None for the operation itself.

        Args:
            call: The operation.
            label: A function that returns the name of an operation in slots.
        """
        is_linear = self._is_active and call.func is F.linear
        if is_linear and _can_wait(call) and self._running.layer_of_linear() in _LAYERS:
            name = label(call)
            if name not in self._places.refuted:
                return lambda: self._postpone(call)
        return None

    def product_of(self, tensor: Tensor) -> Product | None:
        """Return the product that a tensor without memory stands for; None for another tensor."""
        for postponed in self._postponed:
            if postponed.result() is tensor:
                return postponed.product
        return None

    def _postpone(self, call: Call) -> Tensor:
        x, weight = _factors(call)
        mm = torch.ops.aten.mm.default
        result: Tensor = replaced(mm, _without_memory, lambda: F.linear(x, weight))
        product = Product(x, weight)
        self._postponed.append(_Postponed(call, weakref.ref(result), product))
        return result

    def _evaluate(self, postponed: _Postponed) -> bool:
        """Give a tensor its values, and return whether it still exists."""
        result = postponed.result()
        if result is None:
            return False
        with capture_disabled():
            with torch.no_grad():
                result.untyped_storage().resize_(result.nbytes)
                # Through data, so that the version stays that of the result.
                postponed.product.write(result.data)
            self._computed(postponed.call, result)
        return True


def _factors(call: Call) -> tuple[Any, Any]:
    """Return the input and the weight of a linear operation."""
    return call.argument(0, "input"), call.argument(1, "weight")


def _can_wait(call: Call) -> bool:
    """Return whether a product can be postponed."""
    x, weight = _factors(call)
    if call.argument(2, "bias") is not None:
        return False
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return False
    if not (is_plain(x) and is_plain(weight)) or x.dim() != 2 or weight.dim() != 2:
        return False
    if not (x.requires_grad or weight.requires_grad) or not torch.is_grad_enabled():
        return False
    if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return False
    return weight.size(1) <= weight.size(0) and x.is_contiguous()


_LAYERS: frozenset[type | None] = frozenset({GCNConv, PDNConv})
"""Layers that sum the products of their linear module, with no other code in between. Not
subclasses, whose ``propagate`` may read memory without an operation of PyTorch."""


def _without_memory(x: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor of the size and type of a matrix product."""
    result = x.new_empty(x.size(0), weight.size(1))
    result.untyped_storage().resize_(0)
    return result

"""Products and sums of a layer that need no memory of their own.

A graph convolution multiplies the rows of nodes by a weight, sums the products over neighbors, and
adds a bias: three tensors of nodes, each of which nothing but the next operation reads. Instead,

- the product ``x @ weight.T`` is postponed: ``propagate`` gets a tensor without memory, and if it
  sums rows with fixed weights, it sums rows of ``x`` and multiplies a few sums at a time by the
  weight (:mod:`gact_graph.layers.blocks.call`);
- the sum with the bias takes the memory of the sum over neighbors.

The next operation of the model, whichever it is, first finds out whether the tensor still exists.
If so, the tensor gets its values before that operation runs, and no later call of the same place is
postponed or shares memory. Memory is only shared where an earlier call has shown that the tensor is
gone by then; a product is postponed in the first call too, so that all calls round alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn.conv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gact_graph.capture.call_site import called_from
from gact_graph.capture.trace import Call
from gact_graph.support.current import Product, capture_disabled
from gact_graph.support.storage import is_plain

aten = torch.ops.aten

_ADDS = frozenset({torch.add, Tensor.add, Tensor.__add__})
_VIEWS = frozenset({Tensor.view, Tensor.flatten, torch.flatten, Tensor.reshape, torch.reshape})


@dataclass
class Places:
    """The operations, by label, whose results nothing but the next operation reads.

    Attributes:
        proven: Edge work whose result was gone after the next operation.
        refuted: Edge work and products whose result was not.
    """

    proven: set[str] = field(default_factory=set)
    refuted: set[str] = field(default_factory=set)

    def learn(self, label: str) -> None:
        """Count a call whose result only the next operation has read."""
        if label not in self.refuted:
            self.proven.add(label)

    def refute(self, label: str) -> None:
        """Count a call whose result another operation has read."""
        self.proven.discard(label)
        self.refuted.add(label)


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


@dataclass
class _Sum:
    """A sum over neighbors.

    Attributes:
        label: The name of the edge work.
        tensors: The sum, and its view with other dimensions, if the layer made one.
        again: A function that computes the sum again.
        total: The sum with the bias; None before it exists.
        shares: Whether the total has the memory of the sum.
    """

    label: str
    tensors: list[weakref.ref[Tensor]]
    again: Callable[[], Tensor]
    total: weakref.ref[Tensor] | None = None
    shares: bool = False


class Postponement:
    """Postpones products and shares the memory of sums in one forward.

    Args:
        places: The operations of the model for which this works; None to give each result memory.
        computed: A callback for an operation whose result gets its values late.
    """

    def __init__(self, places: Places | None, computed: Callable[[Call, Tensor], None]) -> None:
        self._is_active, self._places = places is not None, places or Places()
        self._computed = computed
        self._postponed: list[_Postponed] = []
        self._sum: _Sum | None = None

    # Before and after an operation of the model.

    def settle(self, call: Call | None = None) -> None:
        """Compute the values that an operation may read, or that may be read after the forward."""
        if self._sum is not None and (call is None or not _reads(call, self._sum)):
            self._check(self._sum)
            self._sum = None  # and with it the arguments of the edge work
        for postponed in [*self._postponed]:
            # The layer has the product in a variable while it adds the bias.
            if self._sum is None or call is None or postponed.is_read(call):
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
        if self._is_active and call.func is F.linear and _can_wait(call):
            name = label(call)
            if name not in self._places.refuted:
                return lambda: self._postpone(call)
        elif call.func in _ADDS and self._shares():
            return lambda: self._share(call)
        return None

    def after(self, call: Call, result: Any) -> None:
        """Follow the sum over neighbors through an operation."""
        if self._sum is not None and isinstance(result, Tensor):
            if call.func in _VIEWS:
                self._sum.tensors.append(weakref.ref(result))
            else:
                self._sum.total = weakref.ref(result)

    # Products.

    def product_of(self, tensor: Tensor) -> Product | None:
        """Return the product that a tensor without memory stands for; None for another tensor."""
        for postponed in self._postponed:
            if postponed.result() is tensor:
                return postponed.product
        return None

    def _postpone(self, call: Call) -> Tensor:
        x, weight = _factors(call)
        with _WithoutProduct():
            result: Tensor = F.linear(x, weight)
        product = Product(x.detach(), weight.detach())
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

    # Sums with a bias.

    def has_summed(self, label: str, result: Tensor, again: Callable[[], Tensor]) -> None:
        """Record the result of edge work, which the next operation may read.

        Args:
            label: The name of the edge work.
            result: The result.
            again: A function that computes the same again.
        """
        if self._is_active and is_plain(result) and result.requires_grad:
            self._sum = _Sum(label, [weakref.ref(result)], again)

    def _shares(self) -> bool:
        return self._sum is not None and self._sum.label in self._places.proven

    def _share(self, call: Call) -> Any:
        assert self._sum is not None
        with _InMemoryOfFirst() as mode:
            result = call.func(*call.args, **call.kwargs)
        self._sum.shares = mode.shared
        return result

    def _check(self, last: _Sum) -> None:
        """Learn whether a sum with a bias took its place, and undo that if it did not."""
        if last.total is None:
            return
        alive = [tensor for ref in last.tensors if (tensor := ref()) is not None]
        if not alive:
            self._places.learn(last.label)
            return
        self._places.refute(last.label)
        if not last.shares:
            return
        total = last.total()
        with capture_disabled(), torch.no_grad():
            if total is not None:
                total.data = total.data.clone()
            # Written where other views of the sum see it.
            alive[0].data.copy_(last.again().view(alive[0].shape))


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
    return weight.size(1) <= weight.size(0) and x.is_contiguous() and called_from(_LAYERS)


_LAYERS = torch_geometric.nn.conv.__name__
"""Layers of PyG run no code of the user between the product and the sum, which could read memory
without an operation of PyTorch."""


def _reads(call: Call, last: _Sum) -> bool:
    """Return whether an operation views a sum, or adds a tensor to it."""
    tensor = last.tensors[-1]()
    if (
        last.total is not None
        or tensor is None
        or not call.args
        or call.args[0] is not tensor
        or call.kwargs
    ):
        return False
    if call.func in _VIEWS:
        return len(last.tensors) == 1
    if call.func not in _ADDS or len(call.args) != 2:
        return False
    other = call.args[1]
    fits = isinstance(other, Tensor) and is_plain(other) and other.dtype == tensor.dtype
    if not fits or other.dim() > tensor.dim() or other.device != tensor.device:
        return False
    pairs = zip(reversed(other.shape), reversed(tensor.shape), strict=False)
    return tensor.is_contiguous() and all(own in (1, full) for own, full in pairs)


class _WithoutProduct(TorchDispatchMode):
    """Makes the result of a matrix product without its memory; autograd sees the operation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not aten.mm.default:
            return func(*args, **(kwargs or {}))
        x, weight = args
        result = x.new_empty(x.size(0), weight.size(1))
        result.untyped_storage().resize_(0)
        return result


class _InMemoryOfFirst(TorchDispatchMode):
    """Writes a sum of two tensors over the first one; autograd sees a new tensor.

    Attributes:
        shared: Whether a sum was written so.
    """

    shared = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not aten.add.Tensor or kwargs:
            return func(*args, **(kwargs or {}))
        x, other = args
        memory = x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        result = x.new_empty(0).set_(*memory)
        self.shared = True
        return result.add_(other)

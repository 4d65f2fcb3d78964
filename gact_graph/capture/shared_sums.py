"""Adding a bias to a sum over neighbors in the memory of that sum.

A graph convolution sums rows of neighbors and adds a bias: two tensors of nodes, of which nothing
but the addition reads the first. The next operation of the model, whichever it is, first finds out
whether the sum still exists. If so, the sum gets its values again, in memory of its own, and no
later call of the same place shares memory. Memory is only shared where an earlier call has shown
that the sum is gone by then.

Scripted functions, extensions and hooks read a sum without an operation that the library sees. So
only sums in the forward of PyG's own layers are followed, and only to the end of the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn.conv
from torch import Tensor

from gact_graph.capture.places import Places
from gact_graph.capture.replaced import replaced
from gact_graph.capture.running import RunningModules
from gact_graph.capture.trace import Call
from gact_graph.support.current import capture_disabled
from gact_graph.support.storage import is_plain

_ADDS = frozenset({torch.add, Tensor.add, Tensor.__add__})
_VIEWS = frozenset({Tensor.view, Tensor.flatten, torch.flatten, Tensor.reshape, torch.reshape})

_LAYERS = torch_geometric.nn.conv.__name__
"""Layers of PyG call no other code with a sum once its bias is added."""


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


class SharedSums:
    """Shares the memory of sums in one forward.

    Args:
        places: The operations of the model for which this works; None to share nothing.
        running: The submodules that run.
    """

    def __init__(self, places: Places | None, running: RunningModules) -> None:
        self._is_active, self._places = places is not None, places or Places()
        self._running = running
        self._sum: _Sum | None = None

    @property
    def is_open(self) -> bool:
        """Whether the bias may be added to a sum now."""
        return self._sum is not None

    def settle(self, call: Call | None = None) -> None:
        """Give a sum its memory back that an operation may read, or code after a layer."""
        if self._sum is not None and (call is None or not _reads(call, self._sum)):
            self._check(self._sum)
            self._sum = None  # and with it the arguments of the edge work

    def has_summed(self, label: str, result: Tensor, again: Callable[[], Tensor]) -> None:
        """Record the result of edge work, which the next operation may read.

        Args:
            label: The name of the edge work.
            result: The result.
            again: A function that computes the same again.
        """
        if self._is_active and is_plain(result) and result.requires_grad:
            layer = self._running.layer()
            if layer is not None and layer.__module__.startswith(_LAYERS):
                self._sum = _Sum(label, [weakref.ref(result)], again)

    def instead(self, call: Call) -> Callable[[], Any] | None:
        """Return a function to run in place of an operation; None for the operation itself."""
        if call.func in _ADDS and self._sum is not None and self._sum.label in self._places.proven:
            return lambda: self._share(call)
        return None

    def after(self, call: Call, result: Any) -> None:
        """Follow the sum over neighbors through an operation."""
        if self._sum is not None and isinstance(result, Tensor):
            if call.func in _VIEWS:
                self._sum.tensors.append(weakref.ref(result))
            else:
                self._sum.total = weakref.ref(result)

    def _share(self, call: Call) -> Any:
        last = self._sum
        assert last is not None

        def add_in_place(x: Tensor, other: Tensor) -> Tensor:
            """Write the total over the sum; autograd sees a new tensor."""
            memory = x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
            last.shares = True
            return x.new_empty(0).set_(*memory).add_(other)

        add = torch.ops.aten.add.Tensor
        return replaced(add, add_in_place, lambda: call.func(*call.args, **call.kwargs))

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

"""Tensors that an operation saves while it runs: they are encoded when it has ended.

An operation may save a tensor that it has yet to write, as ``rrelu`` does with its noise; and only
at its end is there a node that names the tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gact_graph.capture.trace import Call
from gact_graph.codecs import Context, Kept, Saved
from gact_graph.support.storage import version_of


class Deferred(NamedTuple):
    """A tensor that is kept by reference until the operation that saves it has ended.

    Args:
        saved: What autograd holds; it gets its final context later.
        tensor: The tensor, detached.
        constant: Whether it needs no gradient.
        call: The operation.
        version: The tensor's version when it was saved.
    """

    saved: Saved
    tensor: Tensor
    constant: bool
    call: Call
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor, constant: bool, call: Call) -> Deferred:
        """A save that has to wait."""
        saved = Saved(Context(Kept(tensor, call.label)))
        return cls(saved, tensor, constant, call, version_of(tensor))

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since: then backward shall raise, as stock's."""
        return version_of(self.tensor) != self.version

    def finish(self, saved: Saved) -> None:
        """Has autograd hold what ``saved`` holds."""
        self.saved.context, self.saved.layout = saved.context, saved.layout
        self.saved.slot = saved.slot

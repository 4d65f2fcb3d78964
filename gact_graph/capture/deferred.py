"""Tensors that an operation saves while it runs: they are encoded when it has ended.

An operation may save a tensor that it has yet to write, as ``rrelu`` does with its noise; and only
at its end is it known what its result is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gact_graph.capture.operations import WITHIN
from gact_graph.capture.trace import RESULT, Saver
from gact_graph.codecs import Context, Kept, Saved
from gact_graph.support.storage import is_plain, place_of, version_of


class Deferred(NamedTuple):
    """A tensor that is kept by reference until the operation that saves it has ended.

    Args:
        saved: What autograd holds; it gets its final context later.
        tensor: The tensor, detached.
        constant: Whether it needs no gradient.
        saver: Who saves it.
        version: The tensor's version when it was saved.
    """

    saved: Saved
    tensor: Tensor
    constant: bool
    saver: Saver
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor, saver: Saver) -> Deferred:
        """A save that has to wait."""
        saved = Saved(Context(Kept(tensor, saver.slot)))
        constant = not tensor.requires_grad
        return cls(saved, tensor.detach(), constant, saver, version_of(tensor))

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since: then backward shall raise, as stock's."""
        return version_of(self.tensor) != self.version

    def position(self, result: Any) -> str:
        """The tensor's position in the operation, now that the result is known."""
        position = self.saver.position
        return WITHIN if position == RESULT and not _is_among(self.tensor, result) else position

    def finish(self, saved: Saved) -> None:
        """Has autograd hold what ``saved`` holds."""
        self.saved.context, self.saved.layout = saved.context, saved.layout
        self.saved.slot = saved.slot


def _is_among(tensor: Tensor, result: Any) -> bool:
    """Whether the tensor shares its memory with a result of the operation."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    place = place_of(tensor)
    return any(
        isinstance(one, Tensor) and is_plain(one) and place_of(one) == place for one in results
    )

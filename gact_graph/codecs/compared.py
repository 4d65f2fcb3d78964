"""A context in two widths, to measure the effect of the narrow one on the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from gact_graph.codecs.base import Context, Encoded, Form, Saved
from gact_graph.codecs.codec import Request

FINER = 2
"""Bits by which the fine width exceeds the narrow width. The narrow form is encoded from the fine
form, so the difference is its whole error, and the fine form costs little more than training."""

_OTHER_NOISE = 0x9E3779B97F4A7C15
"""A mask for the seed of the narrow width. It rounds values that the fine width has rounded: with
the same noise, the first rounding would decide the second."""


@dataclass
class MeasuredWidths:
    """The widths that a measuring step decodes.

    Attributes:
        narrow: The slots that are decoded in the width of training; all others use the fine width.
        read: The slots that were decoded since the set was cleared.
        slots: The bits of each slot's narrow width.
    """

    narrow: frozenset[str] = frozenset()
    read: set[str] = field(default_factory=set)
    slots: dict[str, float] = field(default_factory=dict)


class Compared(Context):
    """A context in a fine width, from which the width of training is encoded on demand.

    Args:
        request: The request for the width of training. Its tensor is released.
        narrow: The tensor in the width of training, for the report.
        fine: The tensor in the fine width.
        encode: A function that encodes a request.
        widths: Selects the width of :attr:`encoded`.
    """

    def __init__(
        self,
        request: Request,
        narrow: Encoded,
        fine: Encoded,
        encode: Callable[[Request], Encoded],
        widths: MeasuredWidths,
    ) -> None:
        self._fine = fine
        self._form = narrow.form
        # Without references to tensors. A quantized form refers to no other tensor.
        self._narrow: Request | None = dataclasses.replace(
            request,
            tensor=request.tensor.new_empty(0),
            recipe=None,
            keep=_keep_nothing,
            seed=request.seed ^ _OTHER_NOISE,
        )
        self._encode = encode
        self._widths = widths

    @property
    def form(self) -> Form:
        return self._form

    @property
    def sample(self) -> Encoded:
        return self._fine

    def move(self, leave: Callable[[Encoded], Encoded]) -> None:
        self._fine = leave(self._fine)
        moved = self._form.nbytes if self._fine.host_bytes else 0
        self._form = self._form._replace(host_bytes=moved)

    @property
    def encoded(self) -> Encoded:
        if self._narrow is None:
            return self._fine
        widths, slot = self._widths, self._narrow.slot
        widths.read.add(slot)
        if slot not in widths.narrow:
            return self._fine
        return self._encode(dataclasses.replace(self._narrow, tensor=self._fine.decode()))

    @encoded.setter
    def encoded(self, encoded: Encoded) -> None:
        self._fine, self._form = encoded, encoded.form
        self._narrow = None


def _keep_nothing(tensor: Tensor) -> Saved:
    raise AssertionError("Expected a quantized form, which refers to no other tensor")


def in_two_widths(
    request: Request, narrow: Encoded, encode: Callable[[Request], Encoded], widths: MeasuredWidths
) -> Context | None:
    """Return a context with both widths, or None if the tensor has no finer width.

    Args:
        request: The request for the width of training.
        narrow: The tensor in the width of training.
        encode: A function that encodes a request.
        widths: Selects the width; the slot is added to it.
    """
    if narrow.bits is None or narrow.bits >= 16:
        return None
    fine = encode(dataclasses.replace(request, bits=min(16, narrow.bits + FINER)))
    if fine.bits is not None and fine.bits <= narrow.bits:  # of a codec with one width
        return None
    widths.slots[request.slot] = narrow.bits
    return Compared(request, narrow, fine, encode, widths)

"""A context in two widths: what the narrow one does to the gradient shows beside the fine one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from gact_graph.codecs.base import Context, Encoded, Form, Request, Saved, form_of

FINER = 2
"""Bits above its own that a slot's error is measured against. The narrow width is made of the fine
one, so its error beside that is its whole error, and the fine one costs little more than training.
"""

_OTHER_NOISE = 0x9E3779B97F4A7C15
"""The narrow width rounds what the fine one rounded: with the same noise, the first would decide
where the second goes."""


@dataclass
class Widths:
    """Which width is decoded in a step that is measured.

    Attributes:
        narrow: The slot that is decoded in the width of training; all others are in the fine one.
        read: The slots that were decoded since somebody cleared the set.
        slots: Bits of the narrow width of each slot.
    """

    narrow: str | None = None
    read: set[str] = field(default_factory=set)
    slots: dict[str, int] = field(default_factory=dict)


class Compared(Context):
    """One context in a fine width, of which the width of training is made when it is read.

    Args:
        request: For the width of training. Its tensor is let go.
        narrow: The tensor in that width, for the report.
        fine: The tensor in the fine width.
        encode: Encodes a request.
        widths: Tells which of both :attr:`encoded` is.
    """

    def __init__(
        self,
        request: Request,
        narrow: Encoded,
        fine: Encoded,
        encode: Callable[[Request], Encoded],
        widths: Widths,
    ) -> None:
        self._fine = fine
        self._form = form_of(narrow)
        # Without all that holds a tensor. What is quantized refers to no other one.
        self._narrow: Request | None = dataclasses.replace(
            request,
            tensor=request.tensor.new_empty(0),
            gathered=None,
            keep=_keep_nothing,
            seed=request.seed ^ _OTHER_NOISE,
        )
        self._encode = encode
        self._widths = widths

    @property
    def form(self) -> Form:
        return self._form

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
        if widths.narrow != slot:
            return self._fine
        return self._encode(dataclasses.replace(self._narrow, tensor=self._fine.decode()))

    @encoded.setter
    def encoded(self, encoded: Encoded) -> None:
        self._fine, self._form = encoded, form_of(encoded)
        self._narrow = None


def _keep_nothing(tensor: Tensor) -> Saved:
    raise AssertionError("Expected a quantized form, which refers to no other tensor")


def in_two_widths(
    request: Request, narrow: Encoded, encode: Callable[[Request], Encoded], widths: Widths
) -> Context | None:
    """A context that is decoded as ``widths`` says; None where no finer width takes memory.

    Args:
        request: For the width of training.
        narrow: The tensor in that width.
        encode: Encodes a request.
        widths: Gets to know the slot.
    """
    if narrow.bits is None:
        return None
    fine = encode(dataclasses.replace(request, bits=min(16, narrow.bits + FINER)))
    # An operation may ask for that many bits anyway.
    if fine.bits is not None and fine.bits <= narrow.bits:
        return None
    widths.slots[request.slot] = narrow.bits
    return Compared(request, narrow, fine, encode, widths)

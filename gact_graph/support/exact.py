"""Which saved tensors are kept exactly, because a derivative that forward returns depends on them.

A forward may differentiate itself, as potentials do whose forces are the gradient of an energy. And
a backward with ``create_graph=True`` gives a gradient that is computed with further. Both read
saved tensors while their values still matter: noise there would change a result, and not only the
gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gact_graph.support import current
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import is_plain
from gact_graph.support.warn import warn

_COPIED_BYTES = 1 << 18
"""Buffers up to this size, such as the statistics of a normalisation, are restored before a forward
runs once more. Larger ones are graphs and features, which forward does not change."""


class ReadInForwardError(BaseException):
    """A backward inside forward needs a tensor that was compressed: forward has to run once more.

    Not an Exception, so that no handler of the user's forward takes it for one of its own.
    """


class Exactly:
    """The slots of one method that are kept exactly.

    Calls in which a leaf other than a parameter needs a gradient have slots of their own: a loop
    may take a gradient penalty at some steps, and train without one at all others.

    Attributes:
        slots: By whether such a leaf was there, the slots.
        decided: Whether a backward has run through a call with such a leaf. Until then everything
            is kept exactly from the leaf on, since it is not known what will be read.
    """

    def __init__(self) -> None:
        self.slots: dict[bool, set[str]] = {False: set(), True: set()}
        self.decided = False
        self._warned = False

    def has(self, asked: bool, label: str) -> bool:
        """Whether an operation with this label, or a layer with this name, has such a slot."""
        return any(slot.startswith((f"{label}.", f"{label}/")) for slot in self.slots[asked])

    def warn_of_noise(self) -> None:
        """Says once that a gradient which is differentiated was computed from noisy tensors."""
        if not self._warned:
            self._warned = True
            warn(
                "A backward with create_graph=True read tensors that were compressed, so the "
                "gradient of this step holds the noise of quantization. They are kept exactly from "
                "the next step on. To have them exact in the first step too, let an input of the "
                "model require a gradient before the call, or take level='lossless'."
            )

    def warn_of_rerun(self) -> None:
        """Says once that forward has run twice."""
        if not self._warned:
            self._warned = True
            warn(
                "A forward differentiates itself with respect to tensors that are no leaves, or to "
                "parameters. It ran once more, without compression, so that what it returns is "
                "exact; the tensors that its own backward read are kept exactly from now on. What "
                "forward does besides computing, such as counting or printing, happened twice in "
                "this step."
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "with_leaf": sorted(self.slots[True]),
            "without": sorted(self.slots[False]),
            "decided": self.decided,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self.slots = {True: set(state["with_leaf"]), False: set(state["without"])}
        self.decided = bool(state["decided"])


class Reading:
    """Called whenever a context is decoded: sees who reads it.

    Args:
        exactly: Gets the slot if it has to be exact.
        slot: That of the context.
        asked: Whether a leaf that needs a gradient was there when it was saved.
        lossy: Whether it decodes to other values than were saved.
    """

    def __init__(self, exactly: Exactly, slot: str, asked: bool, lossy: bool) -> None:
        self._exactly = exactly
        self._slot = slot
        self._asked = asked
        self.lossy = lossy

    def __call__(self, slot: str | None) -> None:
        in_forward = current.forward_runs()
        if not in_forward and not torch.is_grad_enabled():
            self._exactly.decided |= self._asked
            return
        self._exactly.slots[self._asked] |= {self._slot, slot or self._slot}
        if self.lossy:
            if in_forward:
                raise ReadInForwardError
            self._exactly.warn_of_noise()


class Start:
    """What a call of forward began with, so that it can run once more."""

    def __init__(self, module: nn.Module) -> None:
        self._random = RunState(set())
        self._buffers = [
            (buffer, buffer.clone())
            for buffer in module.buffers()
            if is_plain(buffer) and buffer.nbytes <= _COPIED_BYTES
        ]
        self._gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def backward_begins(self, module: nn.Module) -> None:
        """A backward inside forward is about to add to gradients."""
        self._gradients = self._gradients or [
            (p, p.grad, None if p.grad is None else p.grad.clone()) for p in module.parameters()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Has it all again."""
        self._random.restore_random_state()
        for buffer, before in self._buffers:
            # By its values: batch norm does not count its changes as versions.
            if not torch.equal(buffer, before):
                buffer.copy_(before)
        for parameter, gradient, copy in self._gradients:
            parameter.grad = gradient
            if gradient is not None and copy is not None:
                gradient.copy_(copy)


def needs_a_gradient(value: Any) -> bool:
    """Whether it is a leaf, other than a parameter, that needs a gradient.

    Such a gradient is often part of a result (forces), or differentiated once more.
    """
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and value.is_leaf
        and not isinstance(value, nn.Parameter)
    )

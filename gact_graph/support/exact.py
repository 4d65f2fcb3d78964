"""Saved tensors that are kept exactly, because a returned derivative depends on them.

A forward may contain a backward, as in potentials whose forces are the gradient of an energy. A
backward with ``create_graph=True`` returns a gradient that later operations read. In both, noise of
saved tensors would change a result, and not only the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gact_graph.support import current
from gact_graph.support.messages import warn
from gact_graph.support.objects import COPIED_BYTES
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import is_plain, tensors_in, version_of


class ReadInForwardError(BaseException):
    """Raised where a backward inside forward reads a compressed tensor: forward runs once more.

    Not an Exception, so that no handler in the user's forward catches it.
    """


class ExactSlots:
    """The slots of one method that are kept exactly.

    Calls in which a leaf other than a parameter requires a gradient have slots of their own, since
    a loop may add a gradient penalty at some steps only.

    Attributes:
        slots: The slots of calls with such a leaf, and of calls without.
        decided: Whether a backward has run through a call with such a leaf. Before that, all
            tensors from the leaf on are kept exactly.
        interrupted: Whether a call ended at its first read of a compressed tensor. The next one
            keeps all tensors exactly, so that it finds every slot.
    """

    def __init__(self) -> None:
        self.slots: dict[bool, set[str]] = {False: set(), True: set()}
        self.decided: bool = False
        self.interrupted: bool = False
        self._warned = False

    def has(self, with_leaf: bool, label: str) -> bool:
        """Return whether an operation or a layer of this name has such a slot."""
        prefixes = f"{label}.", f"{label}/"
        return any(slot.startswith(prefixes) for slot in self.slots[with_leaf])

    def warn_of_noise(self) -> None:
        """Warn that a gradient with a graph has noise, unless a warning was given before."""
        if not self._warned:
            self._warned = True
            warn(
                "A backward with create_graph=True read tensors that were compressed, so the "
                "gradient of this step contains the noise of quantization. They are kept exactly "
                "from the next step on. For an exact first step, let an input of the model require "
                "a gradient before the call, or use level='lossless'."
            )

    def warn_of_rerun(self) -> None:
        """Warn that forward has run twice, unless a warning was given before."""
        if not self._warned:
            self._warned = True
            warn(
                "A forward differentiates itself with respect to tensors that are not leaves, or "
                "to parameters. It ran once more, without compression, so its result is exact; the "
                "tensors that its own backward read are kept exactly from now on. Side effects of "
                "forward, such as counting or printing, happened twice in this step."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the slots as plain values."""
        return {
            "with_leaf": sorted(self.slots[True]),
            "without": sorted(self.slots[False]),
            "decided": self.decided,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.slots = {True: set(state["with_leaf"]), False: set(state["without"])}
        self.decided = bool(state["decided"])


@dataclass
class Reading:
    """Record slots that have to be exact: a callback for each decoding of a context.

    Attributes:
        exact_slots: The slots that are kept exactly.
        slot: The slot of the context.
        with_leaf: Whether a leaf that requires a gradient existed when the context was saved.
        lossy: Whether the decoded values differ from the saved ones.
    """

    exact_slots: ExactSlots
    slot: str
    with_leaf: bool
    lossy: bool

    def __call__(self, slot: str | None) -> None:
        in_forward = current.forward_runs()
        if not in_forward and not torch.is_grad_enabled():
            self.exact_slots.decided |= self.with_leaf
            return
        self.exact_slots.slots[self.with_leaf] |= {self.slot, slot or self.slot}
        if self.lossy:
            if in_forward:
                self.exact_slots.interrupted = True
                raise ReadInForwardError
            self.exact_slots.warn_of_noise()


class RestorePoint:
    """The state at the start of a forward that may run once more.

    Args:
        module: The module of the forward.
        inputs: The arguments of the forward.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self._random = RunState(set())
        self._attributes = [(m._buffers, dict(m._buffers)) for m in module.modules() if m._buffers]
        self._buffers = [
            (buffer, buffer.clone())
            for buffer in module.buffers()
            # Larger buffers are graphs and features, which forward does not change.
            if is_plain(buffer) and buffer.nbytes <= COPIED_BYTES
        ]
        self._inputs = [(tensor, version_of(tensor)) for tensor in tensors_in(inputs)]
        self._gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def add_gradients(self, module: nn.Module) -> None:
        """Record gradients before the first backward inside forward adds to them."""
        self._gradients = self._gradients or [
            (p, p.grad, None if p.grad is None else p.grad.clone()) for p in module.parameters()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state.

        Raises:
            RuntimeError: Forward has changed an input in place, of which there is no copy.
        """
        for tensor, version in self._inputs:
            if version_of(tensor) != version:
                raise RuntimeError(
                    "Expected a forward that differentiates itself to leave its inputs as they "
                    f"were (got one that changes a tensor of shape {tuple(tensor.shape)} in "
                    "place), because it has to run once more, without compression. Change a copy "
                    "of the tensor, or wrap the model with level='lossless'."
                )
        self._random.restore_random_state()
        for attributes, before in self._attributes:  # forward may assign new buffers
            attributes.clear()
            attributes.update(before)
        for buffer, values in self._buffers:
            # By its values: batch norm does not count its changes as versions.
            if not torch.equal(buffer, values):
                buffer.copy_(values)
        for parameter, gradient, copy in self._gradients:
            parameter.grad = gradient
            if gradient is not None and copy is not None:
                gradient.copy_(copy)


def needs_a_gradient(value: Any) -> bool:
    """Return whether a value is a leaf, other than a parameter, that requires a gradient.

    Such a gradient is often part of a result (forces), or differentiated again.
    """
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and value.is_leaf
        and not isinstance(value, nn.Parameter)
    )

"""The state that an operation depends on besides its arguments: random states and autocast."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from gact_graph.support.current import capture_disabled


class RunState:
    """The present random states and autocast.

    Args:
        devices: The types of the devices besides the CPU.
    """

    def __init__(self, devices: set[str]) -> None:
        self._random = _RandomState.now()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *devices}
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore both inside, with gradients enabled; restore the caller's random states on exit.

        No session captures the operations inside, which repeat those of another place.
        """
        now = _RandomState.now()
        with ExitStack() as stack:
            stack.enter_context(capture_disabled())
            stack.callback(now.set)
            self._random.set()
            stack.enter_context(torch.enable_grad())
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    def restore_random_state(self) -> None:
        """Restore the random states for good."""
        self._random.set()


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast inside: a traced graph contains its casts."""
    with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        yield


def check_once(what: str) -> None:
    """Refuse to differentiate a gradient that has no graph.

    Raises:
        RuntimeError: Backward runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"Expected a backward without create_graph=True (got one through {what}, whose "
            "gradient cannot be differentiated again). For third derivatives wrap the model with "
            "level='L1' or level='lossless', and blocks=False."
        )


@dataclass(frozen=True)
class _RandomState:
    """States of the generators of torch, Python and NumPy: some layers sample with the last two."""

    cpu: Tensor
    cuda: list[Tensor]
    python: object
    numpy: Any

    @classmethod
    def now(cls) -> _RandomState:
        with _generators:
            cpu = torch.get_rng_state()
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(cpu, cuda, random.getstate(), numpy.random.get_state())

    def set(self) -> None:
        with _generators:
            torch.set_rng_state(self.cpu)
            if self.cuda:
                torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)  # type: ignore[arg-type]
        numpy.random.set_state(self.numpy)


def _renew() -> None:
    global _generators
    _generators = threading.RLock()


# torch holds a generator's mutex while it makes the tensor of its state. Where Python collects
# garbage at that moment and another thread runs, that one must not wait for the mutex: it would
# keep the interpreter to itself, and both would wait for ever.
_generators = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

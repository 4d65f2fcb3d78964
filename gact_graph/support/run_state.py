"""The state that an operation depends on besides its arguments: random states and autocast."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from gact_graph.support.current import capture_disabled


class RunState:
    """The present random states and autocast.

    Args:
        devices: The types of the devices besides the CPU.
        of_torch: Whether the operations draw random numbers by torch only.
    """

    def __init__(self, devices: set[str], *, of_torch: bool = False) -> None:
        self._of_torch = of_torch
        self._random = random_states(of_torch)
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *devices}
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore both inside, with gradients enabled; restore the caller's random states on exit.

        No session captures the operations inside, which repeat earlier operations.
        """
        before = random_states(self._of_torch)
        with ExitStack() as stack:
            stack.enter_context(capture_disabled())
            stack.callback(set_random_states, before)
            self.restore_random_state()
            stack.enter_context(torch.enable_grad())
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    def restore_random_state(self) -> None:
        """Restore the random states for good."""
        set_random_states(self._random)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast inside: a traced graph contains its casts."""
    with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        yield


class RandomStates(NamedTuple):
    """States of the generators of torch, and of Python and NumPy, with which some layers sample.

    The latter two take a hundred times as long as that of torch on a CPU; None if left alone.
    """

    cpu: Tensor
    cuda: list[Tensor]
    python: Any = None
    numpy: Any = None


def random_states(of_torch: bool = False) -> RandomStates:
    """Return the present states of all generators, or of those of torch only."""
    with _generators:
        cpu = torch.get_rng_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    if of_torch:
        return RandomStates(cpu, cuda)
    return RandomStates(cpu, cuda, random.getstate(), numpy.random.get_state())


def set_random_states(states: RandomStates) -> None:
    """Set the states of the generators that were recorded."""
    with generators():
        torch.set_rng_state(states.cpu)
        if states.cuda:
            torch.cuda.set_rng_state_all(states.cuda)
    if states.python is not None:
        random.setstate(states.python)
        numpy.random.set_state(states.numpy)


def generators() -> threading.RLock:
    """Return the lock under which states of torch's generators are read and set."""
    return _generators


def _renew() -> None:
    global _generators
    _generators = threading.RLock()


# torch holds the mutex of a generator while it creates the tensor of its state. If garbage
# collection starts then and Python switches to another thread, that thread must not wait for the
# mutex, because it would hold the interpreter lock: both threads would wait forever.
_generators = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

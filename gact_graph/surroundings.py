"""What an operation depends on beside its arguments: random states and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


class Surroundings:
    """Random states and autocast as they are now, to be had again later.

    Args:
        devices: Types of the devices that are used beside the CPU.
    """

    def __init__(self, devices: set[str]) -> None:
        self._random = _random_state()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *devices}
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Sets both as they were, with gradients on; random states go on from here afterwards."""
        now = _random_state()
        with ExitStack() as stack:
            stack.callback(_set_random_state, now)
            _set_random_state(self._random)
            stack.enter_context(torch.enable_grad())
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    def restore_random_state(self) -> None:
        """Lets random states go on from where they were."""
        _set_random_state(self._random)


def _random_state() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)

"""What an operation depends on beside its arguments: random states and autocast."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


class Surroundings:
    """Random states and autocast as they are now, to be had again later.

    Args:
        devices: Types of the devices that are used beside the CPU.
    """

    def __init__(self, devices: set[str]) -> None:
        self._random = _RandomState.now()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *devices}
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Sets both as they were, with gradients on; random states go on from here afterwards."""
        now = _RandomState.now()
        with ExitStack() as stack:
            stack.callback(now.set)
            self._random.set()
            stack.enter_context(torch.enable_grad())
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    def restore_random_state(self) -> None:
        """Lets random states go on from where they were."""
        self._random.set()


@dataclass(frozen=True)
class _RandomState:
    """Of torch's generators, and of Python's and NumPy's: some layers sample with those."""

    cpu: Tensor
    cuda: list[Tensor]
    python: object
    numpy: Any

    @classmethod
    def now(cls) -> _RandomState:
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            random.getstate(),
            numpy.random.get_state(),
        )

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)  # type: ignore[arg-type]
        numpy.random.set_state(self.numpy)

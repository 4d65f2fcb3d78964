"""The operations that a layer runs, recorded to tell whether it runs the same ones once more."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SETTINGS = (bool, float, str, torch.dtype)
"""Types of arguments that are part of an operation. Integers are not: they may be block sizes."""

Steps = list[Any]


class Recorder(TorchFunctionMode):
    """Within, records the functions of torch that are called.

    Attributes:
        steps: The functions, each followed by its settings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: Steps = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: Any, kwargs: Any) -> None:
        """Records a call; reading a tensor's attribute does not count."""
        if getattr(func, "__name__", "") == "__get__":
            return
        self.steps.append(func)
        for value in args:
            if isinstance(value, _SETTINGS):
                self.steps.append(value)
        for name, value in kwargs.items():
            if isinstance(value, _SETTINGS):
                self.steps.append((name, value))

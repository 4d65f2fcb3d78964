"""Modes that list the functions and operations that they see."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class SeenFunctions(TorchFunctionMode):
    """List the functions that Python calls."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(func)
        return func(*args, **(kwargs or {}))


class SeenOperations(TorchDispatchMode):
    """List the operations below autograd."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(func)
        return func(*args, **(kwargs or {}))

"""Modes that list the functions and operations that they see."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gact_graph.support.storage import storage_id


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


class Largest(TorchDispatchMode):
    """Record the most elements of a result that is no view of the first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not _is_view(result, *args[:1]):
            self.numel = max(self.numel, result.numel())
        return result


def _is_view(result: Tensor, of: Any = None) -> bool:
    return isinstance(of, Tensor) and storage_id(result) == storage_id(of)

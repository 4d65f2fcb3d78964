"""Which operations would have the host wait for a GPU, counted on the CPU."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_WAITING = frozenset(
    {_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero, _aten.bincount}
    | {_aten._unique2, _aten.unique_dim, _aten.masked_select}
)


class Waits:
    """Within, such operations are noted.

    Attributes:
        seen: Their names.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Waits:
        self._stack.enter_context(_Operations(self.seen))
        self._stack.enter_context(_Lists(self.seen))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()


class _Operations(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _WAITING:
            self._seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Lists of numbers: on the CPU no operation makes them."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            self._seen.append("tolist")
        return func(*args, **(kwargs or {}))

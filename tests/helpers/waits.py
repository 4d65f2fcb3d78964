"""Which operations would have the host wait for a GPU, counted on the CPU."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from seen import SeenFunctions, SeenOperations

_aten = torch.ops.aten
_WAITING = frozenset(
    {_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero, _aten.bincount}
    | {_aten._unique2, _aten.unique_dim, _aten.masked_select}
)


class Waits:
    """Within, such operations are noted."""

    def __init__(self) -> None:
        self._operations: list[Any] = []
        self._functions: list[Any] = []
        self._stack = ExitStack()

    @property
    def seen(self) -> list[str]:
        """Their names, those of operations first."""
        packets = [operation.overloadpacket for operation in self._operations]
        waiting = [packet.__name__ for packet in packets if packet in _WAITING]
        # Of lists of numbers: on the CPU no operation makes them.
        return waiting + ["tolist"] * self._functions.count(torch.Tensor.tolist)

    def __enter__(self) -> Waits:
        self._stack.enter_context(SeenOperations(self._operations))
        self._stack.enter_context(SeenFunctions(self._functions))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()

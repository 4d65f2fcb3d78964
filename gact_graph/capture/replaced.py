"""A replacement of one ATen operator within one operation of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gact_graph.support.torch_private import DispatchMode, OpOverload


def replaced(
    operator: OpOverload, instead: Callable[..., Any], operation: Callable[[], Any]
) -> Any:
    """Run an operation of the model, with a function in place of one operator below autograd.

    Args:
        operator: The operator.
        instead: A function of the positional arguments of the operator.
        operation: A function that runs the operation, and whose result is returned.
    """
    mode = _Replacement(operator, instead)
    with mode:
        mode.is_active = True
        try:
            return operation()
        finally:
            mode.is_active = False


class _Replacement(DispatchMode):
    """Calls a function in place of an operator, while it is active.

    A signal that comes as a mode starts or ends leaves the mode behind. Were this one active then,
    all later operations of the process would compute otherwise.
    """

    def __init__(self, operator: OpOverload, instead: Callable[..., Any]) -> None:
        super().__init__()
        self._operator, self._instead, self.is_active = operator, instead, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self.is_active and func is self._operator and not kwargs:
            return self._instead(*args)
        return func(*args, **(kwargs or {}))

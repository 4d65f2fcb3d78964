"""Operations that run in a form of our own, because of what they save.

Backward reads some tensors in a way that noise does not survive: the argument of ``gelu``, or the
messages whose variance an aggregation takes. In their place these forms save the derivative, or the
deviations from the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gact_graph.capture.derivatives import POSITION as DERIVATIVE
from gact_graph.capture.derivatives import pointwise
from gact_graph.capture.trace import Call, Trace
from gact_graph.capture.variance import POSITION as DEVIATION
from gact_graph.capture.variance import Variance, variance_of


class Replacements:
    """Finds what runs in place of an operation.

    Args:
        gets_noise: Whether a tensor that this operation saves would be quantized.
        keeps: Whether the user asks for no quantization of a slot.
    """

    def __init__(
        self, gets_noise: Callable[[Call, Tensor], bool], keeps: Callable[[str], bool]
    ) -> None:
        self._gets_noise = gets_noise
        self._keeps = keeps
        # The submodule that started last, and what it computes if it takes a variance.
        self._module: str | None = None
        self._variance: Variance | None = None

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A submodule starts."""
        self._module, self._variance = name, variance_of(module, args, kwargs)

    def clear(self) -> None:
        """Lets go of the messages of the last aggregation."""
        self._module = self._variance = None

    def of(self, call: Call, trace: Trace) -> Callable[[], Any] | None:
        """What to run in place of the operation, or None."""
        variance = self._variance
        if variance is not None and self._module == trace.module:
            found = variance.square_of_mean(call)
            if found is not None or not variance.is_square(call):
                return found
            label = self._label(call, variance.x, DEVIATION, trace)
            return None if label is None else functools.partial(variance.square, call, label)
        function = pointwise(call)
        if function is None:
            return None
        label = self._label(call, function.x, DERIVATIVE, trace)
        return None if label is None else functools.partial(function.run, label)

    def _label(self, call: Call, x: Tensor, position: str, trace: Trace) -> str | None:
        """The operation's label, if something else is to be saved in place of its argument."""
        if not self._gets_noise(call, x.detach()):
            return None
        label = trace.label(call)
        return None if call.of_loss or self._keeps(f"{label}.{position}") else label

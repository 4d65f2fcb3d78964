"""Operations that run in another form, because of the tensors that they save.

Noise is harmful in some of the tensors that backward reads: the argument of ``gelu``, or messages
whose variance an aggregation takes. These forms save the derivative instead, or the deviations from
the mean.
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
    """Finds the function that runs in place of an operation.

    Args:
        is_quantized: Whether a tensor would be quantized if this operation saved it.
        keeps: Whether the user requests no quantization of a slot.
    """

    def __init__(
        self, is_quantized: Callable[[Call, Tensor], bool], keeps: Callable[[str], bool]
    ) -> None:
        self._is_quantized = is_quantized
        self._keeps = keeps
        # The submodule that started last, and its variance if it computes one.
        self._module: str | None = None
        self._variance: Variance | None = None

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Enter a submodule."""
        self._module, self._variance = name, variance_of(module, args, kwargs)

    def clear(self) -> None:
        """Release the messages of the last aggregation."""
        self._module = self._variance = None

    def of(self, call: Call, trace: Trace) -> Callable[[], Any] | None:
        """Return the function to run in place of the operation, or None."""
        variance = self._variance
        if variance is not None and self._module == trace.module:
            if not variance.is_square(call):
                return variance.square_of_mean(call)
            label = self._label(call, variance.x, DEVIATION, trace)
            return None if label is None else functools.partial(variance.square, call, label)
        function = pointwise(call)
        if function is None:
            return None
        label = self._label(call, function.x, DERIVATIVE, trace)
        return None if label is None else functools.partial(function.run, label)

    def _label(self, call: Call, x: Tensor, position: str, trace: Trace) -> str | None:
        """Return the label of the operation if it is to save another tensor than its argument."""
        if not self._is_quantized(call, x.detach()):
            return None
        label = trace.label(call)
        return None if call.of_loss or self._keeps(f"{label}.{position}") else label

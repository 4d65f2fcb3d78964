r"""Weights of the rows of saved tensors: the effect of each row's noise on the gradient.

The gradient of a weight is a sum over rows, :math:`\sum_i x_i^T g_i`, so noise in row i counts as
much as :math:`\lVert g_i \rVert^2`, the square of the gradient that backward multiplies it with. In
a graph, these differ by orders of magnitude: nodes without a label get little gradient. They also
change during training, so each measured step moves the weights halfway, and no row weighs less than
a fixed part of the mean.

A weight is one byte a row and slot: its logarithm.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gact_graph.adaptive.state_checks import check_by_slot

LEAST_ROWS = 1000
"""Tensors of fewer rows have no weights: most of them have too few groups for several widths."""

_NEW = 0.5
"""The weight of a new measurement."""

_FLOOR = 0.3
"""A part of the mean that is added to each weight. Gradients that are small now may grow before the
next measurement: with less, bits follow them too closely; with more, not enough."""

_FINENESS = 8
"""Steps of the logarithm for a factor of 2."""


class RowWeights:
    """The weights of the rows of each slot, for a model that trains on the same rows each step.

    Rows are the entries of the first dimension.
    """

    def __init__(self) -> None:
        self._logarithms: dict[str, Tensor] = {}

    def of(self, slot: str, device: torch.device) -> Tensor | None:
        """Return the weights of a slot's rows, float32 [rows]; None before a measurement.

        The least possible weight is 1.
        """
        logarithms = self._logarithms.get(slot)
        if logarithms is None:
            return None
        self._logarithms[slot] = logarithms = logarithms.to(device)  # a loaded state is on the CPU
        return (logarithms.float() / _FINENESS).exp2_()

    def add(self, squares: Mapping[str, Tensor]) -> None:
        """Add the squared gradients of one step.

        Args:
            squares: Squared gradients of the rows of each slot, float32 [rows], not negative.
        """
        for slot, square in squares.items():
            mean = square.mean()
            if not 0 < float(mean) < math.inf:
                continue
            weights, old = square.div(mean * _FLOOR).add_(1), self.of(slot, square.device)
            if old is not None and old.shape == weights.shape:
                weights = old.lerp_(weights, _NEW)
            logarithms = weights.log2_().mul_(_FINENESS).round_().clamp_(0, 255)
            self._logarithms[slot] = logarithms.to(torch.uint8)

    def clear(self) -> None:
        """Forget all weights, as rows are other nodes now."""
        self._logarithms.clear()

    def state_dict(self) -> dict[str, str]:
        """Return the weights by slot, one byte a row, in base64."""
        contents = {slot: bytes(weights.tolist()) for slot, weights in self._logarithms.items()}
        return {slot: base64.b64encode(content).decode() for slot, content in contents.items()}

    @staticmethod
    def check_state(path: str, state: object) -> None:
        """Raise TypeError or ValueError unless :meth:`load_state_dict` accepts ``state``.

        Args:
            path: The name of the state in messages.
            state: Any object.
        """
        check_by_slot(path, state, _check_weights)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Load a state that :meth:`check_state` has accepted."""
        self._logarithms = {slot: _decoded(text) for slot, text in state.items()}


def _decoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _check_weights(path: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"Expected {path} to be a str (got {type(value).__name__})")
    try:
        _decoded(value)
    except ValueError as error:
        raise ValueError(f"Expected {path} to be bytes in base64 (got {error})") from None

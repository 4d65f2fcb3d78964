"""Dropout on a CPU, whose draws take PyTorch most of the time of the operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.capture.trace import Call
from gact_graph.ops.bernoulli import dropout_noise
from gact_graph.support.storage import is_plain

_LEAST = 1 << 12
"""The least number of elements: fewer are drawn sooner than the generator's state is copied."""


def dropout(call: Call) -> Callable[[], Tensor] | None:
    """Return a function to run in place of a dropout on a CPU; None for another operation.

    The result, the autograd node, the tensor that it saves and the generator's state are PyTorch's.
    """
    if call.func is not F.dropout and call.func is not torch.dropout:
        return None
    x, p = call.argument(0, "input"), call.argument(1, "p", default=0.5)
    if not isinstance(x, Tensor) or not is_plain(x) or not isinstance(p, float) or not 0 < p < 1:
        return None
    if x.device.type != "cpu" or not x.is_contiguous() or not x.is_floating_point():
        return None
    if x.numel() < _LEAST or not call.argument(2, "training", "train", default=True):
        return None

    def run() -> Tensor:
        noise = dropout_noise(x, p)
        if noise is None:
            result: Tensor = call.func(*call.args, **call.kwargs)
            return result
        return x.mul_(noise) if call.argument(3, "inplace") else x * noise

    return run

"""The operators with their tensors moved to a device and back: kernels of a GPU in any test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gact_graph.ops import cuda_edges

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


class OnDevice:
    """Takes and fills CPU tensors.

    Args:
        device: Where the operators run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            moved = [a.to(self._device) if isinstance(a, Tensor) else a for a in args]
            result = getattr(torch.ops.gact_graph, name)(*moved)
            for argument, there in zip(args, moved, strict=True):
                if isinstance(argument, Tensor):
                    argument.copy_(there)
            return result.cpu() if isinstance(result, Tensor) else result

        return call


def on_cuda() -> OnDevice:
    """The current GPU, whose kernels must be there: the reference would pass any test."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert cuda_edges.load(device) is not None
    return OnDevice(device)

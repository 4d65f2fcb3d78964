"""The kernels for sums and attention on CUDA devices, verified before their first use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gact_graph.ops import cuda
from gact_graph.ops.cuda_attention import EdgeKernels
from gact_graph.ops.kernels import nvrtc
from gact_graph.ops.kernels.once import once
from gact_graph.ops.reference import leaky_attention, weighted_sum
from gact_graph.ops.registration import implement_cuda


@once
def load(device: torch.device) -> EdgeKernels | None:
    """Return the kernels for a CUDA device, or None with one warning if they cannot be used."""
    if cuda.load(device) is None:  # after a warning
        return None
    kernels = EdgeKernels(nvrtc.launch)
    passed = cuda.passes(lambda: verify(kernels, device), "its CUDA kernels for edges")
    return kernels if passed else None


implement_cuda(lambda device: load(device), EdgeKernels)


def verify(kernels: EdgeKernels, device: torch.device) -> None:
    """Run the kernels on a small graph and compare with the reference. Waits for the device.

    Raises:
        RuntimeError: If the results differ from the reference's by more than rounding.
        Exception: If the driver raises it.
    """
    cpu = torch.device("cpu")

    def line(first: float, last: float, rows: int, columns: int) -> Tensor:
        values = torch.linspace(first, last, rows * columns, dtype=torch.float32, device=cpu)
        return values.view(rows, columns)

    # One row spans several segments, one has no edges.
    starts = torch.tensor([0, 3, 3, 903, 1000], device=cpu)
    places = torch.arange(1000, device=cpu) * 7 % 50
    weight_places = torch.arange(999, -1, -1, device=cpu)
    x, gradient, att = line(-1, 1, 50, 24), line(1, 2, 4, 24), line(-1, 1, 3, 8)
    weight = line(0, 1, 1000, 3)
    # Memory of an earlier check may hold the right sums already.
    of_x, of_weight, attended = (torch.full_like(x, math.nan) for x in (gradient, weight, weight))
    sums = of_x, of_weight, x, gradient, places, weight, weight_places, starts
    weights = attended, x, gradient, att, places, weight_places, starts, 0.2, 0.5, 7
    # Copied before the references write their results into the same tensors.
    moved_sums, moved_weights = _moved(sums, device), _moved(weights, device)
    weighted_sum.weighted_sum_backward(*sums)
    leaky_attention.leaky_attention(*weights)
    kernels.weighted_sum_backward(*moved_sums)
    kernels.leaky_attention(*moved_weights)
    pairs = (*moved_sums[:2], moved_weights[0]), (of_x, of_weight, attended)
    for actual, expected in zip(*pairs, strict=True):
        # Several times the rounding error of 900 additions in another order.
        atol = 1e-5 * float(expected.abs().max())
        if not torch.allclose(actual.cpu(), expected, rtol=1e-4, atol=atol):
            raise RuntimeError(f"Expected the sums of the reference from {device} (got others)")


def _moved(args: Iterable[Any], device: torch.device) -> list[Any]:
    return [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in args]

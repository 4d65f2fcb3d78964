"""The kernels for edges, sums and attention, for a CUDA device, tried out before they serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gact_graph.ops import cuda
from gact_graph.ops.cuda_attention import EdgeKernels
from gact_graph.ops.kernels import nvrtc
from gact_graph.ops.kernels.once import once
from gact_graph.ops.reference import leaky_attention as attention_reference
from gact_graph.ops.reference import weighted_sum as reference


def load(device: torch.device) -> EdgeKernels | None:
    """The kernels for a CUDA device, or None with one warning where there are none for it."""
    return _load(device)


@once
def _load(device: torch.device) -> EdgeKernels | None:
    if cuda.load(device) is None:  # which has said why
        return None
    kernels = EdgeKernels(nvrtc.launch)
    trial = cuda.serves(lambda: verify(kernels, device), "its CUDA kernels for edges")
    return kernels if trial else None


def verify(kernels: EdgeKernels, device: torch.device) -> None:
    """Runs the kernels on a small graph, for what compiles may yet not start, or not work.

    Waits for the device.

    Raises:
        RuntimeError: They did not give what the reference gives, up to the order of additions.
        Exception: Whatever the driver says.
    """
    cpu = torch.device("cpu")

    def line(first: float, last: float, rows: int, columns: int) -> Tensor:
        return torch.linspace(first, last, rows * columns, device=cpu).view(rows, columns)

    # A row of several segments, and one of none.
    starts = torch.tensor([0, 3, 3, 903, 1000], device=cpu)
    places = torch.arange(1000, device=cpu) * 7 % 50
    weight_places = torch.arange(999, -1, -1, device=cpu)
    x, gradient, att = line(-1, 1, 50, 24), line(1, 2, 4, 24), line(-1, 1, 3, 8)
    weight = line(0, 1, 1000, 3)
    of_x, of_weight = torch.empty_like(gradient), torch.empty_like(weight)
    attended = torch.empty_like(weight)
    sums = of_x, of_weight, x, gradient, places, weight, weight_places, starts
    attention = attended, x, gradient, att, places, weight_places, starts, 0.2, 0.5, 7
    # Before the reference writes its results into the same tensors.
    sums_found, attention_found = _moved(sums, device), _moved(attention, device)
    reference.weighted_sum_backward(*sums)
    attention_reference.leaky_attention(*attention)
    kernels.weighted_sum_backward(*sums_found)
    kernels.leaky_attention(*attention_found)
    pairs = (*sums_found[:2], attention_found[0]), (of_x, of_weight, attended)
    for found, expected in zip(*pairs, strict=True):
        # 900 additions, in another order: their rounding, several times over.
        atol = 1e-5 * float(expected.abs().max())
        if not torch.allclose(found.cpu(), expected, rtol=1e-4, atol=atol):
            raise RuntimeError(f"Expected the sums of the reference from {device} (got others)")


def _moved(given: Iterable[Any], device: torch.device) -> list[Any]:
    return [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in given]

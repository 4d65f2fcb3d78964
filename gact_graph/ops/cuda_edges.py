"""The kernels for edges, sums and attention, for a CUDA device, tried out before they serve."""

from __future__ import annotations

import torch

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
    starts = torch.tensor([0, 3, 3, 903, 1000])  # a row of several segments, and one of none
    places, weight_places = torch.arange(1000) * 7 % 50, torch.arange(1000).flip(0)
    x, weight = torch.linspace(-1, 1, 50 * 24).view(50, 24), torch.linspace(0, 1, 3000).view(-1, 3)
    gradient, of_x = torch.linspace(1, 2, 4 * 24).view(4, 24), torch.empty(4, 24)
    of_weight = torch.empty_like(weight)
    given = of_x, of_weight, x, gradient, places, weight, weight_places, starts
    on_device = [t.to(device, copy=True) for t in given]
    reference.weighted_sum_backward(*given)
    kernels.weighted_sum_backward(*on_device)
    att, attended = torch.linspace(-1, 1, 24).view(3, 8), torch.empty_like(weight)
    edges = x, gradient, att, places, weight_places, starts
    settings = 0.2, 0.5, 7
    attention_reference.leaky_attention(attended, *edges, *settings)
    attended_on_device = torch.empty_like(attended, device=device)
    edges_on_device = (
        *(x.to(device), gradient.to(device), att.to(device)),
        *(places.to(device), weight_places.to(device), starts.to(device)),
    )
    kernels.leaky_attention(attended_on_device, *edges_on_device, *settings)
    pairs = *zip(on_device[:2], given[:2], strict=True), (attended_on_device, attended)
    for found, expected in pairs:
        # 900 additions, in another order: their rounding, several times over.
        atol = 1e-5 * float(expected.abs().max())
        if not torch.allclose(found.cpu(), expected, rtol=1e-4, atol=atol):
            raise RuntimeError(f"Expected the sums of the reference from {device} (got others)")

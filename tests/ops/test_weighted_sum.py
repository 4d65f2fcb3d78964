"""Sums of weighted rows, and their gradients, against sums in float64; compiled and in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simt
import torch
from cpu_builds import BUILDS, build
from on_device import CUDA, on_cuda
from samples import seeded
from torch import Tensor

from gact_graph.ops.reference import weighted_sum as weighted_reference
from gact_graph.ops.weighted_sum import weighted_sum, weighted_sum_backward, weighted_sum_weights


@pytest.fixture(scope="module", params=["torch", *BUILDS, "cuda-source", CUDA])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return weighted_reference
    if request.param == "cuda-source":
        return simt.EDGE_KERNELS
    if request.param == "cuda":
        return on_cuda()
    return build(request.param)


class Sample:
    """Rows with many edges, one and none; their edges begin somewhere in the graph's.

    There are weights that no edge has, and each edge's weight lies anywhere among them. ``hub`` is
    the share of edges of one row.
    """

    def __init__(
        self, edges: int, width: int, heads: int, hub: float = 0.0, **kinds: torch.dtype
    ) -> None:
        generator, self.rows, self.nodes, self.heads = seeded(edges + width), 37, 50, heads
        real, index = kinds.get("real", torch.float32), kinds.get("index", torch.int64)
        owners = torch.randint(self.rows // 2, (edges,), generator=generator) * 2
        owners[: int(hub * edges)] = 20
        self.owners = owners.sort()[0]
        self.starts = torch.full((self.rows + 1,), 9)
        self.starts[1:] += torch.bincount(owners, minlength=self.rows).cumsum(0)
        self.places = torch.randint(self.nodes, (edges,), generator=generator).to(index)
        self.weight_places = torch.randperm(edges + 3, generator=generator)[:edges].to(index)
        self.x = torch.randn(self.nodes, width, generator=generator, dtype=real)
        self.weights = torch.randn(edges + 3, heads, generator=generator, dtype=real)
        self.weight = self.weights[self.weight_places.long()]
        self.gradient = torch.randn(self.rows, width, generator=generator, dtype=real)
        self.tolerance = {"rtol": 1e-5, "atol": 2e-4 if real == torch.float32 else 1e-11}

    def by_autograd(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums, and the gradients of weights and rows, in float64."""
        x, weight = (t.double().clone().requires_grad_() for t in (self.x, self.weight))
        rows = x[self.places.long()].unflatten(1, (self.heads, -1))
        messages = (rows * weight.unsqueeze(-1)).flatten(1)
        sums = torch.zeros(self.rows, x.size(1)).double().index_add(0, self.owners, messages)
        of_weight, of_x = torch.autograd.grad(sums, [weight, x], self.gradient.double())
        return sums.detach(), of_weight, of_x

    def backward_by_autograd(self) -> tuple[Tensor, Tensor]:
        """The gradients of rows and weights, where the rows are sources and places destinations."""
        x, weights = (t.double().clone().requires_grad_() for t in (self.gradient, self.weights))
        rows = x[self.owners].unflatten(1, (self.heads, -1))
        weight = weights[self.weight_places.long()]
        messages = (rows * weight.unsqueeze(-1)).flatten(1)
        sums = torch.zeros(self.nodes, x.size(1)).double()
        sums = sums.index_add(0, self.places.long(), messages)
        of_x, of_weight = torch.autograd.grad(sums, [x, weights], self.x.double())
        return of_x, of_weight


SAMPLES: dict[str, Sample] = {
    "heads": Sample(4000, 12, 3, index=torch.int32),
    "one head": Sample(700, 33, 1),
    "float64": Sample(2500, 192, 2, real=torch.float64),
    "a head a column": Sample(20_000, 4, 4, index=torch.int32),
    "no edges": Sample(0, 8, 2),
    "one column": Sample(3000, 1, 1),
    "eight heads": Sample(3000, 256, 8, index=torch.int32),
    "wide": Sample(1500, 256, 1, real=torch.float64, index=torch.int32),
    "three heads of a warp": Sample(3000, 192, 3, index=torch.int32),
    "one head of two vectors a lane": Sample(1500, 200, 1),
    "three heads of ten lanes": Sample(2000, 120, 3, index=torch.int32),
    "wider than a warp": Sample(1500, 640, 5),
    "heads of most lanes": Sample(1500, 192, 2, index=torch.int32),
    "a wide row of most edges": Sample(6000, 128, 1, hub=0.9),
    "heads of five": Sample(2500, 35, 7, real=torch.float64),
    "a row of most edges": Sample(9000, 24, 3, hub=0.9),
    "a row of all edges": Sample(5000, 16, 2, hub=1.0, index=torch.int32),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("gathered", [False, True])
def test_as_autograd_in_float64(sample: Sample, gathered: bool, kernels: Any) -> None:
    x, places = (sample.x[sample.places.long()], None) if gathered else (sample.x, sample.places)
    sums, of_weight, _ = sample.by_autograd()

    for weights in ((sample.weight, None), (sample.weights, sample.weight_places)):
        out = torch.full_like(sample.gradient, torch.nan)
        kernels.weighted_sum(out, x, places, *weights, sample.starts)
        assert torch.allclose(out.double(), sums, **sample.tolerance)
        assert not out[1::2].any()  # rows without edges

    got = kernels.weighted_sum_weights(sample.gradient, x, places, sample.starts, sample.heads)
    assert got.shape == sample.weight.shape and got.dtype == sample.x.dtype
    assert torch.allclose(got.double(), of_weight, **sample.tolerance)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_backward_as_autograd_in_float64(sample: Sample, kernels: Any) -> None:
    expected = sample.backward_by_autograd()
    of_x = torch.full_like(sample.gradient, torch.nan)
    of_weight = torch.zeros_like(sample.weights)
    edges = sample.places, sample.weights, sample.weight_places, sample.starts
    kernels.weighted_sum_backward(of_x, of_weight, sample.x, sample.gradient, *edges)
    for got, wanted in zip((of_x, of_weight), expected, strict=True):
        assert torch.allclose(got.double(), wanted, **sample.tolerance)
    assert not of_x[1::2].any()  # sources without edges


def test_the_gradient_of_rows_is_a_sum_by_source(kernels: Any) -> None:
    """The sums alone and the pass for both gradients agree to the last bit."""
    sample = SAMPLES["heads"]
    edges = sample.places, sample.weights, sample.weight_places, sample.starts
    alone, both = torch.empty_like(sample.gradient), torch.empty_like(sample.gradient)
    kernels.weighted_sum(alone, sample.x, *edges)
    of_weight = torch.zeros_like(sample.weights)
    kernels.weighted_sum_backward(both, of_weight, sample.x, sample.gradient, *edges)
    assert torch.equal(alone, both)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["heads", "a row of most edges"])
def test_threads_change_no_bit(threads: int, name: str) -> None:
    sample = SAMPLES[name]

    def run() -> list[Tensor]:
        out, of_x = torch.empty_like(sample.gradient), torch.empty_like(sample.gradient)
        of_weight = torch.zeros_like(sample.weights)
        edges = sample.places, sample.weights, sample.weight_places, sample.starts
        weighted_sum(out, sample.x, *edges)
        weighted_sum_backward(of_x, of_weight, sample.x, sample.gradient, *edges)
        arguments = sample.gradient, sample.x, sample.places, sample.starts, sample.heads
        return [out, of_x, of_weight, weighted_sum_weights(*arguments)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        torch.set_num_threads(threads)
        assert all(map(torch.equal, run(), expected))
    finally:
        torch.set_num_threads(before)


def _backward_of(sample: Sample) -> None:
    of_x, of_weight = torch.empty_like(sample.gradient), torch.empty_like(sample.weights)
    edges = sample.places, sample.weights, sample.weight_places, sample.starts
    weighted_sum_backward(of_x, of_weight, sample.x, sample.gradient, *edges)


def _sum_of(sample: Sample) -> None:
    edges = sample.places, sample.weights, sample.weight_places, sample.starts
    weighted_sum(torch.empty_like(sample.gradient), sample.x, *edges)


@pytest.mark.parametrize("of", [_sum_of, _backward_of])
@pytest.mark.parametrize("name", ["places", "weight_places"])
@pytest.mark.parametrize("beyond", [-1, 0])
def test_a_place_that_is_none_is_an_error(
    of: Callable[[Sample], None], name: str, beyond: int
) -> None:
    sample = Sample(700, 8, 1)
    most = {"places": 50, "weight_places": 703}[name]
    getattr(sample, name)[123] = -1 if beyond else most
    with pytest.raises(IndexError, match=f"Expected {name} from 0 to {most - 1}"):
        of(sample)

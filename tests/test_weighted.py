"""Sums of weighted rows, and their gradients, against sums in float64; compiled and in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import seeded
from torch import Tensor

from gact_graph.kernels import cpu, weighted_reference
from gact_graph.weighted import weighted_sum, weighted_sum_rows, weighted_sum_weights

_CAPABILITY = torch.backends.cpu.get_cpu_capability()
_BUILDS = {"AVX512": ("AVX512", "AVX2", "DEFAULT"), "AVX2": ("AVX2", "DEFAULT")}


@pytest.fixture(scope="module", params=["torch", *cpu.VECTOR_FLAGS])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return weighted_reference
    if request.param not in _BUILDS.get(_CAPABILITY, ("DEFAULT",)):
        pytest.skip(f"the processor has {_CAPABILITY}, not {request.param}")
    return cpu.build(cpu.VECTOR_FLAGS[request.param])


class Sample:
    """Rows with many arcs, one and none; their arcs begin somewhere in the graph's."""

    def __init__(self, arcs: int, width: int, heads: int, **kinds: torch.dtype) -> None:
        generator, self.rows, self.nodes, self.heads = seeded(arcs), 37, 50, heads
        real = kinds.get("real", torch.float32)
        owners = torch.randint(self.rows // 2, (arcs,), generator=generator).sort()[0] * 2
        self.owners = owners
        self.starts = torch.full((self.rows + 1,), 9)
        self.starts[1:] += torch.bincount(owners, minlength=self.rows).cumsum(0)
        self.places = torch.randint(self.nodes, (arcs,), generator=generator)
        self.places = self.places.to(kinds.get("index", torch.int64))
        self.x = torch.randn(self.nodes, width, generator=generator, dtype=real)
        self.weight = torch.randn(arcs, heads, generator=generator, dtype=real)
        self.gradient = torch.randn(self.rows, width, generator=generator, dtype=real)

    def by_autograd(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums, and the gradients of weights and rows, in float64."""
        x, weight = (t.double().requires_grad_() for t in (self.x, self.weight))
        rows = x[self.places.long()].unflatten(1, (self.heads, -1))
        messages = (rows * weight.unsqueeze(-1)).flatten(1)
        sums = torch.zeros(self.rows, x.size(1)).double().index_add(0, self.owners, messages)
        of_weight, of_x = torch.autograd.grad(sums, [weight, x], self.gradient.double())
        return sums.detach(), of_weight, of_x


SAMPLES = {
    "heads": Sample(4000, 12, 3, index=torch.int32),
    "one head": Sample(700, 33, 1),
    "float64": Sample(2500, 192, 2, real=torch.float64),
    "a head a column": Sample(20_000, 4, 4, index=torch.int32),
    "no arcs": Sample(0, 8, 2),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("gathered", [False, True])
def test_as_autograd_in_float64(sample: Sample, gathered: bool, kernels: Any) -> None:
    x, places = (sample.x[sample.places.long()], None) if gathered else (sample.x, sample.places)
    sums, of_weight, of_x = sample.by_autograd()
    tolerance = {"rtol": 1e-5, "atol": 1e-4 if sample.x.dtype == torch.float32 else 1e-11}

    out = torch.full_like(sample.gradient, torch.nan)
    kernels.weighted_sum(out, x, places, sample.weight, sample.starts)
    assert torch.allclose(out.double(), sums, **tolerance)
    assert not out[1::2].any()  # rows without arcs

    got = kernels.weighted_sum_weights(sample.gradient, x, places, sample.starts, sample.heads)
    assert got.shape == sample.weight.shape and got.dtype == sample.x.dtype
    assert torch.allclose(got.double(), of_weight, **tolerance)

    total = sample.x.clone()
    kernels.weighted_sum_rows(total, sample.gradient, sample.places, sample.weight, sample.starts)
    assert torch.allclose((total - sample.x).double(), of_x, **tolerance)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    sample = SAMPLES["heads"]

    def run() -> list[Tensor]:
        out, total = torch.empty_like(sample.gradient), torch.zeros_like(sample.x)
        arcs = sample.places, sample.weight, sample.starts
        weighted_sum(out, sample.x, *arcs)
        weighted_sum_rows(total, sample.gradient, *arcs)
        given = sample.gradient, sample.x, sample.places, sample.starts, sample.heads
        return [out, total, weighted_sum_weights(*given)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        torch.set_num_threads(threads)
        assert all(map(torch.equal, run(), expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("place", [-1, 50])
def test_a_place_that_is_none_is_an_error(place: int) -> None:
    sample = Sample(700, 8, 1)
    sample.places[123] = place
    out = torch.empty_like(sample.gradient)
    with pytest.raises(IndexError):
        weighted_sum(out, sample.x, sample.places, sample.weight, sample.starts)

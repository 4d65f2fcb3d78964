"""Attention weights and their gradients, against plain torch in float64; compiled and in torch."""

from __future__ import annotations

import copy
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import simt
import torch
import torch.nn.functional as F
from cpu_builds import BUILDS, build
from on_device import CUDA, on_cuda
from samples import seeded
from torch import Tensor

from gact_graph.ops import attention, dot_attention, leaky_attention, weighted_sum
from gact_graph.ops.reference import attention as attention_reference
from gact_graph.ops.reference import dot_attention as dot_reference
from gact_graph.ops.reference import leaky_attention as leaky_reference
from gact_graph.ops.reference import weighted_sum as weighted_reference


def _both(*modules: ModuleType) -> SimpleNamespace:
    return SimpleNamespace(**{name: f for module in modules for name, f in vars(module).items()})


public = _both(attention, leaky_attention, dot_attention, weighted_sum)
reference = _both(attention_reference, leaky_reference, dot_reference, weighted_reference)


@pytest.fixture(scope="module", params=["torch", *BUILDS, "cuda-source", CUDA])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return reference
    if request.param == "cuda-source":
        return simt.EDGE_KERNELS
    if request.param == "cuda":
        return on_cuda()
    return build(request.param)


class Sample:
    """Destinations with many edges, one and none, some edges twice; scores of both signs."""

    def __init__(
        self, edges: int, heads: int, large: float = 1.0, each: int = 1, **kinds: torch.dtype
    ) -> None:
        generator, self.rows, self.nodes = seeded(edges + heads), 37, 50
        width = heads * each
        real, index = kinds.get("real", torch.float32), kinds.get("index", torch.int64)
        self.owners = torch.randint(self.rows // 2, (edges,), generator=generator).sort()[0] * 2
        self.starts = torch.full((self.rows + 1,), 9)
        self.starts[1:] += torch.bincount(self.owners, minlength=self.rows).cumsum(0)
        places = torch.randint(self.nodes, (edges,), generator=generator)
        places[1::7] = places[:-1:7]
        self.places = places.to(index)
        self.weight_places = torch.randperm(edges + 3, generator=generator)[:edges].to(index)
        self.source = torch.randn(self.nodes, width, generator=generator).to(real) * large
        self.destination = torch.randn(self.rows, width, generator=generator).to(real) * large
        self.att = torch.randn(heads, each, generator=generator).to(real)
        self.terms: Tensor | None = None
        self.gradient = torch.randn(edges + 3, heads, generator=generator).to(real)
        self.tolerance = {"rtol": 1e-5, "atol": 2e-6 if real == torch.float32 else 1e-13}

    @property
    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.places, self.weight_places, self.starts

    def forward(self, kernels: Any, dropout: float = 0.0, seed: int = 0) -> Tensor:
        out = torch.full_like(self.gradient, torch.nan)
        settings = 0.2, dropout, seed
        kernels.attention(out, self.source, self.destination, self.terms, *self.edges, *settings)
        return out[self.weight_places.long()]

    def backward(self, kernels: Any, dropout: float = 0.0, seed: int = 0) -> tuple[Tensor, ...]:
        """The gradients of :attr:`inputs`."""
        of_score = torch.full_like(self.gradient, torch.nan)
        of_destination = torch.full_like(self.destination, torch.nan)
        ends, settings = (self.source, self.destination), (0.2, dropout, seed)
        arguments = self.gradient, *ends, self.terms, *self.edges, *settings
        kernels.attention_backward(of_score, of_destination, *arguments)
        by_source, starts = self.by_source
        of_source = torch.full_like(self.source, torch.nan)
        kernels.segment_sum(of_source, of_score, self.weight_places[by_source], starts)
        if self.terms is None:
            return of_source, of_destination
        return of_source, of_destination, of_score[self.weight_places.long()]

    @property
    def by_source(self) -> tuple[Tensor, Tensor]:
        """The edges sorted by source, and the first of each."""
        starts = torch.zeros(self.nodes + 1, dtype=torch.int64)
        starts[1:] = torch.bincount(self.places, minlength=self.nodes).cumsum(0)
        return self.places.argsort(stable=True), starts

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors with a gradient."""
        return self.source, self.destination

    def score(self, source: Tensor, destination: Tensor) -> Tensor:
        """The scores of edges, from the rows at their ends."""
        return F.leaky_relu(source + destination, 0.2)

    def by_autograd(self, kept: Tensor | float = 1.0) -> tuple[Tensor, ...]:
        """The weights and the same gradients, in float64."""
        inputs = [t.double().clone().requires_grad_() for t in self.inputs]
        source, destination, *others = inputs
        score = self.score(source[self.places.long()], destination[self.owners], *others)
        weight = score * 0
        for row in self.owners.unique():
            of_row = self.owners == row
            weight = torch.where(of_row[:, None], _softmax_of(score, of_row), weight)
        weight = weight * kept
        gradient = self.gradient.double()[self.weight_places.long()]
        actual = torch.autograd.grad(weight, inputs, gradient)
        return weight.detach(), *actual


class TermSample(Sample):
    """The same with a score of each edge."""

    def __init__(self, edges: int, heads: int, *args: Any, **kinds: Any) -> None:
        super().__init__(edges, heads, *args, **kinds)
        generator = seeded(edges)
        self.terms = torch.randn(self.gradient.shape, generator=generator).to(self.source.dtype)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        assert self.terms is not None
        return self.source, self.destination, self.terms[self.weight_places.long()]

    def score(self, source: Tensor, destination: Tensor, *others: Tensor) -> Tensor:
        (terms,) = others
        return F.leaky_relu(source + destination + terms, 0.2)


class RowSample(Sample):
    """The same with rows of several channels for each head, weighed by a vector."""

    def forward(self, kernels: Any, dropout: float = 0.0, seed: int = 0) -> Tensor:
        out = torch.full_like(self.gradient, torch.nan)
        arguments = self.source, self.destination, self.att, *self.edges, 0.2, dropout, seed
        kernels.leaky_attention(out, *arguments)
        return out[self.weight_places.long()]

    def backward(self, kernels: Any, dropout: float = 0.0, seed: int = 0) -> tuple[Tensor, ...]:
        of_score, of_source, of_destination, of_att = (
            torch.full_like(t, torch.nan)
            for t in (self.gradient, self.source, self.destination, self.att)
        )
        rows = self.source, self.destination, self.att
        arguments = self.gradient, *rows, *self.edges, 0.2, dropout, seed
        kernels.leaky_attention_backward(of_score, of_destination, of_att, *arguments)
        by_source, starts = self.by_source
        edges = self.owners.to(self.places.dtype)[by_source], self.weight_places[by_source], starts
        kernels.leaky_attention_source(of_source, of_score, *rows, *edges, 0.2)
        return of_source, of_destination, of_att

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.source, self.destination, self.att

    def score(self, source: Tensor, destination: Tensor, *others: Tensor) -> Tensor:
        (att,) = others
        return (F.leaky_relu(source + destination, 0.2).view(-1, *att.shape) * att).sum(-1)


class DotSample(Sample):
    """The same rows, whose scores are scaled dot products."""

    def forward(self, kernels: Any, dropout: float = 0.0, seed: int = 0) -> Tensor:
        out = self._weights(kernels)
        kernels.drop_weights(out, dropout, seed)
        return out[self.weight_places.long()]

    def backward(self, kernels: Any, dropout: float = 0.0, seed: int = 0) -> tuple[Tensor, ...]:
        of_score, (_, at, starts) = self.gradient.clone(), self.edges
        kernels.drop_weights(of_score, dropout, seed)
        kernels.dot_attention_backward(of_score, self._weights(kernels), at, starts, 0.4)
        of_source = torch.full_like(self.source, torch.nan)
        of_destination = torch.full_like(self.destination, torch.nan)
        kernels.weighted_sum(of_destination, self.source, self.places, of_score, at, starts)
        by_source, starts = self.by_source
        owners = self.owners.to(self.places.dtype)[by_source]
        arguments = self.destination, owners, of_score, at[by_source], starts
        kernels.weighted_sum(of_source, *arguments)
        if self.terms is None:
            return of_source, of_destination
        return of_source, of_destination, of_score[at.long()]

    def _weights(self, kernels: Any) -> Tensor:
        out = torch.full_like(self.gradient, torch.nan)
        kernels.dot_attention(out, self.source, self.destination, self.terms, *self.edges, 0.4)
        return out

    def score(self, source: Tensor, destination: Tensor, *others: Tensor) -> Tensor:
        heads = self.gradient.size(1)
        product = (source * destination).view(len(source), heads, source.size(1) // heads)
        return (product.sum(-1) + sum(others)) * 0.4


class DotTermSample(DotSample):
    """The same with a term of each edge in the dot product."""

    def __init__(self, edges: int, heads: int, *args: Any, **kinds: Any) -> None:
        super().__init__(edges, heads, *args, **kinds)
        terms = torch.randn(edges, heads, generator=seeded(edges))
        self.terms = terms.to(self.source.dtype)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        assert self.terms is not None
        return self.source, self.destination, self.terms


def _softmax_of(score: Tensor, chosen: Tensor) -> Tensor:
    return score.masked_fill(~chosen[:, None], -torch.inf).softmax(0)


SAMPLES: dict[str, Sample] = {
    "heads": Sample(1500, 3, index=torch.int32),
    "one head": Sample(700, 1),
    "eight heads": Sample(1200, 8, real=torch.float64),
    "large scores": Sample(900, 4, large=300.0, real=torch.float64, index=torch.int32),
    "no edges": Sample(0, 2),
    "terms": TermSample(1500, 3, index=torch.int32),
    "terms, one head": TermSample(700, 1),
    "terms, eight heads": TermSample(1200, 8, real=torch.float64),
    "terms, no edges": TermSample(0, 2),
    "rows": RowSample(1500, 3, each=20, index=torch.int32),
    "rows, one head": RowSample(700, 1, each=64),
    "rows of one": RowSample(1200, 8, each=1, real=torch.float64),
    "large rows": RowSample(900, 4, large=30.0, each=17, real=torch.float64, index=torch.int32),
    "rows, no edges": RowSample(0, 2, each=3),
    "products": DotSample(1500, 3, each=5, index=torch.int32),
    "products, one head": DotSample(700, 1, each=64),
    "large products": DotSample(900, 4, large=9.0, each=17, real=torch.float64),
    "products, terms": DotTermSample(1500, 3, each=5, index=torch.int32),
    "products, terms, eight heads": DotTermSample(900, 8, each=4, real=torch.float64),
    "products, no edges": DotSample(0, 2, each=3),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_as_autograd_in_float64(sample: Sample, kernels: Any) -> None:
    weight, *gradients = sample.by_autograd()
    assert torch.allclose(sample.forward(kernels).double(), weight, **sample.tolerance)
    for got, expected in zip(sample.backward(kernels), gradients, strict=True):
        assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", [Sample, TermSample, RowSample, DotSample, DotTermSample])
def test_dropout_is_the_same_in_backward(kind: Any, dropout: float, kernels: Any) -> None:
    sample = kind(1200, 3, each=1 if kind in (Sample, TermSample) else 5, real=torch.float64)
    without = sample.forward(kernels)
    for seed in (0, 2**63 - 1):
        got = sample.forward(kernels, dropout, seed)
        kept = got / without
        assert torch.equal(kept != 0, torch.isclose(kept, kept.max()))
        assert kept.max() == pytest.approx(1 / (1 - dropout), rel=1e-3)
        _, *gradients = sample.by_autograd(kept)
        for actual, expected in zip(
            sample.backward(kernels, dropout, seed), gradients, strict=True
        ):
            assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["heads", "terms", "rows", "products", "products, terms"])
def test_backends_drop_the_same_weights(name: str) -> None:
    sample = SAMPLES[name]
    for seed in (3, 2**40):
        expected = sample.forward(reference, 0.3, seed)
        assert torch.allclose(sample.forward(public, 0.3, seed), expected, rtol=1e-5)
        assert torch.equal(sample.forward(public, 0.3, seed) == 0, expected == 0)


def test_dropout_changes_nothing_on_average() -> None:
    """Over 2000 seeds the mean of a weight of p = 0.5 has a deviation of 2.2 %."""
    sample = Sample(300, 2, real=torch.float64)
    without = sample.forward(public)
    mean = torch.stack([sample.forward(public, 0.5, seed) for seed in range(2000)]).mean(0)
    error = mean / without - 1
    assert error.abs().max() < 5 * 0.0224
    assert error.mean().abs() < 4 * 0.0224 / error.numel() ** 0.5


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("kind", [Sample, TermSample, RowSample, DotSample, DotTermSample])
def test_threads_change_no_bit(kind: Any, threads: int) -> None:
    sample = kind(20_000, 3, each=1 if kind in (Sample, TermSample) else 9, index=torch.int32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [sample.forward(public, 0.2, 5), *sample.backward(public, 0.2, 5)]
        torch.set_num_threads(threads)
        got = [sample.forward(public, 0.2, 5), *sample.backward(public, 0.2, 5)]
        assert all(map(torch.equal, got, expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [Sample, TermSample, RowSample, DotSample, DotTermSample])
def test_nan_stays_in_its_row(kind: Any, kernels: Any) -> None:
    sample = kind(700, 2)
    sample.destination[4] = torch.nan
    got = sample.forward(kernels)
    assert got[sample.owners == 4].isnan().all() and got[sample.owners != 4].isfinite().all()


@pytest.mark.parametrize("name", ["heads", "terms", "rows", "products", "products, terms"])
def test_weights_in_the_order_of_edges_need_no_places(name: str, kernels: Any) -> None:
    sample = copy.copy(SAMPLES[name])
    edges = len(sample.places)
    sample.weight_places = torch.arange(edges).to(sample.places.dtype)
    sample.gradient = sample.gradient[:edges].contiguous()
    if sample.terms is not None:
        sample.terms = sample.terms[:edges].contiguous()

    class Without:
        def __getattr__(self, operator: str) -> Any:
            def call(*args: Any) -> Any:
                given = (None if a is sample.weight_places else a for a in args)
                return getattr(kernels, operator)(*given)

            return call

    expected = sample.forward(kernels, 0.3, 7), *sample.backward(kernels, 0.3, 7)
    actual = sample.forward(Without(), 0.3, 7), *sample.backward(Without(), 0.3, 7)
    assert all(map(torch.equal, actual, expected))

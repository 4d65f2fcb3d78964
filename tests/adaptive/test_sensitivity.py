"""Sensitivities of all slots in one backward: against Algorithm 1, which runs a step for each."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from samples import (  # noqa: F401
    FEATURES,
    GraphNet,
    Mlp,
    draws,
    graph,
    labels,
    make,
    one_thread,
    train_step,
)
from torch import nn

import gact_graph
from experiments.helpers.noise import algorithm_1
from gact_graph.adaptive import sensitivity
from gact_graph.adaptive.allocator import noise
from gact_graph.adaptive.sensitivity import _is_alone

X, EDGES = graph()


def measured(net, bits, *inputs, seed=0, **options):
    """The sensitivities that the first step of an adaptive model finds, and its scheme."""
    model = gact_graph.wrap(make(net), bits=bits, seed=seed, min_bytes=0, **options)
    train_step(model, *inputs, seed=3)
    scheme = gact_graph.state_dict(model)["scheme"]
    return scheme["sensitivities"], scheme


def ratios(net, bits, *inputs, sweeps=8, **options):
    """By slot: sensitivities over those of Algorithm 1, means over as many draws, and the share of
    the noise that the slot makes."""
    fixed = gact_graph.wrap(make(net), bits=bits, adaptive=False, min_bytes=0, **options)
    draw = draws(fixed, *inputs)
    draw()
    rows = gact_graph.report(fixed).contexts
    widths = {row.slot: row.bits for row in rows if row.bits is not None}
    expected, sensitivities = dict.fromkeys(widths, 0.0), dict.fromkeys(widths, 0.0)
    for number in range(sweeps):
        draw.number = number
        sweep = algorithm_1(widths, widths.__getitem__, draw)
        new, _ = measured(net, bits, *inputs, seed=number, **options)
        for slot in widths:
            expected[slot] += sweep[slot]
            sensitivities[slot] += new.get(slot, 0.0)
    largest = max(c * noise(widths[slot]) for slot, c in expected.items())
    return {
        slot: (sensitivities[slot] / c, c * noise(widths[slot]) / largest)
        for slot, c in expected.items()
        if c and widths[slot] < 12
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gcn", {}),
        pytest.param("gcn", {"blocks": 500}, marks=pytest.mark.long),
        pytest.param("gat", {}, marks=pytest.mark.long),
        ("gat", {"blocks": 500}),
        pytest.param("sage", {}, marks=pytest.mark.long),
        pytest.param("gin", {}, marks=pytest.mark.long),
        ("gat", {"level": "CB2"}),
    ],
)
def test_agrees_with_algorithm_1(kind, options):
    """Within a factor of four for each slot that counts: an allocation moves by a bit for that."""
    ratio_of = ratios(lambda: GraphNet(kind), 6, X, EDGES, **options)
    counting = {slot: ratio for slot, (ratio, share) in ratio_of.items() if share > 0.01}
    assert len(counting) > 1
    assert all(0.25 < ratio < 4 for ratio in counting.values()), counting


def test_errors_that_go_together_in_a_channel():
    """Batch norm spreads them in proportion to the channel: by single elements, the sensitivity of
    the second norm's input was 20 times too small."""

    def net():
        layers, width = [], 1
        for out in (16, 32, 32):
            layers += [nn.Conv2d(width, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))

    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images += torch.linspace(-1, 1, 64).view(64, 1, 1, 1)
    ratio_of = ratios(net, 4, images, sweeps=6)
    for slot in ("1/batch_norm.input", "4/batch_norm.input", "7/batch_norm.input"):
        assert 0.25 < ratio_of[slot][0] < 4, (slot, ratio_of[slot])


class Scored(nn.Module):
    """Each row is multiplied by a score, the product of one vector and features that are alike in
    all rows."""

    def __init__(self, direction):
        super().__init__()
        self.lin, self.attention = nn.Linear(FEATURES, 64), nn.Parameter(torch.ones(64))
        self.register_buffer("features", direction + 0.01 * torch.randn(len(X), 64))

    def forward(self, x):
        score = (self.features * self.attention).sum(1, keepdim=True)
        return (self.lin(x).detach().roll(1) * score)[:, :5]


def test_a_vector_of_attention():
    for seed in range(4):
        generator = torch.Generator().manual_seed(100 + seed)
        signs = torch.randint(2, (64,), generator=generator) * 2.0 - 1
        ratio, _ = ratios(lambda signs=signs: Scored(signs), 4, X)["mul#2.input"]
        assert 0.25 < ratio < 4


class FewErrors(nn.Module):
    """Only five elements of the product count, so that the error is in five elements."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 64), nn.Linear(64, 64)
        self.register_buffer("factors", torch.randn(len(X), 64))

    def forward(self, x):
        return (self.second(self.first(x)) * (2 * self.factors))[:1, :5]


def test_errors_in_few_elements():
    ratio, _ = ratios(FewErrors, 4, X, sweeps=12)["mul.other"]
    assert 0.25 < ratio < 4


def test_the_error_is_that_of_the_gradient():
    errors, expected = [], []
    exact = make(lambda: GraphNet("gat"))
    exact = torch.cat([g.flatten() for g in train_step(exact, X, EDGES, seed=3)])
    for seed in range(4):
        _, scheme = measured(lambda: GraphNet("gat"), 3, X, EDGES, seed=seed)
        errors.append(scheme["gradient_error"])
        fixed = gact_graph.wrap(
            make(lambda: GraphNet("gat")), bits=3, adaptive=False, min_bytes=0, seed=seed
        )
        gradient = torch.cat([g.flatten() for g in train_step(fixed, X, EDGES, seed=3)])
        expected.append(((gradient - exact).norm() / exact.norm()).item())
    assert sum(errors) == pytest.approx(sum(expected), rel=0.2)


def test_errors_of_large_tensors_are_as_precise(monkeypatch):
    """They wait in a shorter form; in a softmax, they cancel."""
    expected, _ = measured(lambda: GraphNet("gat"), 4, X, EDGES)
    monkeypatch.setattr(sensitivity, "_MANY", 1)
    found, _ = measured(lambda: GraphNet("gat"), 4, X, EDGES)
    assert {*found} == {*expected}
    for slot, value in expected.items():
        assert found[slot] == pytest.approx(value, rel=0.02), slot


class Biased(nn.Module):
    """Squares under a square root: noise gives the gradient a bias too."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 64), nn.Linear(64, 7)

    def forward(self, x):
        h = self.first(x).roll(1)  # no operation that is computed again
        return self.second(h * h / (h * h).sum(1, keepdim=True))


def test_the_sum_over_slots_predicts_the_error():
    sensitivities, scheme = measured(Biased, 6, X)
    shares = [c * noise(6) for c in sensitivities.values()]
    assert scheme["excess"] < 2.25
    assert 0.5 < sum(shares) ** 0.5 / scheme["gradient_error"] < 1.5


def test_a_gradient_that_is_not_finite_is_no_measurement():
    class Blowing(Mlp):
        def forward(self, x):
            return super().forward(x) * float("inf")

    sensitivities, scheme = measured(Blowing, 4, X)
    assert sensitivities == {} and scheme["gradient_error"] is None


def test_a_slot_that_reaches_no_parameter_counts_nothing():
    class Aside(Mlp):
        def forward(self, x):
            h = self.first(x).cumsum(0)  # no operation that is computed again
            self.unused = (h * self.first.bias).sum()
            return super().forward(x)

    sensitivities, scheme = measured(Aside, 4, X)
    assert sensitivities.pop("mul.input") == 0 < min(sensitivities.values())
    assert scheme["bits"]


class Twice(torch.autograd.Function):
    """A function of the user's: its backward counts."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.variable = 3  # nodes of leaves have an attribute of this name
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        Twice.calls += 1
        return 2 * gradient * ctx.saved_tensors[0]


class WithTwice(Mlp):
    def forward(self, x):
        return self.last(Twice.apply(self.second(self.first(x).tanh())))


def test_a_function_of_the_user_runs_backward_once():
    Twice.calls = 0
    sensitivities, _ = measured(WithTwice, 4, X)
    assert Twice.calls == 1
    assert min(sensitivities.values()) > 0


def test_hooks_of_the_user_run_once():
    calls = []

    class Hooked(Mlp):
        def forward(self, x):
            h = self.first(x)
            h.register_hook(lambda gradient: calls.append("tensor"))
            return self.last(h.tanh())

    model = gact_graph.wrap(make(Hooked), min_bytes=0)
    model.last.register_full_backward_hook(lambda *arguments: calls.append("module"))
    model.first.weight.register_hook(lambda gradient: calls.append("parameter"))
    train_step(model, X)
    assert gact_graph.report(model).measurements == 1
    assert sorted(calls) == ["module", "parameter", "tensor"]


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_the_step_that_is_measured_has_a_gradient_with_less_noise(kind):
    exact = train_step(make(lambda: GraphNet(kind)), X, EDGES)
    errors = []
    for adaptive in (True, False):
        model = gact_graph.wrap(
            make(lambda: GraphNet(kind)), bits=3, min_bytes=0, adaptive=adaptive
        )
        gradient = train_step(model, X, EDGES)
        errors.append(
            sum((a - b).square().sum().item() for a, b in zip(gradient, exact, strict=True))
        )
    assert errors[0] < errors[1]


@pytest.mark.parametrize("runs_backward", [True, False])
def test_nothing_outlives_the_graph(runs_backward):
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), min_bytes=0)
    out = model(X, EDGES)
    adaptation = model.forward.controller.methods["forward"].adaptation
    measurement = adaptation._measuring
    assert measurement() is not None
    if runs_backward:
        out.sum().backward()
    gc.disable()
    try:
        del out
        assert measurement() is None
    finally:
        gc.enable()


def test_backward_twice_is_measured_once():
    model = gact_graph.wrap(make(Mlp), min_bytes=0)
    loss = model(X).square().mean()
    loss.backward(retain_graph=True)
    first = gact_graph.state_dict(model)
    loss.backward()
    assert gact_graph.state_dict(model) == first
    assert gact_graph.report(model).measurements == 1


def test_backward_to_some_parameters_alone():
    model = gact_graph.wrap(make(Mlp), min_bytes=0)
    loss = F.cross_entropy(model(X), labels())
    torch.autograd.grad(loss, [model.last.weight])
    assert gact_graph.report(model).measurements == 1


class TestResultsInPlace:
    """Results of a node that is run again, which a measurement may overwrite."""

    def test_a_new_tensor(self):
        assert _is_alone(torch.randn(4) * 2, [torch.randn(4)])

    def test_the_incoming_gradient(self):
        gradient = torch.randn(4) * 2
        assert not _is_alone(gradient, [gradient])
        assert not _is_alone(gradient.view(2, 2), [gradient])

    def test_memory_that_another_tensor_shows(self):
        whole = torch.randn(8)
        part = whole[2:6]
        assert not _is_alone(part, [])
        assert not _is_alone(whole, [])

    def test_a_tensor_that_autograd_has_saved(self):
        x = torch.randn(4, requires_grad=True)
        result = x.exp()
        following = result.square()
        assert not _is_alone(result, [])
        del following
        assert not _is_alone(result, [])  # its own node saves it, too

    def test_a_tensor_that_is_not_dense(self):
        assert not _is_alone(torch.eye(4).to_sparse(), [])

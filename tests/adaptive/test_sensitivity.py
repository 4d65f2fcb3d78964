"""Sensitivities of all slots at once: against Algorithm 1, which takes a pass for each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from samples import FEATURES, GraphNet, Mlp, graph, labels, make, one_thread, replayer  # noqa: F401
from torch import nn

import gact_graph
from experiments.helpers.algorithm_1 import algorithm_1
from gact_graph.adaptive.allocator import noise
from gact_graph.adaptive.replay import Recording
from gact_graph.adaptive.sensitivity import Measurement

X, EDGES = graph()


def recorded(model, *args):
    torch.manual_seed(3)
    recording = Recording(model, args, {})
    out = model(*args)
    recording.watch(out)
    F.cross_entropy(out, labels(len(out))).backward()
    return recording


def measured(model, recording, seed=0):
    bits = {r.slot: r.bits for r in gact_graph.report(model).contexts if r.bits is not None}
    measurement = Measurement(recording, model.forward.controller.replay, seed)
    measurement.run_moved(model.forward.original)
    return measurement.run_as_it_was(model.forward.original), bits


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gcn", {}),
        ("gcn", {"blocks": 500}),
        ("gat", {}),
        ("gat", {"blocks": 500}),
        ("sage", {}),
        ("gin", {}),
        ("gat", {"level": "CB1"}),
        ("gat", {"level": "CB2"}),
    ],
)
def test_agrees_with_algorithm_1(kind, options):
    """Within a factor of four for each slot that counts: an allocation moves by a bit for that."""
    model = gact_graph.wrap(make(lambda: GraphNet(kind)), bits=6, adaptive=False, **options)
    recording = recorded(model, X, EDGES)
    found, bits = measured(model, recording)
    controller, sweeps = model.forward.controller, []
    for number in range(10):
        controller.forwards = number
        sweeps.append(algorithm_1(bits, bits.__getitem__, replayer(model, recording)))
    expected = {slot: sum(sweep[slot] for sweep in sweeps) / len(sweeps) for slot in bits}
    largest = max(c * noise(bits[slot]) for slot, c in expected.items())
    counting = [s for s, c in expected.items() if c * noise(bits[s]) > 0.01 * largest]
    assert len(counting) > 1
    for slot in counting:
        if bits[slot] < 12:
            assert 0.25 < found.sensitivities[slot] / expected[slot] < 4, slot


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
    model = gact_graph.wrap(make(net), bits=4, adaptive=False, min_bytes=0)
    recording = recorded(model, images)
    found, bits = measured(model, recording)
    controller, sweeps = model.forward.controller, []
    for number in range(6):
        controller.forwards = number
        sweeps.append(algorithm_1(bits, bits.__getitem__, replayer(model, recording)))
    for slot in ("4/batch_norm.input", "7/batch_norm.input", "6/conv2d.input"):
        expected = sum(sweep[slot] for sweep in sweeps) / len(sweeps)
        assert 0.25 < found.sensitivities[slot] / expected < 4, slot


class Scored(nn.Module):
    """Each row is multiplied by a score, the product of one vector and features that are alike in
    all rows."""

    def __init__(self, direction):
        super().__init__()
        self.lin, self.attention = nn.Linear(FEATURES, 64), nn.Parameter(torch.ones(64))
        self.register_buffer("features", direction + 0.01 * torch.randn(len(X), 64))

    def forward(self, x):
        score = (self.features * self.attention).sum(1, keepdim=True)
        return (self.lin(x).detach() * score)[:, :5]


def test_a_vector_of_attention_counts_whatever_signs_it_is_moved_by():
    """The score's tangent is the sum of 64 signs. By that alone, the sensitivity was 10,000 times
    too small for two of these directions."""
    ratios = []
    for seed in range(16):
        signs = (
            torch.randint(2, (64,), generator=torch.Generator().manual_seed(100 + seed)) * 2.0 - 1
        )
        model = make(lambda signs=signs: Scored(signs))
        model = gact_graph.wrap(model, bits=4, adaptive=False, min_bytes=0)
        recording = recorded(model, X)
        controller, found, expected = model.forward.controller, 0.0, 0.0
        [slot] = [s for s in measured(model, recording)[1] if s == "mul#2.input"]
        for number in range(8):
            controller.forwards = number
            sensitivities, bits = measured(model, recording)
            found += sensitivities.sensitivities[slot]
            expected += algorithm_1([slot], bits.__getitem__, replayer(model, recording))[slot]
        ratios.append(found / expected)
    assert min(ratios) > 0.1, ratios


class FewErrors(nn.Module):
    """Only five elements of what is multiplied count, so that the error is in five elements."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 64), nn.Linear(64, 64)
        self.register_buffer("factors", torch.randn(len(X), 64))

    def forward(self, x):
        return (self.second(self.first(x)) * (2 * self.factors))[:1, :5]


def test_errors_in_few_elements_count_alike_whatever_signs_parameters_are_moved_by():
    """By the tangents of single elements, these were 30 times apart."""
    model = gact_graph.wrap(make(FewErrors), bits=4, adaptive=False, min_bytes=0)
    recording = recorded(model, X)
    controller, found, expected = model.forward.controller, [], []
    slot = "mul.other"
    for seed in range(12):
        controller.forwards = 0
        sensitivities, bits = measured(model, recording, seed)
        found.append(sensitivities.sensitivities[slot])
        controller.forwards = seed
        expected.append(algorithm_1([slot], bits.__getitem__, replayer(model, recording))[slot])
    assert max(found) < 5 * min(found), found
    assert 0.25 < sum(found) / sum(expected) < 4


def test_the_error_is_that_of_the_gradient():
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), bits=3, adaptive=False)
    recording = recorded(model, X, EDGES)
    found, _ = measured(model, recording)

    def flat(model):
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = make(lambda: GraphNet("gat"))
    torch.manual_seed(3)
    F.cross_entropy(exact(X, EDGES), labels(len(X))).backward()
    expected = (flat(model) - flat(exact)).norm() / flat(exact).norm()
    assert found.error == pytest.approx(expected.item(), rel=0.3)


class Biased(nn.Module):
    """Squares under a square root: what the noise does to the gradient is no variance alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 64), nn.Linear(64, 7)

    def forward(self, x):
        h = self.first(x)
        return self.second(h * h / (h * h).sum(1, keepdim=True))


def test_the_sum_over_slots_predicts_the_error():
    model = gact_graph.wrap(make(Biased), bits=6, adaptive=False)
    found, bits = measured(model, recorded(model, X))
    assert found.explained == pytest.approx(found.error, rel=0.5)
    shares = [c * noise(bits[slot]) for slot, c in found.sensitivities.items()]
    assert found.explained**2 == pytest.approx(sum(shares))


def test_a_gradient_that_is_not_finite_tells_nothing():
    class Blowing(Mlp):
        def forward(self, x):
            return super().forward(x) * float("inf")

    model = gact_graph.wrap(make(Blowing), bits=4, adaptive=False)
    recording = Recording(model, (X,), {})
    out = model(X)
    recording.watch(out)
    out.sum().backward()
    assert measured(model, recording)[0] is None


def test_a_slot_that_reaches_no_parameter_counts_nothing():
    class Aside(Mlp):
        def forward(self, x):
            h = super().forward(x)
            self.unused = (h.detach().requires_grad_() * h.detach()).sum()
            return h

    model = gact_graph.wrap(make(Aside), bits=4, adaptive=False)
    found, _ = measured(model, recorded(model, X))
    assert min(found.sensitivities.values()) >= 0

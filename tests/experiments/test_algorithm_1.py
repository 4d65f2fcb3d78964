"""Algorithm 1 of the paper, which the library's sensitivities are compared with."""

from __future__ import annotations

import pytest
import torch
from samples import Mlp, draws, graph, make

import gact_graph
from experiments.helpers.noise import algorithm_1

X, _ = graph()


class Noisy:
    """A gradient with noise of known size for each slot."""

    def __init__(self, scales, bits):
        self.scales, self.bits, self.calls = scales, bits, []

    def __call__(self, reseeded):
        self.calls.append(reseeded)
        gradient = torch.zeros(1 + len(self.scales))
        gradient[0] = 10.0
        for i, (slot, scale) in enumerate(self.scales.items()):
            gradient[1 + i] = -scale if slot == reseeded else scale
        return {0: gradient}


def test_is_algorithm_1():
    noisy = Noisy({"a": 0.1, "b": 0.4}, 2)
    found = algorithm_1(["a", "b"], lambda slot: 2, noisy)
    assert noisy.calls == [None, "a", "b"]
    length = 100 + 0.01 + 0.16
    # 1/2 (2 scale)^2 / S(2), S(2) = 1/9
    assert found == pytest.approx(
        {"a": 0.5 * 0.04 * 9 / length, "b": 0.5 * 0.64 * 9 / length}, rel=1e-5
    )


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_nothing_comes_of_a_gradient_that_tells_nothing(bad):
    assert algorithm_1(["a"], lambda slot: 2, lambda slot: {0: torch.full((3,), bad)}) == {}


@pytest.mark.long
def test_agrees_with_the_variance_over_many_draws():
    """c_l S(b) is the variance that one slot's noise adds: here against 200 draws of it."""
    model = gact_graph.wrap(make(Mlp), bits=3, adaptive=False, min_bytes=0)
    draw = draws(model, X)
    draw()
    for slot in [row.slot for row in gact_graph.report(model).contexts if row.bits]:
        single, distances = [], []
        for number in range(200):
            draw.number = number  # all seeds anew
            single.append(algorithm_1([slot], lambda s: 3, draw)[slot])
            first, second = (
                torch.cat([g.flatten() for g in draw(s).values()]) for s in (None, slot)
            )
            distances.append((first - second).square().sum() / 2 / first.square().sum())
        truth = torch.stack(distances).mean().item() * (2**3 - 1) ** 2
        assert sum(single) / len(single) == pytest.approx(truth, rel=1e-6)
        assert min(single) > truth / 3 and max(single) < truth * 3

"""Bias and variance of noisy gradients, where both are known."""

from __future__ import annotations

import pytest
import torch
from samples import seeded

from experiments.helpers.noise import moments

EXACT = torch.ones(400)


def noisy(bias: float, deviation: float):
    """The length of the exact gradient is 20: so relative to it, the bias is ``bias``."""
    noise = deviation * torch.randn(500, 400, generator=seeded(1))
    return lambda number: EXACT * (1 + bias) + noise[number]


@pytest.mark.parametrize("bias", [0.0, 0.05, -0.2])
def test_bias_is_found_below_the_noise(bias):
    found = moments(noisy(bias, 2.0), 500, EXACT)
    assert found["variance"] == pytest.approx(4.0, rel=0.02)
    assert found["floor"] == pytest.approx((4.0 / 500) ** 0.5, rel=0.01)
    assert found["bias_squared"] == pytest.approx(bias**2, abs=4 * found["bias_squared_error"])
    # sqrt(2 / 400) * variance / draws, and what noise along the bias adds
    expected = (2 / 400) ** 0.5 * 4.0 / 500 + 2 * abs(bias) * (4.0 / 400 / 500) ** 0.5
    assert found["bias_squared_error"] == pytest.approx(expected, rel=0.8)
    assert found["bias"] == max(0.0, found["bias_squared"]) ** 0.5


def test_a_bias_without_noise():
    found = moments(lambda number: EXACT * 1.1, 7, EXACT)
    assert found["bias"] == pytest.approx(0.1, rel=1e-4)
    assert found["variance"] == pytest.approx(0.0, abs=1e-12)

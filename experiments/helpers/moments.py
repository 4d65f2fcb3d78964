"""Variance and bias of noise in a gradient, the bias free of the variance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BATCHES = 10
"""Means over so many batches of draws are compared with each other."""


@dataclass(frozen=True)
class Moments:
    """Moments of noise in a gradient, over the squared length of the gradient without noise.

    Attributes:
        variance: The expected square of the noise less its mean.
        bias_squared: The square of its mean, estimated without bias: it may come out below 0.
        error: The standard error of ``bias_squared``.
        floor: The average length of the mean over these draws if there were no bias.
    """

    variance: float
    bias_squared: float
    error: float
    floor: float

    @property
    def bias(self) -> float:
        """The length of the mean; 0 where none was found."""
        return math.sqrt(max(0.0, self.bias_squared))


def moments(draw: Callable[[int], Tensor], draws: int, exact: Tensor) -> Moments:
    r"""Draw a gradient again and again.

    The length of a mean over n draws is never 0: without any bias it is :math:`\sqrt{V / n}`. So
    the draws are dealt to batches, and the squared bias is the mean of
    :math:`\langle m_i, m_j \rangle` over all pairs of batches with :math:`i \ne j`, whose noises
    are independent. Its standard error is that of the jackknife over batches.

    Args:
        draw: Gives the gradient [P] for the number of a draw.
        draws: How many, at least 3.
        exact: The gradient [P] without noise.
    """
    batches = min(_BATCHES, draws)
    sums = torch.zeros(batches, exact.numel(), dtype=torch.float64, device=exact.device)
    counts, squares = [0] * batches, 0.0
    for number in range(draws):
        # Of the noise alone: squares of the whole would drown it in rounding.
        added = (draw(number) - exact).double()
        sums[number % batches] += added
        counts[number % batches] += 1
        squares += float(added.square().sum())
    means = sums / torch.tensor(counts, device=sums.device)[:, None]
    length = float(exact.double().square().sum())
    products = (means @ means.T).cpu() / length
    every = [*range(batches)]
    without = [_between(products, [j for j in every if j != i]) for i in every]
    center = sum(without) / batches
    spread = sum((value - center) ** 2 for value in without)
    # The variance is about the mean of the draws.
    about = squares - float(sums.sum(0).square().sum()) / draws
    variance = about / (draws - 1) / length
    return Moments(
        variance=variance,
        bias_squared=_between(products, every),
        error=math.sqrt((batches - 1) / batches * spread),
        floor=math.sqrt(max(variance, 0.0) / draws),
    )


def _between(products: Tensor, batches: list[int]) -> float:
    """The mean product of two different batches."""
    chosen = products[batches][:, batches]
    pairs = len(batches) * (len(batches) - 1)
    return float((chosen.sum() - chosen.diagonal().sum()) / pairs)

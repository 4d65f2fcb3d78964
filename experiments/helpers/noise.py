"""The noise of compression in a gradient: draws, moments, and the effect of one slot."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import gact_graph
from experiments.helpers.data import NodeTask
from experiments.helpers.train import seed_everything, training_loss
from gact_graph.adaptive.allocator import noise
from gact_graph.capture.noise import Noise

_BATCHES = 10
"""Number of batches of draws whose means are compared with each other."""


def moments(draw: Callable[[int], Tensor], draws: int, exact: Tensor) -> dict[str, float]:
    r"""Draw a gradient repeatedly, and return the moments of its noise.

    The length of a mean over n draws is never 0: without any bias it is :math:`\sqrt{V / n}`. So
    the draws are divided into batches, and the squared bias is the mean of
    :math:`\langle m_i, m_j \rangle` over all pairs of batches with :math:`i \ne j`, whose noises
    are independent. Its standard error is that of the jackknife over batches.

    Args:
        draw: Returns the gradient [P] for the number of a draw.
        draws: The number of draws, at least 3.
        exact: The gradient [P] without noise.

    Returns:
        Over the squared length of ``exact``: ``variance``, the expected square of the noise minus
        its mean; ``bias_squared``, the square of its mean, whose estimate may be below 0, and
        ``bias_squared_error``, its standard error. And ``bias``, the length of the mean, 0 if none
        was found; ``floor``, the average length of the mean of so many draws without bias.
    """
    batches = min(_BATCHES, draws)
    sums = torch.zeros(batches, exact.numel(), dtype=torch.float64, device=exact.device)
    counts, squares = [0] * batches, 0.0
    for number in range(draws):
        # Only the noise is squared: squares of the whole gradient would lose it in rounding.
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
    squared = _between(products, every)
    return {
        "variance": variance,
        "bias": math.sqrt(max(0.0, squared)),
        "bias_squared": squared,
        "bias_squared_error": math.sqrt((batches - 1) / batches * spread),
        "floor": math.sqrt(max(variance, 0.0) / draws),
    }


def squared_error(of: Mapping[str, Any]) -> float:
    """Return the expected square of the error over that of the gradient, from :func:`moments`."""
    return float(of["variance"] + max(0.0, of["bias_squared"]))


def _between(products: Tensor, batches: list[int]) -> float:
    """Return the mean product of two different batches."""
    chosen = products[batches][:, batches]
    pairs = len(batches) * (len(batches) - 1)
    return float((chosen.sum() - chosen.diagonal().sum()) / pairs)


def algorithm_1(
    slots: Iterable[str],
    bits_of: Callable[[str], float],
    draw: Callable[[str | None], Mapping[int, Tensor]],
) -> dict[str, float]:
    r"""Return c_l of each slot by Algorithm 1 of GACT, over the squared length of the gradient.

    With the gradient :math:`g_0` under seeds :math:`r_1, \dots, r_L` of the slots' noise, and
    :math:`g_1` with :math:`r_l` alone replaced,

    .. math::
        c_l = \tfrac{1}{2} \lVert g_0 - g_1 \rVert^2 / S(b_l).

    The library finds the same for all slots at once (:mod:`gact_graph.adaptive.sensitivity`).

    Args:
        slots: Names of quantized slots.
        bits_of: Returns the width of a slot.
        draw: Runs forward and backward, with another seed for the noise of the slot named, or for
            none, and returns the gradients of the parameters by their places.

    Returns:
        c_l by slot; empty if the gradient is zero or not finite.
    """
    first = draw(None)
    length = sum(map(_squared, first.values()))
    if not 0 < length < math.inf:
        return {}
    sensitivities = {}
    for slot in slots:
        squared = sum(_squared(first[place] - g) for place, g in draw(slot).items())
        if squared < math.inf and noise(bits_of(slot)):
            sensitivities[slot] = 0.5 * squared / noise(bits_of(slot)) / length
    return sensitivities


def _squared(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


class Draws:
    """One training step of a wrapped model, repeated with other noise.

    Args:
        model: A wrapped model whose bits do not change.
        loss: Runs forward and returns the loss; dropout must be the same each time.
        repeated: Whether noise of consecutive numbers is a dither, as in training on one graph; by
            default, it is independent.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[], Tensor], repeated: bool = False
    ) -> None:
        self._model, self._loss, self._repeated = model, loss, repeated
        self.number = 0

    def __call__(self, slot: str | None = None) -> dict[int, Tensor]:
        """Return the gradients of the parameters, by their places.

        Args:
            slot: A slot with other noise than that of the draw's number; None for none.
        """
        forward: Any = self._model.forward
        controller = forward.controller
        before, controller.forwards = controller.forwards, self.number
        self._model.zero_grad()
        try:
            with _reseeded(slot, self._repeated):
                self._loss().backward()
        finally:
            controller.forwards = before
        gradients = ((i, p.grad) for i, p in enumerate(self._model.parameters()))
        copies = {i: g.detach().clone() for i, g in gradients if g is not None}
        self._model.zero_grad()
        return copies

    def gradient(self, number: int) -> Tensor:
        """Return the gradient [P] under the noise of this number, as one vector."""
        self.number = number
        return torch.cat([gradient.flatten() for gradient in self().values()])


class Probe(Draws):
    """Draws of a wrapped node classifier on its graph, with its ``report``."""

    def __init__(self, model: nn.Module, task: NodeTask) -> None:
        def loss() -> Tensor:
            seed_everything(0)
            return training_loss(model(task.x, task.adjacency), task)

        model.train()
        super().__init__(model, loss)
        self()
        self.report = gact_graph.report(model)

    def sensitivities(self, number: int = 0) -> dict[str, float]:
        """Return c_l of every quantized slot, over the squared length of the gradient."""
        self.number = number
        bits = {row.slot: row.bits for row in self.report.contexts if row.bits is not None}
        return algorithm_1(bits, bits.__getitem__, self)


@contextmanager
def _reseeded(slot: str | None, repeated: bool) -> Iterator[None]:
    """Replace the noise of one slot, and that of all slots by fresh noise unless ``repeated``."""
    stock = Noise.seed_of

    def seed_of(noise: Noise, name: str) -> int:
        return stock(dataclasses.replace(noise, repeated=repeated), name) ^ (name == slot)

    with mock.patch.object(Noise, "seed_of", seed_of):
        yield


def plain(model: nn.Module) -> nn.Module:
    """Return a copy of a wrapped model, without the library."""
    return gact_graph.unwrap(copy.deepcopy(model))

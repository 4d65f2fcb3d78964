"""Gradients of one training step under other draws of the quantization noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import gact_graph
from experiments.helpers.algorithm_1 import algorithm_1
from experiments.helpers.data import NodeTask
from experiments.helpers.train import seed_everything, training_loss
from gact_graph.capture.noise import Noise


class Draws:
    """Runs one training step of a wrapped model again and again, with other noise.

    Args:
        model: A wrapped model whose bits do not change.
        loss: Runs forward and returns the loss; dropout must be the same each time.
    """

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        self._model, self._loss = model, loss
        self.number = 0

    def __call__(self, slot: str | None = None) -> dict[int, Tensor]:
        """Return the gradients of the parameters, by their places.

        Args:
            slot: Gets other noise than the number of the draw gives; None for none.
        """
        forward: Any = self._model.forward
        controller = forward.controller
        before, controller.forwards = controller.forwards, self.number
        self._model.zero_grad()
        try:
            with _reseeded(slot):
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
        gradients = self()
        return torch.cat([gradients[place].flatten() for place in sorted(gradients)])


class Probe(Draws):
    """The same of a node classifier on its graph, whose ``report`` it has.

    Args:
        model: A wrapped model.
        task: Its graph.
    """

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
def _reseeded(slot: str | None) -> Iterator[None]:
    stock = Noise.seed_of

    def seed_of(noise: Noise, name: str) -> int:
        return stock(noise, name) ^ (name == slot)

    with mock.patch.object(Noise, "seed_of", seed_of):
        yield


def measured(model: nn.Module) -> dict[str, float]:
    """Return the sensitivities that an adaptive model has measured, by slot."""
    sensitivities: dict[str, float] = gact_graph.state_dict(model)["scheme"]["sensitivities"]
    return sensitivities

"""The gradient of a case at the weights after some exact training, and its error."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from datasets import Graph
from experiments.helpers.meters import Trainee, train
from experiments.helpers.noise import Draws, moments, plain
from experiments.helpers.strategies import STRATEGIES, Case, registry_restored
from experiments.helpers.subjects import MODELS
from experiments.helpers.train import gradient_of, seed_everything

State = Mapping[str, Tensor]
"""The weights and buffers of a model."""


def trained(case: Case, graph: Graph, epochs: int) -> tuple[State, Tensor]:
    """Return the weights after some epochs of exact training, and the gradient [P] there."""
    stock = _start(dataclasses.replace(case, strategy="stock"), graph)
    train(stock, epochs, MODELS[case.model].lr)
    return stock.model.state_dict(), _gradients(stock)(0)


def total(case: Case, graph: Graph, state: State, exact: Tensor, draws: int) -> dict[str, float]:
    """Return the saved bytes, and the moments of all noise together, relative to ``exact``."""
    with registry_restored():
        trainee = _start(case, graph)
        trainee.model.load_state_dict(state)
        found = moments(_gradients(trainee), draws, exact)
        return {"saved_bytes": trainee.saved_bytes(), **found}


def adapted(case: Case, graph: Graph, epochs: int, draws: int) -> dict[str, float]:
    """Return the saved bytes, and the moments of all noise after training with adaptive bits.

    The bits and the weights of rows are those of the last measurement in these epochs.
    """
    with registry_restored():
        trainee = _start(dataclasses.replace(case, adaptive=True), graph)
        train(trainee, epochs, MODELS[case.model].lr)
        stock = _start(dataclasses.replace(case, strategy="stock"), graph)
        stock.model.load_state_dict(plain(trainee.model).state_dict())
        state, gradients = copy.deepcopy(trainee.model.state_dict()), _gradients(trainee)

        def draw(number: int) -> Tensor:
            trainee.model.load_state_dict(state)  # so that no draw measures
            return gradients(number)

        found = moments(draw, draws, _gradients(stock)(0))
        return {"saved_bytes": trainee.saved_bytes(), **found}


def _start(case: Case, graph: Graph) -> Trainee:
    return STRATEGIES[case.strategy].start(case, graph, torch.device(case.device))


def _gradients(trainee: Trainee) -> Callable[[int], Tensor]:
    """Return the function from the number of a draw to a gradient [P], with equal dropout."""
    model = trainee.model.train()

    def loss() -> Tensor:
        seed_everything(0)
        return trainee.loss()

    def gradient(number: int) -> Tensor:
        model.zero_grad()
        loss().backward()
        return gradient_of(model)

    return Draws(model, loss).gradient if trainee.wrapped else gradient


def bias_of(row: Mapping[str, Any]) -> str:
    """Return the text of a bias, with the bound at two standard errors of its square."""
    highest = max(0.0, row["bias_squared"] + 2 * row["bias_squared_error"])
    return f"{row['bias']:.2%} (below {math.sqrt(highest):.2%})"

"""Training steps of a model of :data:`experiments.models.memory.KINDS`, and their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from datasets import load
from experiments.helpers.train import seed_everything
from experiments.models.memory import KINDS
from gact_graph.support.memory import heap
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import PeakMeter
from gact_graph.support.storage import tensors_in


def prepared(model: str, dataset: str, root: str) -> tuple[nn.Module, tuple[Any, ...], Tensor]:
    """Return a model with initialized parameters, its inputs on a graph, and the labels."""
    graph = load(dataset, root)
    seed_everything(0)
    made, inputs = KINDS[model].make(graph), KINDS[model].inputs(graph)
    with torch.no_grad():
        made.eval()(*inputs)  # gives lazily initialized parameters their values
    heap.trim()  # else training would reuse this freed memory, and seem to take less
    return made.train(), inputs, graph.y


def train(model: nn.Module, inputs: tuple[Any, ...], y: Tensor, steps: int) -> int:
    """Train, and return the peak in bytes, above the memory of the process before.

    Freed memory that is kept for the next step returns to the system first: its size depends on the
    room there is, not on the needs of training.
    """
    step, device = stepper(model, inputs, y), torch.device("cpu")
    with PeakMeter(device) as meter:
        for _ in range(steps):
            memory_policy.release(device)
            step()
    assert meter.peak_bytes is not None
    return meter.peak_bytes


def stepper(model: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Callable[[], None]:
    """Return a function that runs a training step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, inputs, y).backward()
        optimizer.step()

    return step


def loss_of(model: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
    """Return the sum of the losses of all outputs, a scalar."""
    outputs = tensors_in(model(*inputs))
    return torch.stack([nn.functional.cross_entropy(output, y) for output in outputs]).sum()

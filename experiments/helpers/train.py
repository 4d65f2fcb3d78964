"""Training of one model with one seed, full batch."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gact_graph
from experiments.helpers.data import NodeTask
from experiments.helpers.measuring import cost_of_measuring
from experiments.helpers.ranks import mean, rank, summed, world_size
from experiments.helpers.recipes import Recipe
from experiments.helpers.sampling import make_sampler
from experiments.helpers.shares import Share, share_of
from experiments.models import build
from gact_graph.support.peak import PeakMeter


@dataclass(frozen=True)
class Setup:
    """How to train: a model, its recipe, and how its saved contexts are kept.

    Attributes:
        model: ``"gcn"``, ``"gat"`` or ``"gcnii"``.
        recipe: Hyperparameters.
        bits: Bits of an element of a quantized context; 32 keeps it as it is.
        level: gact_graph's level.
        adaptive: Whether bits are spent by sensitivity; else all contexts have the same.
        blocks: As :func:`gact_graph.wrap` takes it.
        memory: A budget in bytes that chooses bits, level and blocks; None: those above.
        sampler: How mini-batches are drawn; None: a step takes the whole graph.
        partition: How the graph is cut into a part for each process; None: it is not.
    """

    model: str
    recipe: Recipe
    bits: int
    level: str
    adaptive: bool = False
    blocks: int | str | None = None
    memory: int | None = None
    sampler: str | None = None
    partition: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of :func:`gact_graph.wrap`."""
        shared: dict[str, Any] = {"adaptive": self.adaptive}
        if self.memory is not None:
            return shared | {"memory": self.memory}
        own = {"bits": self.bits, "level": self.level, "blocks": self.blocks, "min_bytes": 0}
        return shared | own


OnEpoch = Callable[[int, float, float, "int | None"], None]
"""Gets the epoch, its loss and validation score, and the peak of memory so far."""


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def score(logits: Tensor, y: Tensor) -> float:
    """Accuracy, or micro-F1 where ``y`` is [n, C] of 0 and 1; both in [0, 1].

    Shapes:
        - **input**: logits [n, C] float; y [n] int64 or [n, C] float
    """
    return _ratio(*counts(logits, y).tolist())


def _ratio(hits: int, total: int) -> float:
    return hits / total if total else 0.0


def counts(logits: Tensor, y: Tensor) -> Tensor:
    """Hits and total of :func:`score`: two int64, which add up over parts of the nodes."""
    if y.dim() == 1:
        return torch.stack([(logits.argmax(dim=-1) == y).sum(), torch.tensor(len(y)).to(y.device)])
    predicted, actual = logits > 0, y > 0
    return torch.stack([2 * (predicted & actual).sum(), predicted.sum() + actual.sum()])


def train(
    task: NodeTask, setup: Setup, seed: int, on_epoch: OnEpoch = lambda *_: None
) -> tuple[dict[str, Any], Any]:
    """Train with Adam and keep the test score of the epoch that was best on validation.

    Returns:
        The library's report, and a record before it: ``seed``; ``test_score`` and ``val_score`` in
        [0, 1] and ``best_epoch``, from 1; ``rate``, ``raw_bytes``, ``stored_bytes`` and
        ``average_bits`` of the saved ``contexts``, one dict each; ``peak_bytes`` (see
        :class:`gact_graph.support.peak.PeakMeter`); ``epoch_seconds``, the median of a training
        step without the evaluation; ``train_seconds`` of all steps, and ``measuring_seconds`` and
        ``passes`` of measuring alone; and the curves ``loss`` and ``val_curve``.

    Under ``torchrun`` each process takes steps on batches of its own, and gradients are averaged;
    scores are known to rank 0 alone. Or each has a part of the graph, and scores are those of the
    whole; bytes and peak are those of the process that asks.
    """
    seed_everything(seed)
    device = task.x.device
    share = None
    if setup.partition is not None:
        share = share_of(task, setup.partition, rank(), world_size())
        task = share.task
    with PeakMeter(device) as meter:
        sizes = task.x.size(1), task.num_classes
        model = build(setup.model, setup.recipe, *sizes, normalize=share is not None).to(device)
        part = {} if share is None else {"partition": share.part}
        gact_graph.wrap(model, **setup.options, **part, seed=seed)
        trained = model
        if share is None and world_size() > 1:
            trained = DistributedDataParallel(model)
        if share is not None and rank() > 0:
            torch.manual_seed(hash((seed, rank())))  # other dropout for other nodes
        optimizer = torch.optim.Adam(
            model.parameters(), lr=setup.recipe.lr, weight_decay=setup.recipe.weight_decay
        )
        sampler = None
        if setup.sampler is not None:
            layers = setup.recipe.layers
            sampler = make_sampler(setup.sampler, task, layers, rank(), world_size())
        losses: list[float] = []
        scores: list[tuple[float, float]] = []  # validation, test
        seconds: list[float] = []
        passes: list[int] = []
        for epoch in range(1, setup.recipe.epochs + 1):
            start = time.perf_counter()
            if share is None:
                batches = [task] if sampler is None else sampler.epoch(epoch)
                losses.append(mean(_train_epoch(trained, optimizer, batches)))
            else:
                losses.append(shared_step(model, optimizer, share).item())
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            passes.append(gact_graph.report(model).measurements)
            is_asked = rank() == 0 or share is not None
            scores.append(_evaluate(model, task, share is not None) if is_asked else (0.0, 0.0))
            on_epoch(epoch, losses[-1], scores[-1][0], meter.peak_bytes)
    # max() keeps the first of equals: the earliest of the best epochs.
    best = max(range(len(scores)), key=lambda epoch: scores[epoch][0])
    report = gact_graph.report(model)
    memory = report.to_dict()
    cost = cost_of_measuring(seconds, passes)
    record = {
        "seed": seed,
        "test_score": scores[best][1],
        "val_score": scores[best][0],
        "best_epoch": best + 1,
        "rate": memory["rate"],
        "raw_bytes": memory["raw_bytes"],
        "stored_bytes": memory["stored_bytes"],
        "average_bits": memory["average_bits"],
        "peak_bytes": meter.peak_bytes,
        "epoch_seconds": statistics.median(seconds),
        "train_seconds": sum(seconds),
        "measuring_seconds": cost["measuring_steps"] * cost["step_seconds"] if cost else None,
        "passes": memory["measurements"],
        "loss": losses,
        "val_curve": [val for val, _ in scores],
        "contexts": memory["contexts"],
    }
    return record, report


def _train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[NodeTask]
) -> list[float]:
    """One step a batch; the losses. A rank may have more batches than another."""
    losses = []
    with model.join() if isinstance(model, DistributedDataParallel) else nullcontext():
        for batch in batches:
            # .item() waits for the device, so the clock sees all of the step's work.
            losses.append(training_step(model, optimizer, batch).item())
    return losses


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, task: NodeTask) -> Tensor:
    """Forward, backward and update on the whole graph; return the loss, a detached scalar."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    loss = training_loss(model(task.x, task.adjacency), task)
    loss.backward()
    optimizer.step()
    return loss.detach()


def shared_step(model: nn.Module, optimizer: torch.optim.Optimizer, share: Share) -> Tensor:
    """The same in all processes, each with its part of the graph; return the loss of the whole."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    loss = training_loss(model(share.task.x, share.task.adjacency), share.task, share.learning)
    loss.backward()
    gact_graph.distributed.sum_gradients(model)
    optimizer.step()
    return summed(loss.detach())


def training_loss(output: Tensor, task: NodeTask, learning: int | None = None) -> Tensor:
    """The loss of the training nodes, a scalar, from the model's output [N, C].

    Args:
        output: The model's.
        task: The graph, or a part of one.
        learning: Training nodes of the whole graph: losses of its parts then add up to its own.
    """
    logits, y = output[task.train_idx], task.y[task.train_idx]
    loss = F.binary_cross_entropy_with_logits if task.multi_label else F.cross_entropy
    if learning is None:
        return loss(logits, y)
    columns = y.size(1) if task.multi_label else 1
    return loss(logits, y, reduction="sum") / (learning * columns)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all of its work; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _evaluate(model: nn.Module, task: NodeTask, is_part: bool) -> tuple[float, float]:
    """The scores of validation and test; of the parts of all processes, if this is one."""
    model.eval()
    logits = model(task.x, task.adjacency)
    indices = task.val_idx, task.test_idx
    found = torch.stack([counts(logits[index], task.y[index]) for index in indices])
    val, test = (summed(found) if is_part else found).tolist()
    return _ratio(*val), _ratio(*test)

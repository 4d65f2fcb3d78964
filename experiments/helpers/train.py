"""Training of one model with one seed, on a whole graph, on batches or on a part."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
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
from experiments.helpers.levels import Level
from experiments.helpers.ranks import mean, rank, summed, world_size
from experiments.helpers.recipes import Recipe
from experiments.helpers.sampling import make_sampler, share_of
from experiments.helpers.values import FP32_BITS
from experiments.models.nets import build
from gact_graph.capture.config import BlockSize
from gact_graph.support.clock import synchronize
from gact_graph.support.peak import PeakMeter


@dataclass(frozen=True)
class Setup:
    """The settings of a training: a model, its recipe, and the form of its saved contexts.

    Attributes:
        model: ``"gcn"``, ``"gat"`` or ``"gcnii"``.
        recipe: Hyperparameters.
        bits: Bits of an element of a quantized context; 32 keeps it unchanged.
        level: gact_graph's level.
        adaptive: Whether bits are spent by sensitivity; else all contexts have the same.
        blocks: As :func:`gact_graph.wrap` takes it.
        memory: A budget in bytes that chooses bits, level and blocks; None: those above.
        sampler: How mini-batches are drawn; None: a step takes the whole graph.
        partition: How the graph is cut into a part for each process; None: it is not.
        halo_bits: Bits of an element that is sent to another process.
    """

    model: str
    recipe: Recipe
    bits: int
    level: str
    adaptive: bool = False
    blocks: BlockSize | None = None
    memory: int | None = None
    sampler: str | None = None
    partition: str | None = None
    halo_bits: int = FP32_BITS


OnEpoch = Callable[[int, float, float, "int | None"], None]
"""Receives the epoch, its loss and validation score, and the peak of memory so far."""


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _ratio(hits: int, total: int) -> float:
    return hits / total if total else 0.0


def counts(logits: Tensor, y: Tensor) -> Tensor:
    """Return hits and total of accuracy, or of micro-F1 if ``y`` is [n, C] of 0 and 1.

    Shapes:
        - **input**: logits [n, C] float; y [n] int64 or [n, C] float
        - **output**: [2] int64, which add up over parts of the nodes
    """
    if y.dim() == 1:
        return torch.stack([(logits.argmax(dim=-1) == y).sum(), torch.tensor(len(y)).to(y.device)])
    predicted, actual = logits > 0, y > 0
    return torch.stack([2 * (predicted & actual).sum(), predicted.sum() + actual.sum()])


def train(
    task: NodeTask, setup: Setup, seed: int, on_epoch: OnEpoch = lambda *_: None
) -> tuple[dict[str, Any], Any]:
    """Train with Adam and keep the test score of the epoch that was best on validation.

    Returns:
        A record and the library's report. The record has ``seed``; ``test_score`` and ``val_score``
        in [0, 1] and ``best_epoch``, from 1; ``rate``, ``raw_bytes``, ``stored_bytes`` and
        ``average_bits`` of the saved ``contexts``, one dict each; ``peak_bytes`` (see
        :class:`gact_graph.support.peak.PeakMeter`); ``epoch_seconds``, the median of a training
        step without the evaluation; ``train_seconds`` of all steps, and ``measuring_seconds`` and
        ``passes`` of measuring alone; and the curves ``loss`` and ``val_curve``.

    Under ``torchrun`` each process takes steps on batches of its own, and gradients are averaged;
    only rank 0 computes scores. Or each process has a part of the graph, and scores are those of
    the whole graph; bytes and peak are those of this process.
    """
    seed_everything(seed)
    device = task.x.device
    if setup.partition is not None:
        task = share_of(task, setup.partition, rank(), world_size())
    is_part = task.part is not None
    with PeakMeter(device) as meter:
        sizes = task.x.size(1), task.num_classes
        model = build(setup.model, setup.recipe, *sizes, normalize=is_part).to(device)
        more: dict[str, Any] = {"seed": seed}
        if is_part:
            more |= {"partition": task.part, "halo_bits": setup.halo_bits}
        if setup.memory is not None:
            gact_graph.wrap(model, memory=setup.memory, adaptive=setup.adaptive, **more)
        else:
            Level(setup.level, setup.blocks, setup.bits, setup.adaptive).wrap(model, **more)
        alone = is_part or world_size() == 1
        trained = model if alone else DistributedDataParallel(model)
        if is_part and rank() > 0:
            torch.manual_seed(hash((seed, rank())))  # other dropout for other nodes
        recipe = setup.recipe
        decay = recipe.weight_decay
        optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=decay)
        sampler = None
        if setup.sampler is not None:
            sampler = make_sampler(setup.sampler, task, recipe.layers, rank(), world_size())
        losses, seconds, passes = [], [], []
        scores: list[tuple[float, float]] = []  # validation, test
        for epoch in range(1, recipe.epochs + 1):
            start = time.perf_counter()
            batches = [task] if sampler is None else sampler(epoch)
            of_steps = _train_epoch(trained, optimizer, batches)
            losses.append(of_steps[0] if is_part else mean(of_steps))
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            passes.append(gact_graph.report(model).measurements)
            scores.append(evaluate(model, task) if is_part or rank() == 0 else (0.0, 0.0))
            on_epoch(epoch, losses[-1], scores[-1][0], meter.peak_bytes)
    # max() keeps the first of equals: the earliest of the best epochs.
    best = max(range(len(scores)), key=lambda epoch: scores[epoch][0])
    report = gact_graph.report(model)
    memory = report.to_dict()
    cost = cost_of_measuring(seconds, passes)
    val_score, test_score = scores[best]
    record = {
        **{"seed": seed, "test_score": test_score, "val_score": val_score, "best_epoch": best + 1},
        **{key: memory[key] for key in ("rate", "raw_bytes", "stored_bytes", "average_bits")},
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


def cost_of_measuring(seconds: Sequence[float], passes: Sequence[int]) -> dict[str, float]:
    """Return the time of steps that measured sensitivities beyond that of ordinary steps.

    Args:
        seconds: Seconds of each step.
        passes: The number of measurements after each step, as the report counts them.

    Returns:
        ``step_seconds``, the median of ordinary steps; in such steps, the time of the first
        measurement (``first_measurement_steps``: steps that measure in a row are parts of it), and
        of all (``measuring_steps``). Empty if every step measured.

    >>> cost_of_measuring([1.0, 1.0, 2.0, 3.0, 1.0], [0, 0, 1, 3, 3])
    {'step_seconds': 1.0, 'first_measurement_steps': 3.0, 'measuring_steps': 3.0}
    """
    measures = [after > before for before, after in itertools.pairwise([0, *passes])]
    ordinary = [s for s, measured in zip(seconds, measures, strict=True) if not measured]
    if not ordinary:
        return {}
    step = statistics.median(ordinary)
    # The first steps of all fill caches, so the extra time is that of steps that measured alone.
    extra = [
        s / step - 1 if measured else 0.0 for s, measured in zip(seconds, measures, strict=True)
    ]
    begin = measures.index(True) if True in measures else len(measures)
    first = itertools.takewhile(bool, measures[begin:])
    return {
        "step_seconds": step,
        "first_measurement_steps": sum(extra[begin : begin + len([*first])]),
        "measuring_steps": sum(extra),
    }


def _train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[NodeTask]
) -> list[float]:
    """Take one step per batch; return the losses. A rank may have more batches than another."""
    losses = []
    with model.join() if isinstance(model, DistributedDataParallel) else nullcontext():
        for batch in batches:
            # .item() waits for the device, so the time includes all of the step's work.
            losses.append(training_step(model, optimizer, batch).item())
    return losses


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, task: NodeTask) -> Tensor:
    """Take a step on a graph; return the loss of the whole graph, a detached scalar."""
    model.train()
    is_part = task.part is not None

    def loss_of() -> Tensor:
        return training_loss(model(task.x, task.adjacency), task)

    loss = take_step(model, optimizer, loss_of, is_part=is_part)
    return summed(loss) if is_part else loss


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    after_forward: Callable[[], None] = lambda: None,
    is_part: bool = False,
) -> Tensor:
    """Run forward, backward and update; return the loss, a detached scalar.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters.
        loss_of: Runs forward and returns the loss.
        after_forward: Called between forward and backward.
        is_part: Whether gradients are summed over the processes that share a graph.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of()
    after_forward()
    loss.backward()
    if is_part:
        gact_graph.distributed.sum_gradients(model)
    optimizer.step()
    return loss.detach()


def gradient_of(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters that have one, as one vector [P]."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def training_loss(output: Tensor, task: NodeTask) -> Tensor:
    """Return the loss of the training nodes, a scalar; losses of the parts of a graph add up.

    Shapes:
        - **input**: output [N, C]
    """
    logits, y = output[task.train_idx], task.y[task.train_idx]
    loss = F.binary_cross_entropy_with_logits if task.multi_label else F.cross_entropy
    if task.learning is None:
        return loss(logits, y)
    columns = y.size(1) if task.multi_label else 1
    return loss(logits, y, reduction="sum") / (task.learning * columns)


@torch.no_grad()
def evaluate(model: nn.Module, task: NodeTask) -> tuple[float, float]:
    """Return the scores of validation and test; of the whole graph, if the task is a part of it."""
    model.eval()
    logits = model(task.x, task.adjacency)
    indices = task.val_idx, task.test_idx
    totals = torch.stack([counts(logits[index], task.y[index]) for index in indices])
    val, test = (totals if task.part is None else summed(totals)).tolist()
    return _ratio(*val), _ratio(*test)

"""A few training steps of one way in a process of its own.

The parent calls :func:`run_trial`; the child is
``python -m experiments.helpers.peers.trial SPECIFICATION``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import gact_graph
from datasets import load
from experiments.helpers.cap import ended_by_memory
from experiments.helpers.peers.allocators import environment
from experiments.helpers.peers.ways import MODELS, WAYS, Started
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.train import synchronize, training_loss
from experiments.helpers.values import parse_device
from gact_graph.support.peak import PeakMeter


@dataclass(frozen=True)
class Specification:
    """What to train.

    Attributes:
        model: A name of :data:`experiments.helpers.peers.ways.MODELS`.
        way: A name of :data:`experiments.helpers.peers.ways.WAYS`.
        dataset: As ``--dataset`` takes it.
        data_root: Where named data sets lie.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        steps: Training steps; the first is not counted in the time.
        hidden, layers: In place of the model's own; None: those.
        allocator: A name of :data:`experiments.helpers.peers.allocators.ALLOCATORS`.
    """

    model: str
    way: str
    dataset: str
    data_root: str = "data"
    device: str = "cpu"
    steps: int = 8
    hidden: int | None = None
    layers: int | None = None
    allocator: str = "kept"


def run_trial(specification: Specification) -> dict[str, Any]:
    """What :func:`measure` gave in a fresh process, or ``reason``, why it gave nothing."""
    missing = WAYS[specification.way].missing(parse_device(specification.device))
    if missing is not None:
        return {"reason": missing}
    command = [
        *(sys.executable, "-m", "experiments.helpers.peers.trial"),
        json.dumps(asdict(specification)),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment(specification.allocator),
    )
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    if ended_by_memory(done.returncode, done.stderr):
        return {"reason": "out of memory"}
    last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    return {"reason": f"failed: {last[:200]}"}


def measure(specification: Specification) -> dict[str, Any]:
    """Train, and return what it took.

    Returns:
        ``saved_bytes``, ``peak_bytes`` over the start, ``step_seconds`` and
        ``step_process_seconds`` (medians without the first step, by the clock and of this process
        alone), ``first_loss`` and ``loss``, those of the first and of the last step, and
        ``compile_seconds``, by how much the first step was longer than the others (None where
        nothing compiles).
    """
    device = parse_device(specification.device)
    way = WAYS[specification.way]
    name = MODELS[specification.model]
    graph = load(specification.dataset, specification.data_root)
    asked = {"hidden": specification.hidden, "layers": specification.layers}
    sizes = {key: size for key, size in asked.items() if size is not None}
    if way.ours:
        _load_kernels(device)
    started = way.start(name, graph, device, sizes)
    del graph
    started.model.train()
    optimizer = torch.optim.Adam(started.model.parameters(), lr=SUBJECTS[name].lr)
    seconds: list[tuple[float, float]] = []
    losses: list[float] = []
    with ExitStack() as stack:
        meter = PeakMeter(device)
        before = 0
        for number in range(specification.steps):
            if number == (1 if way.compiles else 0):
                stack.enter_context(meter)
                before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            start = time.perf_counter(), time.process_time()
            losses.append(_step(started, optimizer))
            synchronize(device)
            seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, process = (
        statistics.median(times) for times in zip(*(seconds[1:] or seconds), strict=True)
    )
    return {
        "saved_bytes": started.saved_bytes(),
        "peak_bytes": None if meter.peak_bytes is None else meter.peak_bytes - before,
        "step_seconds": wall,
        "step_process_seconds": process,
        "compile_seconds": seconds[0][0] - wall if way.compiles else None,
        "first_loss": losses[0],
        "loss": losses[-1],
    }


def _step(started: Started, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = training_loss(started.forward(), started.task)
    loss.backward()
    optimizer.step()
    return loss.item()


def _load_kernels(device: torch.device) -> None:
    """What a process has for ever after its first compressed step, whatever the graph."""
    model = gact_graph.wrap(nn.Linear(64, 64).to(device), bits=4, adaptive=False, min_bytes=0)
    model(torch.ones(1024, 64, device=device) * 1).square().sum().backward()


def main(argv: list[str]) -> int:
    """The child process."""
    print(json.dumps(measure(Specification(**json.loads(argv[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A few training steps of one model on one graph, in a process for each part.

The parent calls :func:`run_trial`; the children are
``python -m experiments.helpers.parts.trial SPECIFICATION RANK STORE``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gact_graph
from datasets import load
from experiments.helpers.data import prepare
from experiments.helpers.errors import ExperimentError
from experiments.helpers.options import EXACT_LEVELS
from experiments.helpers.ranks import summed
from experiments.helpers.shares import Share, share_of
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.train import seed_everything, training_loss
from experiments.helpers.values import FP32_BITS
from gact_graph.support.peak import PeakMeter

WAYS = ("lossless", "L1", "lossless+blocks", "L1+blocks")
"""How contexts are kept, and whether message passing runs in blocks."""


TIMES = (
    *("step_seconds", "step_process_seconds"),
    *("exchange_seconds", "exchange_process_seconds"),
)
"""Times that :func:`measure` gives."""

CLOCK = tuple(name for name in TIMES if "process" not in name)
"""Those by the clock, which depend on what else the machine does."""


@dataclass(frozen=True)
class Specification:
    """What to train.

    Attributes:
        model: A name of :data:`experiments.helpers.subjects.SUBJECTS` that takes ``edge_index``.
        way: One of :data:`WAYS`.
        dataset: As ``--dataset`` takes it.
        data_root: Where named data sets lie.
        parts: Processes, each with a part of the graph.
        cut: One of :data:`experiments.helpers.shares.PARTITIONS`.
        halo_bits: Of an element on its way to another process.
        bits: For the ways that quantize.
        steps: Training steps; the first is not counted in the times.
        threads: Of each process.
        hidden, layers: In place of the model's own; None: those.
    """

    model: str
    way: str
    dataset: str
    data_root: str
    parts: int
    cut: str
    halo_bits: int
    bits: int
    steps: int
    threads: int
    hidden: int | None = None
    layers: int | None = None


def run_trial(specification: Specification) -> list[dict[str, Any]]:
    """What :func:`measure` gave in each of the processes.

    Raises:
        ExperimentError: One of them failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "experiments.helpers.parts.trial"]
        words += [json.dumps(asdict(specification))]
        threads = {"OMP_NUM_THREADS": str(specification.threads)}
        ranks = [
            subprocess.Popen(
                [*words, str(rank), str(Path(folder) / "store")],
                env=os.environ | threads | {"WORLD_SIZE": str(specification.parts)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(specification.parts)
        ]
        try:
            done = [rank.communicate() for rank in ranks]
        finally:
            for one in ranks:
                one.kill()
    for rank, (_, said) in zip(ranks, done, strict=True):
        if rank.returncode:
            last = (said.strip().splitlines() or [f"code {rank.returncode}"])[-1]
            raise ExperimentError(f"a trial of {specification.way} failed: {last[:300]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def measure(specification: Specification, rank: int) -> dict[str, Any]:
    """Train on one part, and return what that took.

    Returns:
        ``nodes``, ``edges`` and ``halo`` of the part, and ``sends``, the rows that it sends to each
        layer; ``peak_bytes`` over the start; ``forward_bytes`` and ``sent_bytes``, what a forward
        and a whole step send to others; ``exchanges`` of a step; ``step_seconds`` and
        ``step_process_seconds`` (medians without the first step, by the clock and of this process
        alone), and the same of the exchanges, waiting for others included: ``exchange_seconds`` and
        ``exchange_process_seconds``; ``first_loss`` and ``loss``, those of the whole graph.
    """
    torch.set_num_threads(specification.threads)
    graph = load(specification.dataset, specification.data_root)
    task = prepare(graph, "edge_index")
    share = share_of(task, specification.cut, rank, specification.parts)
    sizes = task.x.size(1), task.num_classes
    del graph, task
    model = _model(specification, sizes, share)
    _load_kernels()
    optimizer = torch.optim.Adam(model.parameters(), lr=SUBJECTS[specification.model].lr)
    model.train()
    steps: list[dict[str, float]] = []
    with PeakMeter(torch.device("cpu")) as meter:
        for _ in range(specification.steps):
            steps.append(_step(model, optimizer, share))
        peak = meter.peak_bytes
    counted = steps[1:] or steps
    return {
        "nodes": len(share.part.nodes),
        "edges": share.part.edge_index.size(1),
        "halo": len(share.part.halo),
        "sends": len(share.part.send),
        "peak_bytes": peak,
        **{name: steps[-1][name] for name in ("forward_bytes", "sent_bytes", "exchanges")},
        **{name: statistics.median(step[name] for step in counted) for name in TIMES},
        "first_loss": steps[0]["loss"],
        "loss": steps[-1]["loss"],
    }


def _model(specification: Specification, sizes: tuple[int, int], share: Share) -> nn.Module:
    chosen = {"hidden": specification.hidden, "layers": specification.layers}
    given = {name: size for name, size in chosen.items() if size is not None}
    seed_everything(0)
    model = SUBJECTS[specification.model].make(*sizes, **given)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that the losses of any number of parts can be compared
    level = specification.way.removesuffix("+blocks")
    exact = level in EXACT_LEVELS
    return gact_graph.wrap(
        model,
        bits=FP32_BITS if exact else specification.bits,
        level=level,
        adaptive=False,
        blocks="auto" if specification.way.endswith("+blocks") else False,
        min_bytes=0,
        partition=share.part,
        halo_bits=specification.halo_bits,
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, share: Share) -> dict[str, float]:
    begun = time.perf_counter(), time.process_time()
    with _exchanges() as waits:
        optimizer.zero_grad(set_to_none=True)
        loss = training_loss(model(share.task.x, share.task.adjacency), share.task, share.learning)
        forward_bytes = gact_graph.report(model).halo_bytes or 0
        loss.backward()
        gact_graph.distributed.sum_gradients(model)
        optimizer.step()
    return {
        "forward_bytes": forward_bytes,
        "sent_bytes": gact_graph.report(model).halo_bytes or 0,
        "exchanges": len(waits),
        "exchange_seconds": sum(wall for wall, _ in waits),
        "exchange_process_seconds": sum(process for _, process in waits),
        "step_seconds": time.perf_counter() - begun[0],
        "step_process_seconds": time.process_time() - begun[1],
        "loss": summed(loss.detach()).item(),
    }


@contextmanager
def _exchanges() -> Iterator[list[tuple[float, float]]]:
    """The seconds of each exchange of rows inside, by the clock and of this process."""
    waits: list[tuple[float, float]] = []
    exchange = dist.all_to_all_single

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter(), time.process_time()
        found = exchange(*args, **kwargs)
        waits.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
        return found

    dist.all_to_all_single = timed
    try:
        yield waits
    finally:
        dist.all_to_all_single = exchange


def _load_kernels() -> None:
    """What a process has for ever after its first compressed step, whatever the graph."""
    model = gact_graph.wrap(nn.Linear(64, 64), bits=4, adaptive=False, min_bytes=0)
    model(torch.ones(1024, 64) * 1).square().sum().backward()


def main(argv: list[str]) -> int:
    """A child process."""
    specification, rank = Specification(**json.loads(argv[0])), int(argv[1])
    if specification.parts > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{argv[2]}", rank=rank, world_size=specification.parts
        )
    print(json.dumps(measure(specification, rank)), flush=True)
    if specification.parts > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

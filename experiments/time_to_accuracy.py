"""Accuracy by the seconds of training: a whole graph in a given memory beside sampled batches.

``python -m experiments.time_to_accuracy --model gat --dataset FILE.npz --memory "1 GB" --out DIR``

Each way trains for the same seconds, in a process of its own. Sampled batches are as large as the
memory permits. Copies of the weights, taken during training, are evaluated on the whole graph
afterwards, when the clock and the memory meter have stopped.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gact_graph
from datasets import load
from experiments.helpers import command
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.meters import warm_up
from experiments.helpers.process import OUT_OF_MEMORY, call_together, environment, purge
from experiments.helpers.sampling import BATCHES, CLUSTERS, make_sampler
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.subjects import LAYERS, ON_EDGES, SUBJECTS
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.train import evaluate, seed_everything, training_step
from experiments.helpers.values import parse_memory, parse_positive, parse_seeds
from gact_graph.support.clock import synchronize
from gact_graph.support.peak import PeakMeter

_EVALUATIONS = 30
"""Evaluations of the weights of one training, evenly spaced in time."""


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        label: Its name in tables.
        sampler: A name of :data:`experiments.helpers.sampling.BATCHES`; None takes the whole graph.
        wrapped: Whether the library wraps the model, with the memory as its budget.
    """

    label: str
    sampler: str | None = None
    wrapped: bool = False

    @property
    def allocator(self) -> str:
        """Return the CPU allocator of its process."""
        return STRATEGIES["8GB" if self.wrapped else "stock-jemalloc"].allocator


WAYS = {
    "stock": Way("stock PyG, whole graph"),
    "wrapped": Way("gact_graph, whole graph", wrapped=True),
    "cluster": Way("stock PyG, batches of clusters", "cluster"),
    "neighbor": Way("stock PyG, `NeighborLoader`", "neighbor"),
    "wrapped-cluster": Way("gact_graph, batches of clusters", "cluster", wrapped=True),
}

_UNITS = {"cluster": f"of {CLUSTERS} clusters", "neighbor": "nodes and their neighbors"}
"""The unit of the size of a batch, by sampler."""


@dataclass(frozen=True)
class Training:
    """One training: the flags of the command, the way and the seed."""

    way: str
    model: str
    dataset: str
    data_root: str
    memory: int
    seconds: float
    seed: int


def run(training: Training) -> dict[str, Any]:
    """Train, with the largest batches whose peak is within the memory.

    Returns:
        The result of :func:`trained` and ``batch``, the size of a batch (None: the whole graph); or
        the ``reason`` if no batch is small enough.
    """
    way = WAYS[training.way]
    sizes: Sequence[int | None] = (None,) if way.sampler is None else BATCHES[way.sampler]
    for size in sizes:
        if size is not None:
            [tried] = _apart("tried", training, size, way)
            reason = tried.get("reason")
            if reason not in (None, OUT_OF_MEMORY):
                return {"reason": reason}
            if reason or tried["peak_bytes"] > training.memory:
                continue
        [result] = _apart("trained", training, size, way)
        return {"batch": size, **result}
    return {"reason": "no batch is small enough"}


def _apart(function: str, training: Training, size: int | None, way: Way) -> list[Any]:
    variables = environment(way.allocator)
    name = f"experiments.time_to_accuracy:{function}"
    return call_together(name, [(vars(training), size)], variables)


def tried(flags: dict[str, Any], size: int | None) -> dict[str, Any]:
    """Return ``peak_bytes`` of a few steps."""
    session = _Session(Training(**flags), size)
    with PeakMeter(session.task.x.device) as meter:
        for batch in itertools.islice(session.batches(), 8):
            session.step(batch)
        return {"peak_bytes": meter.peak_bytes}


def trained(flags: dict[str, Any], size: int | None) -> dict[str, Any]:
    """Train for some seconds, and evaluate the weights of several moments.

    Returns:
        ``peak_bytes`` over the start, ``steps``, and ``curve``: for each evaluation the
        ``seconds`` and ``epochs`` of training before it, and the ``val`` and ``test`` score, in
        [0, 1].
    """
    training = Training(**flags)
    session = _Session(training, size)
    kept: list[tuple[float, float, dict[str, Tensor]]] = []
    seconds, steps, seen = 0.0, 0, 0
    learning, apart = len(session.task.train_idx), training.seconds / _EVALUATIONS
    with PeakMeter(session.task.x.device) as meter:
        batches = session.batches()
        while seconds < training.seconds:
            start = time.perf_counter()
            batch = next(batches)
            session.step(batch)
            synchronize(session.task.x.device)
            seconds += time.perf_counter() - start
            steps, seen = steps + 1, seen + len(batch.train_idx)
            if seconds >= apart * (len(kept) + 1):
                kept.append((seconds, seen / learning, copy.deepcopy(session.model.state_dict())))
        peak = meter.peak_bytes
    curve = []
    for at, epochs, weights in kept:
        session.model.load_state_dict(weights)
        val, test = evaluate(session.model, session.task)
        curve.append({"seconds": at, "epochs": epochs, "val": val, "test": test})
    return {"peak_bytes": peak, "steps": steps, "curve": curve}


class _Session:
    """A model that is ready to train, its optimizer, and its batches."""

    def __init__(self, training: Training, size: int | None) -> None:
        way, subject = WAYS[training.way], SUBJECTS[ON_EDGES[training.model]]
        graph = load(training.dataset, training.data_root)
        self.task = prepare(graph, subject.layout)
        warm_up(self.task.x.device, compressed=way.wrapped)
        seed_everything(training.seed)
        self.model: nn.Module = subject.make(self.task.x.size(1), self.task.num_classes)
        layers = len(self.model.convs)  # type: ignore[arg-type]
        if way.wrapped:
            gact_graph.wrap(self.model, memory=training.memory, seed=training.seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=subject.lr)
        self._sampler = None
        if way.sampler is not None:
            self._sampler = make_sampler(way.sampler, self.task, layers, 0, 1, size)
        purge()  # else the first steps would reuse memory that loading and cutting freed

    def batches(self) -> Iterator[NodeTask]:
        """Yield batch after batch, epoch after epoch."""
        for epoch in itertools.count(1):
            yield from [self.task] if self._sampler is None else self._sampler(epoch)

    def step(self, batch: NodeTask) -> None:
        """Run forward, backward and update."""
        training_step(self.model, self._optimizer, batch)


def first_at(curve: Sequence[Mapping[str, float]], score: float) -> Mapping[str, float] | None:
    """Return the first point of a curve whose validation score is at least this."""
    return next((point for point in curve if point["val"] >= score), None)


def by_way(content: Mapping[str, Any]) -> Table:
    """Return one row per way: memory, time to each score, and the test score at the best one."""

    def reached(target: float) -> Column:
        def text(row: Mapping[str, Any]) -> str:
            points = [first_at(run["curve"], target) for run in row["runs"]]
            found = [point["seconds"] for point in points if point is not None]
            if len(found) < len(points):
                return "not reached" if not found else f"reached by {len(found)} of {len(points)}"
            low, high = min(found), max(found)
            return f"{low:,.0f} s" if low == high else f"{low:,.0f} to {high:,.0f} s"

        return f"{100 * target:g} %", text

    def best(row: Mapping[str, Any]) -> str:
        points = (max(run["curve"], key=lambda point: point["val"]) for run in row["runs"])
        scores = [100 * point["test"] for point in points]
        low, high = min(scores), max(scores)
        return f"{low:.2f} %" if low == high else f"{low:.2f} to {high:.2f} %"

    def batch(row: Mapping[str, Any]) -> str:
        size, unit = row["runs"][0]["batch"], _UNITS.get(row["sampler"], "")
        return "the graph" if size is None else f"{size:,} {unit}"

    spec: tuple[Column, ...] = (
        ("", "{label}"),
        ("batch", batch),
        ("peak, MB", lambda row: f"{max(run['peak_bytes'] for run in row['runs']) / 1e6:,.0f}"),
        ("s/epoch", lambda row: f"{_epoch_seconds(row['runs']):.1f}"),
        *(reached(target) for target in content["targets"]),
        ("test at the best", best),
    )
    rows = (
        {"label": WAYS[name].label, "sampler": WAYS[name].sampler, "runs": [*by_seed.values()]}
        for name, by_seed in content["runs"].items()
        if all("reason" not in run for run in by_seed.values())
    )
    return table(spec, rows)


def _epoch_seconds(runs: Sequence[Mapping[str, Any]]) -> float:
    lasts = [run["curve"][-1] for run in runs]
    return math.fsum(p["seconds"] for p in lasts) / math.fsum(p["epochs"] for p in lasts)


@command.main(
    command.choice("--model", ON_EDGES, "gat"),
    command.DATASET,
    command.DATA_ROOT,
    command.names("--ways", WAYS),
    command.needed(command.flag("--memory", parse_memory, text="as in 1GB", metavar="M")),
    command.flag("--seconds", parse_positive, 240.0, "of each training", metavar="S"),
    command.several("--targets", float, "0.65,0.7,0.72", "scores, in [0, 1]"),
    command.flag("--seeds", parse_seeds, "0", "also 0-2"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    kept = args.keep("time_to_accuracy.json", "model", "memory", "seconds")
    kept.content |= {"targets": args.targets}
    for seed in args.seeds:
        for way in args.ways:
            args.say(f"{way}, seed {seed}")
            given = (args.model, args.dataset, str(args.data_root), args.memory, args.seconds)
            result = kept.once(("runs", way, str(seed)), run, Training(way, *given, seed))
            if "reason" in result:
                args.say(f"  {result['reason']}")
    title = f"{LAYERS[ON_EDGES[args.model]]} on {kept.content['dataset']}"
    args.show(f"{title}: seconds to a validation accuracy", by_way(kept.content))


if __name__ == "__main__":
    raise SystemExit(main())

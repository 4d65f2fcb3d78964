"""The one way to measure a training: a few steps of a case in a process of its own.

A :class:`Case` says what to train and how; meters say what to measure of it. Steps are always
timed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gact_graph
from datasets import load
from experiments.helpers.allocators import HEAP, environment
from experiments.helpers.cap import set_cap
from experiments.helpers.process import call_together
from experiments.helpers.ranks import summed
from experiments.helpers.strategies import STRATEGIES, Trainee
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.train import synchronize, training_loss
from experiments.helpers.values import parse_device
from gact_graph.support.peak import PeakMeter


@dataclass(frozen=True)
class Case:
    """What to train, and how.

    Attributes:
        model: A name of :data:`experiments.helpers.subjects.SUBJECTS`.
        strategy: A name of :data:`experiments.helpers.strategies.STRATEGIES`.
        dataset: As ``--dataset`` takes it.
        data_root: Where named data sets lie.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        steps: Training steps; the first is not counted in the times.
        bits: Of the levels that quantize, where the strategy names none.
        adaptive: Whether bits are spent by sensitivity.
        hidden, layers: In place of the model's own (the width of a head, for attention).
        cap_bytes: Memory beyond what the process has before the first step, as
            :func:`experiments.helpers.cap.set_cap` counts it.
        allocator: A name of :data:`experiments.helpers.allocators.ALLOCATORS`.
        parts: Processes, each with a part of the graph; 0 takes the graph whole.
        cut: One of :data:`experiments.helpers.shares.PARTITIONS`.
        halo_bits: Of an element on its way to another process.
        threads: Of each process; None leaves that to the environment.
    """

    model: str
    strategy: str
    dataset: str
    data_root: str = "data"
    device: str = "cpu"
    steps: int = 4
    bits: int = 4
    adaptive: bool = False
    hidden: int | None = None
    layers: int | None = None
    cap_bytes: int | None = None
    allocator: str = "kept"
    parts: int = 0
    cut: str = "metis"
    halo_bits: int = 32
    threads: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in place of the model's own."""
        asked = {"hidden": self.hidden, "layers": self.layers}
        return {name: size for name, size in asked.items() if size is not None}


def run(case: Case, meters: Sequence[str] = ("saved",)) -> dict[str, Any]:
    """Return what :func:`measure` gave, or ``reason``, why it gave nothing."""
    return run_parts(case, meters)[0]


def run_parts(case: Case, meters: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The same for each process of a case with several parts."""
    missing = STRATEGIES[case.strategy].missing(parse_device(case.device))
    if missing is not None:
        return [{"reason": missing}]
    variables = environment(case.allocator)
    if case.cap_bytes is not None:
        variables.setdefault(*HEAP)
    if case.threads is not None:
        variables["OMP_NUM_THREADS"] = str(case.threads)
    if case.parts:
        variables["WORLD_SIZE"] = str(case.parts)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        calls = [(asdict(case), list(meters), rank, store) for rank in range(max(1, case.parts))]
        return call_together("experiments.helpers.runner:measure_apart", calls, variables)


def measure_apart(
    case: dict[str, Any], meters: Sequence[str], rank: int, store: str
) -> dict[str, Any]:
    """In a process of its own: join the processes of the other parts, and measure."""
    if case["parts"] <= 1:
        return measure(Case(**case), meters, rank)
    world = case["parts"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        found = measure(Case(**case), meters, rank)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def measure(case: Case, meters: Sequence[str] = ("saved",), rank: int = 0) -> dict[str, Any]:
    """Train, and return what that took.

    Args:
        case: What to train.
        meters: Names of :data:`METERS`.
        rank: Of several parts, which to train.

    Returns:
        ``peak_bytes`` over the start; ``step_seconds`` and ``step_process_seconds``, medians
        without the first step, by the clock and of this process alone; ``compile_seconds``, by how
        much the first step was longer than the others (None where nothing compiles);
        ``first_loss`` and ``loss``, of the first and the last step; and what the meters return.
    """
    device = parse_device(case.device)
    strategy = STRATEGIES[case.strategy]
    if strategy.ours:
        load_kernels(device)
    trainee = strategy.start(case, load(case.dataset, case.data_root), device, rank)
    trainee.model.train()
    optimizer = torch.optim.Adam(trainee.model.parameters(), lr=SUBJECTS[case.model].lr)
    chosen = [METERS[name](trainee) for name in meters]
    # The peak of a compiling step is the compiler's.
    skipped = 1 if strategy.compiles else 0
    seconds: list[tuple[float, float]] = []
    losses = []
    for _ in range(min(skipped, case.steps)):
        losses.append(_timed_step(trainee, optimizer, chosen, seconds))
    before = _allocated(device)  # the meter counts the graph and the model too
    with PeakMeter(device) as meter:
        if case.cap_bytes is not None:
            set_cap(device, case.cap_bytes)
        for _ in range(case.steps - skipped):
            losses.append(_timed_step(trainee, optimizer, chosen, seconds))
        peak = meter.peak_bytes
    wall, process = (statistics.median(t) for t in zip(*(seconds[1:] or seconds), strict=True))
    found = {
        "peak_bytes": None if peak is None else peak - before,
        "step_seconds": wall,
        "step_process_seconds": process,
        "compile_seconds": seconds[0][0] - wall if strategy.compiles else None,
        "first_loss": losses[0],
        "loss": losses[-1],
    }
    for each in chosen:
        found |= each.result()
    return found


def load_kernels(device: torch.device) -> None:
    """Load what stays in a process after its first compressed step, whatever the graph."""
    model = gact_graph.wrap(nn.Linear(64, 64).to(device), bits=4, adaptive=False, min_bytes=0)
    model(torch.ones(1024, 64, device=device) * 1).square().sum().backward()


class Meter:
    """Measures steps beside their time; does nothing by itself."""

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step."""
        yield

    def after_forward(self) -> None:
        """Measure between forward and backward."""

    def result(self) -> dict[str, Any]:
        """Return what the steps took."""
        return {}


class Saved(Meter):
    """``saved_bytes`` for backward on the device and, of the library's, ``raw_bytes``."""

    def result(self) -> dict[str, Any]:
        trainee = self.trainee
        raw = gact_graph.report(trainee.model).raw_bytes if trainee.wrapped else None
        return {"saved_bytes": trainee.saved_bytes(), "raw_bytes": raw}


class OnDevice(Meter):
    """``held_bytes`` from forward to backward, ``host_bytes`` in host memory, ``reserved_bytes``.

    All are None where they cannot be known: those of the device on a CPU, and those of host memory
    without the library.
    """

    held: int | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        self._before = _allocated(self.trainee.task.x.device)
        yield

    def after_forward(self) -> None:
        device = self.trainee.task.x.device
        if device.type == "cuda":
            synchronize(device)
            # Only when it is asked for memory does the allocator look which copies are done.
            torch.empty(1, device=device)
            self.held = _allocated(device) - self._before

    def result(self) -> dict[str, Any]:
        model, device = self.trainee.model, self.trainee.task.x.device
        report = gact_graph.report(model) if self.trainee.wrapped else None
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        host = None if report is None else report.host_bytes
        return {"held_bytes": self.held, "host_bytes": host, "reserved_bytes": reserved}


EXCHANGES = ("exchange_seconds", "exchange_process_seconds")


class Halo(Meter):
    """Of a part of the graph: its size, and what it sends to others in a step.

    ``nodes``, ``edges`` and ``halo`` of the part; ``sends``, the rows that it sends to each layer;
    ``forward_bytes`` and ``sent_bytes`` of a forward and of a whole step; ``exchanges`` of a step
    and the seconds in them, waiting for others included.
    """

    def __init__(self, trainee: Trainee) -> None:
        super().__init__(trainee)
        self._seconds: list[tuple[float, ...]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        waits: list[tuple[float, float]] = []
        exchange = dist.all_to_all_single

        def timed(*args: Any, **kwargs: Any) -> Any:
            with _clocks(waits):
                return exchange(*args, **kwargs)

        dist.all_to_all_single = timed
        try:
            yield
        finally:
            dist.all_to_all_single = exchange
        self._exchanges = len(waits)
        self._seconds.append(tuple(sum(clock) for clock in zip((0.0, 0.0), *waits, strict=True)))

    def after_forward(self) -> None:
        self._forward = gact_graph.report(self.trainee.model).halo_bytes or 0

    def result(self) -> dict[str, Any]:
        part: Any = self.trainee.part
        clocks = zip(*(self._seconds[1:] or self._seconds), strict=True)
        return {
            "nodes": len(part.nodes),
            "edges": part.edge_index.size(1),
            "halo": len(part.halo),
            "sends": len(part.send),
            "forward_bytes": self._forward,
            "sent_bytes": gact_graph.report(self.trainee.model).halo_bytes or 0,
            "exchanges": self._exchanges,
            **dict(zip(EXCHANGES, map(statistics.median, clocks), strict=True)),
        }


METERS: dict[str, Callable[[Trainee], Meter]] = {
    "saved": Saved,
    "device": OnDevice,
    "halo": Halo,
}


def _timed_step(
    trainee: Trainee,
    optimizer: torch.optim.Optimizer,
    meters: Sequence[Meter],
    seconds: list[tuple[float, float]],
) -> float:
    """Take a step, with the meters around it; return the loss of the whole graph."""
    with _clocks(seconds), ExitStack() as stack:
        for meter in meters:
            stack.enter_context(meter.step())
        optimizer.zero_grad(set_to_none=True)
        loss = training_loss(trainee.forward(), trainee.task, trainee.learning)
        for meter in meters:
            meter.after_forward()
        loss.backward()
        if trainee.part is not None:
            gact_graph.distributed.sum_gradients(trainee.model)
        optimizer.step()
        synchronize(trainee.task.x.device)
    return summed(loss.detach()).item()


@contextmanager
def _clocks(seconds: list[tuple[float, float]]) -> Iterator[None]:
    """Append the seconds inside, by the clock and of this process."""
    start = time.perf_counter(), time.process_time()
    yield
    seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))


def _allocated(device: torch.device) -> int:
    """Bytes on a CUDA device; 0 on a CPU. The host counts them: nothing is waited for."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

"""The one way to measure a training: a few steps of a case in a process of its own.

A :class:`Case` says what to train and how; meters say what to measure of it. Steps are always
timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from datasets import load
from experiments.helpers.allocators import HEAP, environment
from experiments.helpers.errors import ExperimentError
from experiments.helpers.meters import METERS, load_kernels, train
from experiments.helpers.process import call_together
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.values import parse_device


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
        rank: Which part this process trains.
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
    rank: int = 0

    @classmethod
    def of(cls, args: Any, **more: Any) -> Case:
        """Return a case with the flags of a command that bear the names of its attributes."""
        names = {field.name for field in fields(cls)}
        flags = {name: value for name, value in vars(args).items() if name in names} | more
        for name in flags.keys() & {"data_root", "device"}:
            flags[name] = str(flags[name])
        return cls(**flags)

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
    try:
        variables = environment(case.allocator)
    except ExperimentError as error:
        return [{"reason": f"failed: {error}"}]
    if case.cap_bytes is not None:
        variables.setdefault(*HEAP)
    if case.threads is not None:
        variables["OMP_NUM_THREADS"] = str(case.threads)
    if case.parts:
        variables["WORLD_SIZE"] = str(case.parts)
    with tempfile.TemporaryDirectory() as folder:
        calls = [
            (asdict(case) | {"rank": rank}, list(meters), str(Path(folder) / "store"))
            for rank in range(max(1, case.parts))
        ]
        return call_together("experiments.helpers.runner:measure_apart", calls, variables)


def measure_apart(case: dict[str, Any], meters: Sequence[str], store: str) -> dict[str, Any]:
    """In a process of its own: join the processes of the other parts, and measure."""
    world = case["parts"]
    if world <= 1:
        return measure(Case(**case), meters)
    address = f"file://{store}"
    dist.init_process_group("gloo", init_method=address, rank=case["rank"], world_size=world)
    try:
        found = measure(Case(**case), meters)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def measure(case: Case, meters: Sequence[str] = ("saved",)) -> dict[str, Any]:
    """Train, and return the time, the memory and the losses.

    Args:
        case: What to train.
        meters: Names of :data:`experiments.helpers.meters.METERS`.

    Returns:
        ``peak_bytes``, ``step_seconds`` and ``step_process_seconds`` (see
        :class:`experiments.helpers.meters.Steps`); ``compile_seconds``, by how much the first step
        was longer than the others (None where nothing compiles); ``first_loss`` and ``loss``, of
        the first and the last step; and the results of the meters.
    """
    device = parse_device(case.device)
    strategy = STRATEGIES[case.strategy]
    if strategy.ours:
        load_kernels(device)
    trainee = strategy.start(case, load(case.dataset, case.data_root), device)
    chosen = [METERS[name](trainee) for name in meters]
    lr = SUBJECTS[case.model].lr
    steps = train(trainee, case.steps, lr, chosen, case.cap_bytes, strategy.compiles)
    compile_seconds = steps.seconds[0] - steps.medians["step_seconds"]
    found = {
        "peak_bytes": steps.peak_bytes,
        **steps.medians,
        "compile_seconds": compile_seconds if strategy.compiles else None,
        "first_loss": steps.losses[0],
        "loss": steps.losses[-1],
    }
    for meter in chosen:
        found |= meter.result()
    return found

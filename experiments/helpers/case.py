"""A training to measure, as values that travel to a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Case:
    """A model on a graph, and the way to train it.

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

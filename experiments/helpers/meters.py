"""Timed training steps of a network, with meters around each step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Data

import gact_graph
from experiments.helpers.process import purge, set_cap
from experiments.helpers.ranks import summed
from experiments.helpers.train import take_step
from gact_graph.support.clock import synchronize
from gact_graph.support.peak import PeakMeter
from gact_graph.support.storage import parts_of

Meter = Callable[[], AbstractContextManager[Any]]
"""Returns the context manager around a step."""


@dataclass
class Trainee:
    """A network that is ready to train.

    Attributes:
        model: The network.
        loss: Runs forward on the next batch and returns the loss.
        device: Where it trains.
        saved_bytes: Counts the bytes that a forward saves for backward, on the device.
        wrapped: Whether the library has wrapped the model.
        part: The part of the graph, if several processes share one.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    saved_bytes: Callable[[], int] = lambda: 0
    wrapped: bool = False
    part: Data | None = None


@dataclass
class Steps:
    """Each step's loss and seconds, by the clock and of this process; and the peak over the start.

    The medians leave out the first step, in which kernels load and caches fill. A CUDA device holds
    ``held_bytes`` from forward to backward. A part of a graph sends ``forward_bytes`` in forward;
    ``exchanges`` has both times of each exchange, by step.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    process_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    held_bytes: int | None = None
    forward_bytes: int = 0
    exchanges: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def medians(self) -> dict[str, float]:
        """Return ``step_seconds`` and ``step_process_seconds``."""
        return _medians("step", zip(self.seconds, self.process_seconds, strict=True))


def train(
    trainee: Trainee,
    steps: int,
    lr: float,
    meters: Sequence[Meter] = (),
    cap_bytes: int | None = None,
    compiles: bool = False,
) -> Steps:
    """Train with Adam, and measure each step, with further meters around it.

    ``cap_bytes`` limits the memory, see :func:`experiments.helpers.process.set_cap`. If the first
    step ``compiles``, its peak is the compiler's and does not count.
    """
    model, device, is_part = trainee.model.train(), trainee.device, trainee.part is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    taken = Steps()

    def count_sent() -> None:
        if is_part:
            taken.forward_bytes = gact_graph.report(model).halo_bytes or 0

    def count_held() -> None:
        synchronize(device)
        # The allocator checks for finished copies only when it allocates.
        torch.empty(1, device=device)
        taken.held_bytes = _allocated(device) - before

    def step() -> None:
        with ExitStack() as stack:
            for meter in meters:
                stack.enter_context(meter())
            start = _clocks()
            with _timed_exchanges() as exchanges:
                loss = take_step(model, optimizer, trainee.loss, count_sent, is_part)
            synchronize(device)
            wall, process = _since(start)
        taken.seconds.append(wall)
        taken.process_seconds.append(process)
        taken.exchanges.append(exchanges)
        taken.losses.append((summed(loss) if is_part else loss).item())

    if compiles:
        step()
    purge()  # else the steps below would reuse memory that is kept from before
    before = _allocated(device)  # the meter counts the graph and the model too
    with PeakMeter(device) as meter:
        if cap_bytes is not None:
            set_cap(device, cap_bytes)
        for _ in range(steps - compiles):
            step()
        peak = meter.peak_bytes
    taken.peak_bytes = None if peak is None else peak - before
    if device.type == "cuda":
        before = _allocated(device)
        take_step(model, optimizer, trainee.loss, count_held, is_part)  # not timed: it waits
    return taken


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module, inputs: Iterable[Tensor]) -> int:
    """Count the bytes that one forward saves for backward in training mode.

    Each storage counts once; parameters, buffers and inputs do not count.
    """
    own = [*model.parameters(), *model.buffers(), *inputs]
    known = {part.untyped_storage().data_ptr() for tensor in own for part in parts_of(tensor)}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # the address of a freed tensor would be used again

    def pack(tensor: Tensor) -> Tensor:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
                kept.append(part.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        output = forward()
    del output
    return sum(sizes.values())


def warm_up(device: torch.device, compressed: bool = True) -> None:
    """Load everything that stays in a process after its first step, on any graph."""
    model = nn.Linear(64, 64).to(device)
    if compressed:
        gact_graph.wrap(model, bits=4, adaptive=False, min_bytes=0)
    model(torch.ones(1024, 64, device=device) * 1).square().sum().backward()


@contextmanager
def _timed_exchanges() -> Iterator[list[tuple[float, float]]]:
    """Time the exchanges with other processes, waiting for them included."""
    times: list[tuple[float, float]] = []
    exchange = dist.all_to_all_single

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = _clocks()
        result = exchange(*args, **kwargs)
        times.append(_since(start))
        return result

    with mock.patch.object(dist, "all_to_all_single", timed):
        yield times


def memory_of(trainee: Trainee, steps: Steps) -> dict[str, Any]:
    """Return the bytes of a step.

    Returns:
        ``saved_bytes`` for backward on the device; ``held_bytes`` and ``reserved_bytes`` of a CUDA
        device; ``raw_bytes`` and ``host_bytes`` of the library's strategies. Others are None.
    """
    cuda = trainee.device.type == "cuda"
    report = gact_graph.report(trainee.model) if trainee.wrapped else None
    return {
        "saved_bytes": trainee.saved_bytes(),
        "raw_bytes": report and report.raw_bytes,
        "held_bytes": steps.held_bytes,
        "host_bytes": report and report.host_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(trainee.device) if cuda else None,
    }


def halo_of(trainee: Trainee, steps: Steps) -> dict[str, Any]:
    """Return the size of a part of the graph, and the bytes that it sends to others in a step.

    Returns:
        ``nodes``, ``edges`` and ``halo`` of the part; ``sends``, the rows that it sends to each
        layer; ``forward_bytes`` and ``sent_bytes`` of a forward and of a whole step; ``exchanges``
        of a step and the seconds in them.
    """
    part: Any = trainee.part
    sums = ([sum(t) for t in zip((0.0, 0.0), *e, strict=True)] for e in steps.exchanges)
    return {
        "nodes": len(part.nodes),
        "edges": part.edge_index.size(1),
        "halo": len(part.halo),
        "sends": len(part.send),
        "forward_bytes": steps.forward_bytes,
        "sent_bytes": gact_graph.report(trainee.model).halo_bytes or 0,
        "exchanges": len(steps.exchanges[-1]),
        **_medians("exchange", sums),
    }


def _medians(name: str, clocks: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return medians by the clock and of this process, without the first step."""
    walls, processes = zip(*clocks, strict=True)
    medians = (statistics.median(clock[1:] or clock) for clock in (walls, processes))
    return dict(zip((f"{name}_seconds", f"{name}_process_seconds"), medians, strict=True))


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    wall, process = _clocks()
    return wall - start[0], process - start[1]


def _allocated(device: torch.device) -> int:
    """Return the bytes on a CUDA device; 0 on a CPU. The host counts them without waiting."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

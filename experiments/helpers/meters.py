"""Steps of a network, timed, with meters around each of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Data

import gact_graph
from experiments.helpers.process import set_cap
from experiments.helpers.ranks import summed
from experiments.helpers.train import synchronize, take_step
from gact_graph.support.peak import PeakMeter
from gact_graph.support.storage import parts_of


@dataclass
class Trainee:
    """A network that is ready to train.

    Attributes:
        model: The network.
        loss: Runs forward on the next batch and returns the loss.
        device: Where it trains.
        saved_bytes: Counts the bytes that a forward saves for backward, on the device.
        wrapped: Whether the library has wrapped the model.
        part: The part of the graph, where several processes share one.
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

    The medians leave out the first step, in which kernels load and caches fill.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    process_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def medians(self) -> dict[str, float]:
        """``step_seconds`` and ``step_process_seconds``."""
        clocks = {"step_seconds": self.seconds, "step_process_seconds": self.process_seconds}
        return {name: statistics.median(clock[1:] or clock) for name, clock in clocks.items()}


def train(
    trainee: Trainee,
    steps: int,
    lr: float,
    meters: Sequence[Meter] = (),
    cap_bytes: int | None = None,
    compiles: bool = False,
) -> Steps:
    """Train with Adam, with meters around each step.

    ``cap_bytes`` limits the memory, see :func:`experiments.helpers.process.set_cap`. If the first
    step ``compiles``, its peak is the compiler's and does not count.
    """
    trainee.model.train()
    optimizer = torch.optim.Adam(trainee.model.parameters(), lr=lr)
    taken = Steps()

    def after_forward() -> None:
        for meter in meters:
            meter.after_forward()

    def step() -> None:
        with ExitStack() as stack:
            for meter in meters:
                stack.enter_context(meter.step())
            start = _clocks()
            is_part = trainee.part is not None
            loss = take_step(trainee.model, optimizer, trainee.loss, after_forward, is_part)
            synchronize(trainee.device)
            wall, process = _clocks()
            taken.seconds.append(wall - start[0])
            taken.process_seconds.append(process - start[1])
        taken.losses.append((summed(loss) if is_part else loss).item())

    if compiles:
        step()
    before = _allocated(trainee.device)  # the meter counts the graph and the model too
    with PeakMeter(trainee.device) as meter:
        if cap_bytes is not None:
            set_cap(trainee.device, cap_bytes)
        for _ in range(steps - compiles):
            step()
        peak = meter.peak_bytes
    taken.peak_bytes = None if peak is None else peak - before
    return taken


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module, inputs: Iterable[Tensor]) -> int:
    """Count the bytes that one forward saves for backward in training mode.

    Each storage counts once; parameters, buffers and inputs do not count.
    """
    own = [*model.parameters(), *model.buffers(), *inputs]
    known = {part.untyped_storage().data_ptr() for tensor in own for part in parts_of(tensor)}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # an address is given again once its tensor is gone

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


def load_kernels(device: torch.device) -> None:
    """Load what stays in a process after its first compressed step, whatever the graph."""
    model = gact_graph.wrap(nn.Linear(64, 64).to(device), bits=4, adaptive=False, min_bytes=0)
    model(torch.ones(1024, 64, device=device) * 1).square().sum().backward()


class Meter:
    """A measurement of steps beside their time; the base class measures nothing."""

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step."""
        yield

    def after_forward(self) -> None:
        """Measure between forward and backward."""

    def result(self) -> dict[str, Any]:
        """Return the measurements, by name."""
        return {}


class Saved(Meter):
    """``saved_bytes`` for backward on the device and, of the library's, ``raw_bytes``."""

    def result(self) -> dict[str, Any]:
        trainee = self.trainee
        raw = gact_graph.report(trainee.model).raw_bytes if trainee.wrapped else None
        return {"saved_bytes": trainee.saved_bytes(), "raw_bytes": raw}


class OnDevice(Meter):
    """``held_bytes`` from forward to backward, ``host_bytes`` in host memory, ``reserved_bytes``.

    On a CPU those of the device are None; without the library those of host memory are.
    """

    held: int | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        self._before = _allocated(self.trainee.device)
        yield

    def after_forward(self) -> None:
        device = self.trainee.device
        if device.type == "cuda":
            synchronize(device)
            # Only when it is asked for memory does the allocator look which copies are done.
            torch.empty(1, device=device)
            self.held = _allocated(device) - self._before

    def result(self) -> dict[str, Any]:
        model, device = self.trainee.model, self.trainee.device
        host = gact_graph.report(model).host_bytes if self.trainee.wrapped else None
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        return {"held_bytes": self.held, "host_bytes": host, "reserved_bytes": reserved}


class Halo(Meter):
    """The size of a part of the graph, and the bytes that it sends to others in a step.

    ``nodes``, ``edges`` and ``halo`` of the part; ``sends``, the rows that it sends to each layer;
    ``forward_bytes`` and ``sent_bytes`` of a forward and of a whole step; ``exchanges`` of a step
    and the seconds in them, waiting for others included.
    """

    def __init__(self, trainee: Trainee) -> None:
        super().__init__(trainee)
        self._seconds: list[tuple[float, float]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        waits = []
        exchange = dist.all_to_all_single

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = _clocks()
            result = exchange(*args, **kwargs)
            end = _clocks()
            waits.append((end[0] - start[0], end[1] - start[1]))
            return result

        dist.all_to_all_single = timed
        try:
            yield
        finally:
            dist.all_to_all_single = exchange
        self._exchanges = len(waits)
        self._seconds.append((sum(wait[0] for wait in waits), sum(wait[1] for wait in waits)))

    def after_forward(self) -> None:
        self._forward = gact_graph.report(self.trainee.model).halo_bytes or 0

    def result(self) -> dict[str, Any]:
        part: Any = self.trainee.part
        wall, process = zip(*(self._seconds[1:] or self._seconds), strict=True)
        return {
            "nodes": len(part.nodes),
            "edges": part.edge_index.size(1),
            "halo": len(part.halo),
            "sends": len(part.send),
            "forward_bytes": self._forward,
            "sent_bytes": gact_graph.report(self.trainee.model).halo_bytes or 0,
            "exchanges": self._exchanges,
            "exchange_seconds": statistics.median(wall),
            "exchange_process_seconds": statistics.median(process),
        }


METERS: dict[str, Callable[[Trainee], Meter]] = {"saved": Saved, "device": OnDevice, "halo": Halo}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _allocated(device: torch.device) -> int:
    """Bytes on a CUDA device; 0 on a CPU. The host counts them: nothing is waited for."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

"""A few training steps of one model in a process of its own: time, memory, or that it did not fit.

The parent calls :func:`run_trial`; the child is
``python -m experiments.helpers.trial SPECIFICATION``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import gact_graph
from datasets import load
from experiments.helpers.cap import ended_by_memory, set_cap
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.errors import ExperimentError
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.train import seed_everything, synchronize, training_loss
from experiments.helpers.values import parse_device
from experiments.helpers.variants import VARIANTS, apply
from gact_graph.support.peak import PeakMeter

_TICK = 0.05  # seconds between two points of the curve


@dataclass(frozen=True)
class Specification:
    """What to train.

    Attributes:
        model: A name of :data:`experiments.helpers.subjects.SUBJECTS`.
        variant: A name of :data:`experiments.helpers.variants.VARIANTS`.
        dataset: As ``--dataset`` takes it.
        data_root: Where named data sets lie.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        bits: For the levels that quantize.
        steps: Training steps; the first is not counted in the time.
        hidden: In place of the model's own width (of a head, for attention); None: that.
        layers: In place of its depth.
        cap_bytes: Memory beyond what the process has before the first step, as
            :func:`experiments.helpers.cap.set_cap` counts it; None: no cap.
        adaptive: Whether bits are spent by sensitivity. Replays take no more memory than steps.
    """

    model: str
    variant: str
    dataset: str
    data_root: str = "data"
    device: str = "cpu"
    bits: int = 4
    steps: int = 3
    hidden: int | None = None
    layers: int | None = None
    cap_bytes: int | None = None
    adaptive: bool = False


HEAP = ("MALLOC_MMAP_THRESHOLD_", str(4 << 20))
"""Set under a cap: tensors of 4 MB or more are no part of glibc's heap then.

There small objects that live until backward settle in the gaps of freed tensors, which serve no
other one from then on: of whatever is freed some part would count all the same, also of stock.
"""


def run_trial(specification: Specification) -> dict[str, Any] | None:
    """What :func:`measure` gave in a fresh process; None if the memory did not suffice.

    Raises:
        ExperimentError: If the process failed for another reason.
    """
    command = [sys.executable, "-m", "experiments.helpers.trial", json.dumps(asdict(specification))]
    environment = dict(os.environ)
    if specification.cap_bytes is not None:
        environment.setdefault(*HEAP)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
        return found
    if ended_by_memory(done.returncode, done.stderr):
        return None
    last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    raise ExperimentError(f"a trial of {specification.variant} failed: {last}")


def measure(specification: Specification) -> dict[str, Any]:
    """Train, and return peak, time, saved bytes and the memory over the last step.

    Returns:
        ``peak_bytes`` over the start, ``step_seconds`` (median but for the first step),
        ``raw_bytes`` and ``saved_bytes`` (of the library's report; None without), ``curve``
        ([seconds, bytes over the start] of the last step) and ``forward_seconds`` of it.
        On CUDA also ``held_bytes``, what the last forward left on the device beside its output,
        and ``reserved_bytes``, the most that the allocator took from the device, graph and model
        included; both None on the CPU.
    """
    device = parse_device(specification.device)
    subject = SUBJECTS[specification.model]
    graph = load(specification.dataset, specification.data_root)
    task = prepare(graph, subject.layout, device=device)
    del graph
    seed_everything(0)
    sizes = {"hidden": specification.hidden, "layers": specification.layers}
    chosen = {name: size for name, size in sizes.items() if size is not None}
    model = subject.make(task.x.size(1), task.num_classes, **chosen).to(device)
    variant = VARIANTS[specification.variant]
    apply(model, variant, specification.bits, specification.adaptive)
    _load_libraries(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    seconds: list[float] = []
    with PeakMeter(device) as meter:
        before = _allocated(device)  # the meter counts the graph and the model too
        if specification.cap_bytes is not None:
            set_cap(device, specification.cap_bytes)
        for _ in range(specification.steps):
            curve = _Curve(lambda: _over(meter.current_bytes(), before))
            start = time.perf_counter()
            forward, held = _step(model, optimizer, task, curve)
            seconds.append(time.perf_counter() - start)
    report = gact_graph.report(model) if variant.level else None
    return {
        "peak_bytes": _over(meter.peak_bytes, before),
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "raw_bytes": report and report.raw_bytes,
        "saved_bytes": report and report.stored_bytes,
        "held_bytes": held,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        "forward_seconds": forward,
        "curve": curve.points,
    }


def _load_libraries(device: torch.device) -> None:
    """What a process has for ever after its first compressed step, whatever the graph."""
    model = gact_graph.wrap(nn.Linear(64, 64).to(device), bits=4, adaptive=False, min_bytes=0)
    model(torch.ones(1024, 64, device=device) * 1).square().sum().backward()


def _allocated(device: torch.device) -> int:
    """Bytes on a CUDA device; 0 on the CPU. They are counted on the host: nothing is waited for."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _over(found: int | None, before: int) -> int | None:
    return None if found is None else found - before


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: NodeTask, curve: _Curve
) -> tuple[float, int | None]:
    """One step; returns the seconds of its forward, and on CUDA the bytes that it left."""
    device = task.x.device
    with curve:
        start = time.perf_counter()
        model.train()
        optimizer.zero_grad(set_to_none=True)
        before = _allocated(device)
        output = model(task.x, task.adjacency)
        held = _allocated(device) - before - output.untyped_storage().nbytes()
        loss = training_loss(output, task)
        del output  # as in a loop that keeps the loss alone
        synchronize(device)
        forward = time.perf_counter() - start
        curve.look()
        loss.backward()
        optimizer.step()
        synchronize(device)
    return forward, held if device.type == "cuda" else None


class _Curve:
    """Memory over time, looked at by a thread and where :meth:`look` is called."""

    def __init__(self, current: Callable[[], int | None]) -> None:
        self.points: list[tuple[float, int | None]] = []
        self._current = current
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Curve:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Add a point: a step on a GPU may be over before the thread has looked once."""
        self.points.append((round(time.perf_counter() - self._start, 4), self._current()))

    def _watch(self) -> None:
        while not self._stop.wait(_TICK):
            self.look()


def main(argv: list[str]) -> int:
    """The child process."""
    print(json.dumps(measure(Specification(**json.loads(argv[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

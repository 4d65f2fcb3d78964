"""A few training steps of one model in a process of its own: time, memory, or that it did not fit.

The parent calls :func:`run_trial`; the child is ``python -m experiments.trial SPECIFICATION``.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gact_graph
from datasets import load
from experiments.data import NodeTask, prepare
from experiments.errors import ExperimentError
from experiments.peak import PeakMeter
from experiments.subjects import SUBJECTS
from experiments.train import seed_everything, synchronize, training_loss
from experiments.values import parse_device
from experiments.variants import VARIANTS, apply

_TICK = 0.05  # seconds between two points of the curve


@dataclass(frozen=True)
class Specification:
    """What to train.

    Attributes:
        model: A name of :data:`experiments.subjects.SUBJECTS`.
        variant: A name of :data:`experiments.variants.VARIANTS`.
        dataset: As ``--dataset`` takes it.
        data_root: Where named data sets lie.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        bits: For the levels that quantize.
        steps: Training steps; the first is not counted in the time.
        hidden: In place of the model's own width (of a head, for attention); None: that.
        layers: In place of its depth.
        cap_bytes: Memory beyond what the process has before the first step; None: no cap.
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


def run_trial(specification: Specification) -> dict[str, Any] | None:
    """What :func:`measure` gave in a fresh process; None if the memory did not suffice.

    Raises:
        ExperimentError: If the process failed for another reason.
    """
    command = [sys.executable, "-m", "experiments.trial", json.dumps(asdict(specification))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
        return found
    # Some libraries end the process where they get no memory.
    if any(words in done.stderr for words in _NO_MEMORY) or done.returncode in (-6, -9):
        return None
    last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    raise ExperimentError(f"a trial of {specification.variant} failed: {last}")


_NO_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "out of memory")


def measure(specification: Specification) -> dict[str, Any]:
    """Train, and return peak, time, saved bytes and the memory over the last step.

    Returns:
        ``peak_bytes`` over the start, ``step_seconds`` (median but for the first step),
        ``saved_bytes`` (of the library's report; None without), ``curve`` ([seconds, bytes over the
        start] of the last step) and ``forward_seconds`` of it.
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
    _load_libraries()
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    seconds: list[float] = []
    with PeakMeter(device) as meter:
        if specification.cap_bytes is not None:
            _cap(device, specification.cap_bytes)
        for _ in range(specification.steps):
            curve = _Curve(meter.current_bytes)
            start = time.perf_counter()
            forward = _step(model, optimizer, task, curve)
            seconds.append(time.perf_counter() - start)
    return {
        "peak_bytes": meter.peak_bytes,
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "saved_bytes": gact_graph.report(model).stored_bytes if variant.level else None,
        "forward_seconds": forward,
        "curve": curve.points,
    }


def _load_libraries() -> None:
    """What a process has for ever after its first compressed step, whatever the graph."""
    model = gact_graph.wrap(nn.Linear(64, 64), bits=4, adaptive=False)
    model(torch.ones(1024, 64) * 1).square().sum().backward()


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: NodeTask, curve: _Curve
) -> float:
    """One step; returns the seconds of its forward."""
    with curve:
        start = time.perf_counter()
        model.train()
        optimizer.zero_grad(set_to_none=True)
        loss = training_loss(model(task.x, task.adjacency), task)
        synchronize(task.x.device)
        forward = time.perf_counter() - start
        loss.backward()
        optimizer.step()
        synchronize(task.x.device)
    return forward


class _Curve:
    """Memory over time, looked at by a thread."""

    def __init__(self, look: Callable[[], int | None]) -> None:
        self.points: list[tuple[float, int | None]] = []
        self._look = look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Curve:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_TICK):
            self.points.append((round(time.perf_counter() - self._start, 3), self._look()))


def _cap(device: torch.device, cap: int) -> None:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (torch.cuda.memory_allocated(device) + cap) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        return
    # Of its own writable memory: RLIMIT_AS would count the libraries' code too.
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if "VmData" in s)
    limit = int(line.split()[1]) * 1024 + cap
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(argv: list[str]) -> int:
    """The child process."""
    print(json.dumps(measure(Specification(**json.loads(argv[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

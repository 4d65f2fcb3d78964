"""What swapping saved tensors to host memory gains and costs: GACT's Table 4, with the peak.

``python -m experiments.swap --model gat --dataset FILE.npz --out DIR`` prints a table and writes it
as JSON. It needs a CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import gact_graph
from datasets import load
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.errors import ExperimentError
from experiments.helpers.options import Parser
from experiments.helpers.results import current_versions
from experiments.helpers.subjects import (
    SUBJECTS,
    Subject,
    add_graph_flags,
    exit_code,
    make,
    wrap_at,
    write_json,
)
from experiments.helpers.summary import dataset_name
from experiments.helpers.train import synchronize, training_loss
from experiments.helpers.values import parse_bits, parse_count, parse_device
from gact_graph.support.peak import PeakMeter

HEAD = ("", "held, MB", "in host memory, MB", "peak, MB", "s/step", "it / fp32")


@dataclass(frozen=True)
class Way:
    """One way to keep saved tensors.

    Attributes:
        level: gact_graph's level; None leaves the model as it is.
        prefetch: Whether level L2 brings tensors back before they are asked for.
        hooks: Gives the context in which forward runs.
    """

    level: str | None = None
    prefetch: bool = True
    hooks: type[AbstractContextManager[Any]] = contextlib.nullcontext


class _OnCpu(save_on_cpu):
    """torch's own swapping: what is saved goes to pinned memory as it is."""

    def __init__(self) -> None:
        super().__init__(pin_memory=True)


WAYS = {
    "fp32": Way(),
    "fp32, save_on_cpu": Way(hooks=_OnCpu),
    "L1": Way("L1"),
    "L2 without prefetch": Way("L2", prefetch=False),
    "L2": Way("L2"),
}


def main(argv: list[str] | None = None) -> int:
    """Measure and show; return the exit code as the main job does."""
    return exit_code("swap", lambda: _run(argv))


def measure(subject: Subject, task: NodeTask, way: Way, bits: int, steps: int) -> dict[str, Any]:
    """Train ``steps`` steps after one that warms up.

    Returns:
        ``held_bytes`` of the device that a forward leaves for backward, ``host_bytes`` that the
        library's report finds in host memory (None without it), ``peak_bytes`` (see
        :class:`gact_graph.support.peak.PeakMeter`), ``seconds`` of each step and
        ``step_seconds``, their median.
    """
    model = make(subject, task)
    if way.level is not None:
        wrap_at(model, way.level, bits)
        swapping = vars(model)["forward"].controller.swapping
        if swapping is not None:
            swapping.prefetch = way.prefetch
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    seconds: list[float] = []
    with PeakMeter(task.x.device) as meter:
        for _ in range(steps + 1):
            start = time.perf_counter()
            _step(model, optimizer, task, way)
            seconds.append(time.perf_counter() - start)
        held = _held_bytes(model, task, way, meter)
    report = gact_graph.report(model) if way.level is not None else None
    return {
        "held_bytes": held,
        "host_bytes": None if report is None else report.host_bytes,
        "peak_bytes": meter.peak_bytes,
        "seconds": seconds[1:],
        "step_seconds": statistics.median(seconds[1:]),
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`HEAD`; each way is compared with ``fp32``."""
    stock = found["fp32"]["step_seconds"]
    return [
        (
            name,
            _megabytes(result["held_bytes"]),
            _megabytes(result["host_bytes"]),
            _megabytes(result["peak_bytes"]),
            f"{result['step_seconds']:.3f}",
            f"{result['step_seconds'] / stock:.2f}x",
        )
        for name, result in found.items()
    ]


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.0f}"


def _held_bytes(model: nn.Module, task: NodeTask, way: Way, meter: PeakMeter) -> int | None:
    """What one more forward takes until its backward."""
    gc.collect()
    before = _current_bytes(task, meter)
    with way.hooks():
        loss = training_loss(model(task.x, task.adjacency), task)
    after = _current_bytes(task, meter)
    del loss
    return None if before is None or after is None else after - before


def _current_bytes(task: NodeTask, meter: PeakMeter) -> int | None:
    synchronize(task.x.device)
    # Only when it is asked for memory does the allocator look which copies are done.
    torch.empty(1, device=task.x.device)
    return meter.current_bytes()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, task: NodeTask, way: Way) -> None:
    model.train()
    optimizer.zero_grad(set_to_none=True)
    with way.hooks():
        loss = training_loss(model(task.x, task.adjacency), task)
    loss.backward()
    optimizer.step()
    synchronize(task.x.device)


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    if args.device.type != "cuda":
        raise ExperimentError(
            f"Expected a CUDA device, which saved tensors could leave (got {args.device}): "
            "elsewhere L2 equals L1, which experiments.memory measures"
        )
    subject = SUBJECTS[args.model]
    task = prepare(load(args.dataset, args.data_root), subject.layout, device=args.device)
    console = make_console()
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        say(console, name)
        found[name] = measure(subject, task, way, args.bits, args.steps)
        gc.collect()
        torch.cuda.empty_cache()
    show_and_write(found, args)


def show_and_write(found: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> None:
    """Print the table, and write all that was found to ``swap.json``."""
    console = make_console()
    name = dataset_name(args.dataset)
    console.print(make_table(f"{args.model} on {name}, {args.bits} bit", HEAD, table(found)))
    say(
        console, f"{args.steps} steps, {args.device}; held: by the device, from forward to backward"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    head = {"model": args.model, "bits": args.bits, "steps": args.steps, "dataset": name}
    head |= {"device": str(args.device), "versions": current_versions()}
    write_json(args.out / "swap.json", head | {"ways": found})


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.swap", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--model", choices=tuple(SUBJECTS), default="gat", help="default: gat")
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument("--steps", type=parse_count, default=10, metavar="N", help="default: 10")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    return args


if __name__ == "__main__":
    sys.exit(main())

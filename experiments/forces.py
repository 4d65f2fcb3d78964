"""Potentials whose forces are in the loss: memory, time, exactness and physics of each level.

``python -m experiments.forces --out DIR``

Each potential at each level trains a few steps in a process of its own. The energies, forces and
gradients of its next step are compared with those of stock. A copy in float64 is then checked on
one molecule: forces against central finite differences of the energy, the asymmetry of the second
derivative, and the energy over a short simulation. ``DIR`` gets ``forces.json``.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gact_graph
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.forces_tables import HEAD, PHYSICS_HEAD, physics_rows, rows
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.peers.counting import saved_bytes
from experiments.helpers.potentials import POTENTIALS, molecules, plain_neighbours
from experiments.helpers.subjects import choose, exit_code, write_json
from experiments.helpers.train import seed_everything
from experiments.helpers.values import FP32_BITS, parse_count
from experiments.helpers.variants import VARIANTS, apply
from gact_graph.support.peak import PeakMeter

WAYS = {
    "stock": ("stock", FP32_BITS),
    "lossless": ("lossless", FP32_BITS),
    "L1-8": ("L1+blocks", 8),
    "L1-4": ("L1+blocks", 4),
    "L1-2": ("L1+blocks", 2),
    "CB1-4": ("CB1", 4),
    "CB2-4": ("CB2", 4),
}
"""A variant and its bits, by name."""

_STEP = 1e-5
"""Of finite differences: truncation and rounding are both near 1e-10 in float64."""


def measure(name: str, way: str, batch: int, atoms: int, steps: int, size: int) -> dict[str, Any]:
    """Train one potential and check it.

    Args:
        name: One of :data:`experiments.helpers.potentials.POTENTIALS`.
        way: One of :data:`WAYS`.
        batch: Molecules of a step.
        atoms: Atoms of a molecule.
        steps: Training steps; the first is not timed.
        size: Channels.

    Returns:
        ``peak_bytes`` over the start, ``saved_bytes``, ``step_seconds`` (the median),
        ``energy_error``, ``forces_error`` and ``gradient_error`` relative to stock, and
        what :func:`physics` returns.
    """
    with plain_neighbours():
        seed_everything(0)
        model = POTENTIALS[name](size).train()
        _wrap(model, way)
        # Libraries and kernels stay in memory after the first step of a process.
        _load_libraries()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        seconds = []
        with PeakMeter(torch.device("cpu")) as meter:
            for step in range(steps):
                inputs = molecules(batch, atoms, step)
                start = time.perf_counter()
                optimizer.zero_grad(set_to_none=True)
                _loss(model(*inputs)).backward()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
        inputs = molecules(batch, atoms, steps)
        return {
            "peak_bytes": meter.peak_bytes,
            "saved_bytes": _saved(model, way, inputs),
            "step_seconds": statistics.median(seconds[1:] or seconds),
            **_errors(model, way, inputs),
            **_physics_of(name, way, size),
        }


def physics(model: Callable[..., Any], atoms: int = 10, steps: int = 100) -> dict[str, float]:
    """Check one molecule in float64.

    Returns:
        ``difference_error``, the largest distance of a force from a central difference of the
        energy over the largest force; ``curl``, max|H - H^T| / max|H| of the derivative of the
        forces; ``drift``, the range of the total energy over ``steps`` of velocity Verlet, relative
        to the mean kinetic energy.
    """
    z, pos, batch = molecules(1, atoms, 3, torch.float64)

    def evaluate(at: Tensor) -> tuple[Tensor, Tensor]:
        energy, forces = model(z, at.clone(), batch)
        return energy.detach().sum(), forces.detach()

    forces = evaluate(pos)[1]
    slopes, columns = [], []
    for unit in torch.eye(pos.numel(), dtype=pos.dtype):
        step = _STEP * unit.view_as(pos)
        (up, forces_up), (down, forces_down) = evaluate(pos + step), evaluate(pos - step)
        slopes.append((up - down) / (2 * _STEP))
        columns.append((forces_up - forces_down).flatten() / (2 * _STEP))
    slope, hessian = torch.stack(slopes), torch.stack(columns)
    generator = torch.Generator().manual_seed(4)
    velocity = 0.05 * torch.randn(pos.shape, dtype=pos.dtype, generator=generator)
    dt, now, totals, kinetic = 0.01, forces, [], []
    for _ in range(steps):
        velocity = velocity + 0.5 * dt * now
        pos = pos + dt * velocity
        energy, now = evaluate(pos)
        velocity = velocity + 0.5 * dt * now
        kinetic.append(0.5 * float(velocity.square().sum()))
        totals.append(float(energy) + kinetic[-1])
    return {
        "difference_error": float((forces.flatten() + slope).abs().max() / forces.abs().max()),
        "curl": float((hessian - hessian.t()).abs().max() / hessian.abs().max()),
        "drift": (max(totals) - min(totals)) / statistics.fmean(kinetic),
    }


def _wrap(model: nn.Module, way: str) -> None:
    variant, bits = WAYS[way]
    apply(model, VARIANTS[variant], bits, adaptive=False)


def _loss(found: tuple[Tensor, Tensor]) -> Tensor:
    energy, forces = found
    return energy.square().mean() + forces.square().mean()


def _load_libraries() -> None:
    model = gact_graph.wrap(nn.Linear(64, 64), bits=4, adaptive=False, min_bytes=0)
    model(torch.ones(1024, 64) * 1).square().sum().backward()


def _saved(model: nn.Module, way: str, inputs: tuple[Tensor, ...]) -> int:
    if way == "stock":
        return saved_bytes(lambda: _loss(model(*inputs)), model, inputs)
    return gact_graph.report(model).stored_bytes


def _errors(model: nn.Module, way: str, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    stock = copy.deepcopy(model)
    if way != "stock":
        gact_graph.unwrap(stock)
    found = []
    for one in (model, stock):
        one.zero_grad(set_to_none=True)
        energy, forces = one(*inputs)
        _loss((energy, forces)).backward()
        gradient = [p.grad.flatten() for p in one.parameters() if p.grad is not None]
        found.append((energy.detach(), forces.detach(), torch.cat(gradient)))
    keys = ("energy_error", "forces_error", "gradient_error")
    return {
        key: float((got - expected).norm() / expected.norm())
        for key, got, expected in zip(keys, *found, strict=True)
    }


def _physics_of(name: str, way: str, size: int) -> dict[str, float]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # PyG's ViSNet makes tensors of the default type
    try:
        seed_everything(0)
        model = POTENTIALS[name](size).double().train()
        _wrap(model, way)
        for step in range(2):  # levels compress from the first backward on
            _loss(model(*molecules(2, 10, step, torch.float64))).backward()
        return physics(model)
    finally:
        torch.set_default_dtype(before)


def _measure_apart(threads: int, *settings: Any) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return measure(*settings)


def main(argv: list[str] | None = None) -> int:
    """Measure and show; return the exit code as the main job does."""
    return exit_code("forces", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    console = make_console()
    args.out.mkdir(parents=True, exist_ok=True)
    head = {key: getattr(args, key) for key in ("batch", "atoms", "steps", "size")}
    sizes = tuple(head.values())
    head |= {"threads": torch.get_num_threads()} | origin("forces", argv)
    found: dict[str, dict[str, Any]] = {}
    for name in args.models:
        ways = found.setdefault(name, {})
        for way in args.levels:
            say(console, f"{name}, {way}")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                ways[way] = pool.apply(_measure_apart, (torch.get_num_threads(), name, way, *sizes))
            # After each, so that the numbers so far survive.
            write_json(args.out / "forces.json", head | {"models": found})
    console.print(make_table("Training with forces in the loss", HEAD, rows(found)))
    console.print(make_table("Physics in float64", PHYSICS_HEAD, physics_rows(found)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.forces", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(POTENTIALS), help="default: all")
    parser.add_argument("--levels", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument(
        "--batch", type=parse_count, default=32, metavar="N", help="molecules (default: 32)"
    )
    parser.add_argument(
        "--atoms", type=parse_count, default=20, metavar="N", help="of a molecule (default: 20)"
    )
    parser.add_argument("--steps", type=parse_count, default=4, metavar="N", help="default: 4")
    parser.add_argument("--size", type=parse_count, default=64, metavar="N", help="channels")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.models = choose("--models", args.models, POTENTIALS)
    args.levels = choose("--levels", args.levels, WAYS)
    return args


if __name__ == "__main__":
    sys.exit(main())

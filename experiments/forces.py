"""Potentials whose forces are in the loss: memory, time, exactness and physics of each level.

``python -m experiments.forces --out DIR``

Each potential at each level trains a few steps in a process of its own, stock PyG under jemalloc,
which keeps freed memory as the library does. The energies, forces and gradients of the next step
are compared with those of stock. A copy in float64 is then checked on one molecule: forces against
central finite differences of the energy, the asymmetry of the second derivative, and the energy
over a short simulation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gact_graph
from experiments.helpers import command
from experiments.helpers.errors import ExperimentError
from experiments.helpers.levels import Level
from experiments.helpers.meters import Trainee, saved_bytes, train, warm_up
from experiments.helpers.peers import dgl_layers
from experiments.helpers.process import call_together, environment
from experiments.helpers.strategies import LABELS
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.train import gradient_of, seed_everything
from experiments.models.potentials import POTENTIALS, molecules, plain_neighbors

WAYS = {
    "stock": None,
    "dgl": None,
    "lossless": Level("lossless", "auto"),
    "L1-8": Level("L1", "auto", 8),
    "L1-4": Level("L1", "auto", 4),
    "L1-2": Level("L1", "auto", 2),
    "CB2-4": Level("CB2", "auto", 4),
    "CB2-4-no-blocks": Level("CB2", bits=4),
}

_NAMES = {"schnet": "SchNet", "dimenet++": "DimeNet++", "visnet": "ViSNet", "mace": "MACE-like"}


def _relative(key: str) -> Callable[[Any], str]:
    return lambda row: f"{row[key]:.0e}" if row[key] else "0"


_WHO: tuple[Column, ...] = (("", "{net}"), ("", "{way}"))

COSTS: tuple[Column, ...] = (
    *_WHO,
    ("peak, MB", "{peak_bytes:MB}"),
    ("saved, MB", "{saved_bytes:MB}"),
    ("s/step", "{step_seconds:.2f}"),
    # Errors relative to stock.
    *((name, _relative(f"{name}_error")) for name in ("energy", "forces", "gradient")),
)

PHYSICS: tuple[Column, ...] = (
    *_WHO,
    ("finite differences", "{difference_error:.1e}"),
    ("curl", "{curl:.1e}"),
    ("energy drift", "{drift:.1e}"),
)

_STEP = 1e-5
"""Step of finite differences: truncation and rounding are both near 1e-10 in float64."""


def by_way(spec: tuple[Column, ...], measured: dict[str, dict[str, Any]]) -> Table:
    """Return :data:`COSTS` or :data:`PHYSICS`, one row for each potential and level."""

    def label(way: str) -> str:
        level = WAYS[way]
        return LABELS[f"{way}-jemalloc"] if level is None else level.label

    return table(
        spec,
        (
            {"net": _NAMES[name], "way": label(way), **result}
            for name, ways in measured.items()
            for way, result in ways.items()
        ),
    )


def measure(name: str, way: str, batch: int, atoms: int, steps: int, size: int) -> dict[str, Any]:
    """Train one potential and check it.

    Args:
        name: A name of :data:`experiments.models.potentials.POTENTIALS`.
        way: A name of :data:`WAYS`.
        batch: Molecules per step.
        atoms: Atoms per molecule.
        steps: Training steps; the first is not timed.
        size: Channels.

    Returns:
        ``peak_bytes`` over the start, ``saved_bytes``, ``step_seconds`` (the median),
        ``energy_error``, ``forces_error`` and ``gradient_error`` relative to stock, and
        the result of :func:`physics`.
    """
    with plain_neighbors():
        seed_everything(0)
        model = POTENTIALS[name](size).train()
        _wrap(model, way)
        warm_up(torch.device("cpu"), compressed=WAYS[way] is not None)
        batches = iter([molecules(batch, atoms, step) for step in range(steps)])
        measured = train(Trainee(model, lambda: _loss(model(*next(batches)))), steps, lr=1e-4)
        inputs = molecules(batch, atoms, steps)
        return {
            "peak_bytes": measured.peak_bytes,
            "saved_bytes": _saved(model, way, inputs),
            "step_seconds": measured.medians["step_seconds"],
            **_errors(model, POTENTIALS[name](size).train(), inputs),
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


def _apart(*case: Any) -> Any:
    try:
        variables = environment("jemalloc-tuned" if WAYS[case[1]] is None else "kept")
    except ExperimentError as error:
        return {"reason": f"failed: {error}"}
    return call_together("experiments.forces:measure", [case], variables)[0]


def _wrap(model: nn.Module, way: str) -> None:
    level = WAYS[way]
    if level is not None:
        level.wrap(model, adaptive=True)
    elif way == "dgl":
        dgl_layers.replace_filters(model)


def _loss(output: tuple[Tensor, Tensor]) -> Tensor:
    energy, forces = output
    return energy.square().mean() + forces.square().mean()


def _saved(model: nn.Module, way: str, inputs: tuple[Tensor, ...]) -> int:
    if WAYS[way] is None:
        return saved_bytes(lambda: _loss(model(*inputs)), model, inputs)
    return gact_graph.report(model).stored_bytes


def _errors(model: nn.Module, stock: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    for own, trained in zip(stock.parameters(), model.parameters(), strict=True):
        own.data.copy_(trained.data)
    results = []
    for net in (model, stock):
        net.zero_grad(set_to_none=True)
        energy, forces = net(*inputs)
        _loss((energy, forces)).backward()
        results.append((energy.detach(), forces.detach(), gradient_of(net)))
    keys = ("energy_error", "forces_error", "gradient_error")
    return {
        key: float((got - expected).norm() / expected.norm())
        for key, got, expected in zip(keys, *results, strict=True)
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


@command.main(
    command.names("--models", POTENTIALS),
    command.names("--levels", WAYS),
    command.number("--batch", 32, "molecules"),
    command.number("--atoms", 20, "of a molecule"),
    command.number("--steps", 4),
    command.number("--size", 64, "channels"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    sizes = ("batch", "atoms", "steps", "size")
    kept = args.keep("forces.json", *sizes)
    asked = [getattr(args, size) for size in sizes]
    measured: dict[str, dict[str, Any]] = {}
    for name in args.models:
        for way in args.levels:
            args.say(f"{name}, {way}")
            result = kept.once(("models", name, way), _apart, name, way, *asked)
            if "reason" in result:
                args.say(f"  {result['reason']}")
            else:
                measured.setdefault(name, {})[way] = result
    args.show("Training with forces in the loss", by_way(COSTS, measured))
    args.show("Physics in float64", by_way(PHYSICS, measured))


if __name__ == "__main__":
    raise SystemExit(main())

"""Which slots need bits, what adaptive bits gain, and how that changes while a model trains.

``python -m experiments.sensitivity --model gat --dataset FILE.npz --bits 4 --epochs 60 --out DIR``

The study of the GACT paper's Figure 3. A model trains with adaptive bits; at some epochs all
sensitivities are measured, and at the end the variance that compression adds to the gradient, by
repeated draws of the noise, with adaptive bits and with the same bits everywhere.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import gact_graph
from datasets import load
from experiments.helpers.algorithm_1 import algorithm_1
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.draws import Draws
from experiments.helpers.moments import moments
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.plot import require_matplotlib
from experiments.helpers.sensitivity_plots import plot_evolution, plot_sensitivities, plot_variances
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
from experiments.helpers.train import seed_everything, training_loss, training_step
from experiments.helpers.values import parse_bits, parse_count, parse_device


class Probe(Draws):
    """Runs one training step of a wrapped model again and again, with other noise.

    Args:
        model: A wrapped model.
        task: What it trains on.
    """

    def __init__(self, model: nn.Module, task: NodeTask) -> None:
        def loss() -> Tensor:
            seed_everything(0)
            return training_loss(model(task.x, task.adjacency), task)

        model.train()
        super().__init__(model, loss)
        self()
        self.report = gact_graph.report(model)

    def sensitivities(self, number: int = 0) -> dict[str, float]:
        """c_l of every quantized slot, over the squared length of the gradient."""
        self.number = number
        bits = {row.slot: row.bits for row in self.report.contexts if row.bits is not None}
        return algorithm_1(bits, bits.__getitem__, self)


def gradient_variance(draw: Callable[[int], Tensor], draws: int, exact: Tensor) -> float:
    """The variance of a gradient over draws of the noise, over the squared length of ``exact``.

    Args:
        draw: Gives the gradient [P] for the number of a draw.
        draws: How many, at least 3.
        exact: The gradient [P] without noise.
    """
    return moments(draw, draws, exact).variance


def least_variance(sensitivities: Sequence[float], sizes: Sequence[int], bits: float) -> float:
    r"""What no allocation of ``bits`` an element on average can go below.

    .. math::
        \sum_l c_l S(b_l) \ge \sum_l c_l 4^{-b_l} \ge
        D \, 4^{-b} \prod_l (c_l / D_l)^{D_l / D}, \qquad D = \sum_l D_l,

    as S(b) is above :math:`4^{-b}`, and by the inequality of weighted means; widths need not be
    whole or positive here. So adaptive bits gain as much as the sensitivities an element differ.

    Args:
        sensitivities: c_l of each slot, above 0.
        sizes: D_l, its elements.
        bits: The average b.
    """
    total = sum(sizes)
    logarithms = (size * math.log(c / size) for c, size in zip(sensitivities, sizes, strict=True))
    return total * 4.0**-bits * math.exp(sum(logarithms) / total)


def study(
    subject: Subject, task: NodeTask, bits: int, epochs: int, points: int, draws: int
) -> dict[str, Any]:
    """Train, measure, and return everything that the plots show, JSON-ready."""
    model = wrap_at(make(subject, task), "L1", bits, adaptive=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    every = max(1, epochs // points)
    evolution: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        training_step(model, optimizer, task)
        if epoch % every == 0 or (epoch == 1 and points > 1):
            found = Probe(_unwrapped_copy(model, bits), task).sensitivities()
            evolution.append({"epoch": epoch, "sensitivity": found})
    slots = [
        {"slot": row.slot, "bits": row.bits, "elements": row.numel, "sensitivity": c}
        for row in gact_graph.report(model).contexts
        if row.bits is not None and (c := evolution[-1]["sensitivity"].get(row.slot))
    ]
    return {
        "slots": slots,
        "evolution": evolution,
        "least_variance": least_variance(
            [slot["sensitivity"] for slot in slots], [slot["elements"] for slot in slots], bits
        ),
        "variance": _variances(model, task, bits, draws),
    }


def _variances(model: nn.Module, task: NodeTask, bits: int, draws: int) -> list[dict[str, Any]]:
    exact = Probe(_unwrapped_copy(model, None), task).gradient(0)
    schemes: list[tuple[str, nn.Module]] = [(f"adaptive {bits} bit", _refreshed(model, task, bits))]
    schemes += [(f"uniform {b} bit", _unwrapped_copy(model, b)) for b in (bits, 2 * bits)]
    found = []
    for name, candidate in schemes:
        probe = Probe(candidate, task)
        variance = gradient_variance(probe.gradient, draws, exact)
        stored = sum(r.stored_bytes for r in probe.report.contexts if r.bits is not None)
        found.append({"scheme": name, "variance": variance, "quantized_bytes": stored})
    return found


def _unwrapped_copy(model: nn.Module, bits: int | None) -> nn.Module:
    """The model with the same bits everywhere, or none quantized."""
    other = gact_graph.unwrap(copy.deepcopy(model))
    return wrap_at(other, "lossless" if bits is None else "L1", bits or 32)


def _refreshed(model: nn.Module, task: NodeTask, bits: int) -> nn.Module:
    """The model with adaptive bits, measured where it stands now."""
    other = wrap_at(gact_graph.unwrap(copy.deepcopy(model)), "L1", bits, adaptive=True)
    training_loss(other(task.x, task.adjacency), task).backward()
    return other


def main(argv: list[str] | None = None) -> int:
    """Run the study; write three plots and a JSON; return the exit code as the main job does."""
    return exit_code("sensitivity", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    require_matplotlib()
    subject = SUBJECTS[args.model]
    task = prepare(load(args.dataset, args.data_root), subject.layout, device=args.device)
    found = study(subject, task, args.bits, args.epochs, args.points, args.draws)
    args.out.mkdir(parents=True, exist_ok=True)
    head = {name: getattr(args, name) for name in ("model", "bits", "epochs", "draws")}
    head |= {"dataset": dataset_name(args.dataset), "threads": torch.get_num_threads()}
    write_json(args.out / "sensitivity.json", head | origin("sensitivity", argv) | found)
    plot_sensitivities(found["slots"], args.out / "sensitivities.png")
    plot_variances(found["variance"], args.out / "variance.png")
    plot_evolution(found["evolution"], args.out / "evolution.png")
    _show(make_console(), found, args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.sensitivity", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--model", choices=tuple(SUBJECTS), default="gat", help="default: gat")
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument("--epochs", type=parse_count, default=60, metavar="N", help="default: 60")
    parser.add_argument(
        "--points",
        type=parse_count,
        default=6,
        metavar="N",
        help="sweeps; one is at the end (default: 6)",
    )
    parser.add_argument(
        "--draws", type=parse_count, default=20, metavar="N", help="of the noise (default: 20)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    return args


def _show(console: Console, found: dict[str, Any], args: argparse.Namespace) -> None:
    rows = [(s["slot"], str(s["bits"]), f"{s['sensitivity']:.3g}") for s in found["slots"]]
    console.print(make_table(f"{args.model} on {args.dataset}", ("slot", "bits", "c_l"), rows))
    rows = [
        (v["scheme"], f"{v['variance']:.3g}", f"{v['quantized_bytes'] / 1e6:.1f}")
        for v in found["variance"]
    ]
    head = ("scheme", "variance / squared gradient", "quantized MB")
    console.print(make_table("What compression adds to the gradient", head, rows))
    say(
        console,
        f"by the sensitivities above no {args.bits} bits on average add less than "
        f"{found['least_variance']:.3g}",
    )
    say(console, f"{args.draws} draws, {torch.get_num_threads()} threads, {args.device}")


if __name__ == "__main__":
    sys.exit(main())

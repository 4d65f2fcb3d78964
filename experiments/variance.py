"""Whether measured sensitivities are true: against the variance over many draws of the noise.

``python -m experiments.variance --dataset digits --draws 2000 --out DIR``

For each slot of a small GAT, the variance that Algorithm 1 of the GACT paper predicts from two
draws beside that over many draws with the slot alone quantized; and for all slots together, the
variance over many draws beside the sum of the single ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import gact_graph
from datasets import load
from experiments.data import NodeTask, prepare
from experiments.display import make_console, make_table, say
from experiments.models import GAT
from experiments.options import Parser
from experiments.plot import require_matplotlib
from experiments.results import current_versions
from experiments.sensitivity import Probe, gradient_variance
from experiments.sensitivity_plots import plot_agreement, plot_sum
from experiments.subjects import add_graph_flags, exit_code, write_json
from experiments.train import seed_everything
from experiments.values import parse_bits, parse_count, parse_device
from gact_graph.allocator import noise

_SWEEPS = 10
"""Sweeps of Algorithm 1 whose mean is compared: one alone is a single draw of a random number."""


def check(task: NodeTask, bits: int, draws: int) -> dict[str, Any]:
    """Return predicted and true variances by slot, and those of all slots, over ||g||^2."""
    exact = Probe(_model(task, {"*": 32}, bits), task).gradient(0)
    together = Probe(_model(task, {}, bits), task)
    sweeps = [together.sensitivities(number) for number in range(_SWEEPS)]
    widths = {row.slot: row.bits for row in together.report.contexts if row.bits is not None}
    slots = []
    for slot, width in widths.items():
        alone = Probe(_model(task, {slot: width, "*": 32}, bits), task)
        predicted = sum(sweep[slot] for sweep in sweeps) / _SWEEPS * noise(width)
        true = gradient_variance(alone.gradient, draws, exact)
        slots.append({"slot": slot, "bits": width, "predicted": predicted, "true": true})
    return {
        "slots": slots,
        "sum_of_single": sum(s["true"] for s in slots),
        "together": gradient_variance(together.gradient, draws, exact),
    }


def _model(task: NodeTask, pin: dict[str, int], bits: int) -> nn.Module:
    seed_everything(0)
    model = GAT(task.x.size(1), 8, task.num_classes, 2, heads=2).to(task.x.device)
    return gact_graph.wrap(model, bits=bits, adaptive=False, pin=pin)


def main(argv: list[str] | None = None) -> int:
    """Measure; write two plots and a JSON; return the exit code as the main job does."""
    return exit_code("variance", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    require_matplotlib()
    task = prepare(load(args.dataset, args.data_root), "edge_index", device=args.device)
    found = check(task, args.bits, args.draws)
    args.out.mkdir(parents=True, exist_ok=True)
    head = {name: getattr(args, name) for name in ("dataset", "bits", "draws")}
    write_json(args.out / "variance.json", head | {"versions": current_versions()} | found)
    plot_agreement(found["slots"], args.out / "agreement.png")
    plot_sum(found, args.out / "sum.png")
    _show(make_console(), found, args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.variance", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument(
        "--draws", type=parse_count, default=2000, metavar="N", help="of the noise (default: 2000)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    return args


def _show(console: Console, found: dict[str, Any], args: argparse.Namespace) -> None:
    rows = [
        (s["slot"], str(s["bits"]), f"{s['predicted']:.3e}", f"{s['true']:.3e}")
        for s in found["slots"]
    ]
    head = ("slot", "bits", "by Algorithm 1", f"over {args.draws} draws")
    console.print(make_table("Variance over the squared gradient", head, rows))
    together, single = found["together"], found["sum_of_single"]
    say(console, f"all slots together {together:.3e}, sum of the single ones {single:.3e}")
    say(console, f"{args.dataset}, {torch.get_num_threads()} threads, {args.device}")


if __name__ == "__main__":
    sys.exit(main())

"""Whether measured sensitivities are true: against the variance over many draws of the noise.

``python -m experiments.variance --dataset digits --draws 2000 --out DIR``
``python -m experiments.variance --model gat --norm BatchNorm --bits 2 --total --out DIR``

For each slot of a small model, the variance that Algorithm 1 of the GACT paper predicts from two
draws beside that over many draws with the slot alone quantized; and for all slots together, the
variance over many draws beside the sum of the single ones. Beside each variance, the bias: how far
the mean gradient is from the exact one, over its length. It is estimated from products of
independent means, as the length of a mean has a floor of sqrt(variance / draws).

``--total`` measures all slots together alone, which takes as many steps as there are draws.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch_geometric.nn import models

import gact_graph
from datasets import load
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.moments import Moments, moments
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.plot import require_matplotlib
from experiments.helpers.sensitivity_plots import plot_agreement, plot_sum
from experiments.helpers.subjects import add_graph_flags, exit_code, write_json
from experiments.helpers.train import seed_everything
from experiments.helpers.values import parse_bits, parse_count, parse_device
from experiments.models import GAT
from experiments.sensitivity import Probe
from gact_graph.adaptive.allocator import noise

Subject = Callable[[int, int], nn.Module]

_SWEEPS = 10
"""Sweeps of Algorithm 1 whose mean is compared: one alone is a single draw of a random number."""


def check(
    subject: Subject, task: NodeTask, bits: int, draws: int, total: bool = False
) -> dict[str, Any]:
    """Return predicted and true variances by slot, and those of all slots, over ||g||^2.

    Beside each is the bias over ||g||; its square may be estimated below 0, and counts as 0 then.
    With ``total`` no slot is measured alone.
    """
    exact = Probe(_model(subject, task, {"*": 32}, bits), task).gradient(0)
    together = Probe(_model(subject, task, {}, bits), task)
    singles = {} if total else _singles(subject, task, bits, draws, exact, together)
    found = moments(together.gradient, draws, exact)
    return {
        **singles,
        "together": found.variance,
        "stored_bytes": sum(row.stored_bytes for row in together.report.contexts),
    } | _bias(found)


def _singles(
    subject: Subject, task: NodeTask, bits: int, draws: int, exact: Tensor, together: Probe
) -> dict[str, Any]:
    """What each slot adds, with the others exact."""
    sweeps = [together.sensitivities(number) for number in range(_SWEEPS)]
    widths = {row.slot: row.bits for row in together.report.contexts if row.bits is not None}
    slots: list[dict[str, Any]] = []
    for slot, width in widths.items():
        alone = Probe(_model(subject, task, {slot: width, "*": 32}, bits), task)
        predicted = sum(sweep[slot] for sweep in sweeps) / _SWEEPS * noise(width)
        found = moments(alone.gradient, draws, exact)
        slots.append(
            {"slot": slot, "bits": width, "predicted": predicted, "true": found.variance}
            | _bias(found)
        )
    return {"slots": slots, "sum_of_single": sum(s["true"] for s in slots)}


def _bias(found: Moments) -> dict[str, float]:
    return {
        "bias": found.bias,
        "bias_squared": found.bias_squared,
        "bias_squared_error": found.error,
        "floor": found.floor,
    }


def _small_gat(i: int, o: int) -> nn.Module:
    # Batch norm and ReLU are its own.
    return GAT(i, 8, o, 2, heads=2)


def _basic(cls: Callable[..., nn.Module], **own: Any) -> Callable[..., nn.Module]:
    """Three layers of 64, with dropout, of PyG's models."""
    return lambda i, o, **options: cls(i, 64, 3, o, dropout=0.5, **own, **options)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "small-gat": _small_gat,
    "gcn": _basic(models.GCN),
    "sage": _basic(models.GraphSAGE),
    "sage-max": _basic(models.GraphSAGE, aggr="max"),
    "gat": _basic(models.GAT, heads=4),
    "gatv2": _basic(models.GAT, heads=4, v2=True),
}


def _model(subject: Subject, task: NodeTask, pin: dict[str, int], bits: int) -> nn.Module:
    seed_everything(0)
    model = subject(task.x.size(1), task.num_classes).to(task.x.device)
    return gact_graph.wrap(model, bits=bits, adaptive=False, blocks=False, pin=pin, min_bytes=0)


def main(argv: list[str] | None = None) -> int:
    """Measure; write a JSON and, of slots, two plots; return the exit code as the main job does."""
    return exit_code("variance", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    if not args.total:
        require_matplotlib()
    task = prepare(load(args.dataset, args.data_root), "edge_index", device=args.device)
    options = {} if args.model == "small-gat" else {"norm": args.norm, "act": args.act}
    subject = functools.partial(MODELS[args.model], **options)
    found = check(subject, task, args.bits, args.draws, args.total)
    args.out.mkdir(parents=True, exist_ok=True)
    head = {
        name: getattr(args, name) for name in ("model", "norm", "act", "dataset", "bits", "draws")
    }
    head["threads"] = torch.get_num_threads()
    write_json(args.out / "variance.json", head | origin("variance", argv) | found)
    if not args.total:
        plot_agreement(found["slots"], args.out / "agreement.png")
        plot_sum(found, args.out / "sum.png")
    _show(make_console(), found, args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.variance", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="small-gat", help="default: small-gat"
    )
    parser.add_argument(
        "--norm", metavar="N", help="of PyG's models: BatchNorm, LayerNorm, GraphNorm ..."
    )
    parser.add_argument(
        "--act", default="relu", metavar="A", help="of PyG's models: relu, gelu, elu ..."
    )
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument(
        "--draws", type=parse_count, default=2000, metavar="N", help="of the noise (default: 2000)"
    )
    parser.add_argument(
        "--total", action="store_true", help="measure no slot alone: much faster, without plots"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    return args


def _show(console: Console, found: dict[str, Any], args: argparse.Namespace) -> None:
    if not args.total:
        _show_singles(console, found, args)
    say(console, f"variance of all slots together {found['together']:.3e}")
    say(
        console,
        f"bias {100 * found['bias']:.2f} % of the gradient "
        f"(squared {found['bias_squared']:.1e}, standard error {found['bias_squared_error']:.1e}); "
        f"a mean of {args.draws} draws without bias is {100 * found['floor']:.2f} % off",
    )
    say(console, f"{args.dataset}, {torch.get_num_threads()} threads, {args.device}")


def _show_singles(console: Console, found: dict[str, Any], args: argparse.Namespace) -> None:
    rows = [
        (
            s["slot"],
            str(s["bits"]),
            f"{s['predicted']:.3e}",
            f"{s['true']:.3e}",
            f"{100 * s['bias']:.2f} %",
        )
        for s in found["slots"]
    ]
    head = ("slot", "bits", "by Algorithm 1", f"over {args.draws} draws", "bias")
    console.print(make_table("Variance over the squared gradient", head, rows))
    say(console, f"sum of the variances of single slots {found['sum_of_single']:.3e}")


if __name__ == "__main__":
    sys.exit(main())

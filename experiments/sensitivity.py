"""The sensitivities of slots and the gain of adaptive bits, during the training of a model.

``python -m experiments.sensitivity --model gat --dataset FILE.npz --bits 4 --epochs 60 --out DIR``

This is the study of Figure 3 of the GACT paper. A model trains with adaptive bits. All
sensitivities are measured at some epochs. At the end, repeated draws of the noise measure the
variance that compression adds to the gradient, with adaptive bits and with the same bits
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import gact_graph
from datasets import load
from experiments.helpers import command
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.errors import UsageError
from experiments.helpers.levels import LEVELS_BY_NAME
from experiments.helpers.noise import Probe, moments, plain
from experiments.helpers.plot import plot_evolution, plot_sensitivities, require_matplotlib
from experiments.helpers.subjects import SUBJECTS, make
from experiments.helpers.tables import Column, table
from experiments.helpers.train import training_step

_EXACT, _LEVEL = LEVELS_BY_NAME["lossless"], LEVELS_BY_NAME["L1"]

_SLOTS: tuple[Column, ...] = (
    ("slot", "{slot}"),
    ("bits", "{bits}"),
    ("c_l", "{sensitivity:.3g}"),
)

_VARIANCE: tuple[Column, ...] = (
    ("scheme", "{scheme}"),
    ("variance / squared gradient", "{variance:.3g}"),
    ("quantized MB", "{quantized_bytes:1MB}"),
)


def least_variance(sensitivities: Sequence[float], sizes: Sequence[int], bits: float) -> float:
    r"""Return a lower bound over all allocations of ``bits`` per element on average.

    .. math::
        \sum_l c_l S(b_l) \ge \sum_l c_l 4^{-b_l} \ge
        D \, 4^{-b} \prod_l (c_l / D_l)^{D_l / D}, \qquad D = \sum_l D_l,

    because S(b) is above :math:`4^{-b}`, and by the inequality of weighted means; widths need not
    be whole or positive here. So adaptive bits gain as much as sensitivities per element differ.

    Args:
        sensitivities: c_l of each slot, above 0.
        sizes: D_l, its elements.
        bits: The average b.
    """
    total = sum(sizes)
    logarithms = (size * math.log(c / size) for c, size in zip(sensitivities, sizes, strict=True))
    return total * 4.0**-bits * math.exp(sum(logarithms) / total)


def study(args: command.Args, task: NodeTask) -> dict[str, Any]:
    """Train and measure; return everything that the plots show."""
    subject = SUBJECTS[args.model]
    model = _LEVEL.wrap(make(subject, task), args.bits, adaptive=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    every = max(1, args.epochs // args.points)
    evolution: list[dict[str, Any]] = []
    for epoch in range(1, args.epochs + 1):
        training_step(model, optimizer, task)
        if epoch % every == 0 or (epoch == 1 and args.points > 1):
            results = Probe(_LEVEL.wrap(plain(model), args.bits), task).sensitivities()
            evolution.append({"epoch": epoch, "sensitivity": results})
    slots = [
        {"slot": row.slot, "bits": row.bits, "elements": row.numel, "sensitivity": c}
        for row in gact_graph.report(model).contexts
        if row.bits is not None and (c := evolution[-1]["sensitivity"].get(row.slot))
    ]
    sensitivities, sizes = ([slot[key] for slot in slots] for key in ("sensitivity", "elements"))
    return {
        "slots": slots,
        "evolution": evolution,
        "least_variance": least_variance(sensitivities, sizes, args.bits),
        "variance": _variances(model, task, args.bits, args.draws),
    }


def _variances(model: nn.Module, task: NodeTask, bits: int, draws: int) -> list[dict[str, Any]]:
    exact = Probe(_EXACT.wrap(plain(model)), task).gradient(0)
    adaptive = _LEVEL.wrap(plain(model), bits, adaptive=True)
    # The bits of the training: those of a single measurement are more cautious.
    gact_graph.load_state_dict(adaptive, gact_graph.state_dict(model))
    schemes = {f"adaptive {bits} bit": adaptive}
    schemes |= {f"uniform {b} bit": _LEVEL.wrap(plain(model), b) for b in (bits, 2 * bits)}
    results = []
    for name, candidate in schemes.items():
        probe = Probe(candidate, task)
        variance = moments(probe.gradient, draws, exact)["variance"]
        stored = sum(r.stored_bytes for r in probe.report.contexts if r.bits is not None)
        results.append({"scheme": name, "variance": variance, "quantized_bytes": stored})
    return results


@command.main(
    *command.GRAPH,
    command.choice("--model", SUBJECTS, "gat"),
    command.BITS,
    command.number("--epochs", 60),
    command.number("--points", 6, "sweeps; the last is at the end"),
    command.draws(20),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    if args.bits not in (*range(1, 9), 16):
        raise UsageError(
            f"Expected --bits whose double is a width too, 1 to 8 or 16 (got {args.bits})"
        )
    require_matplotlib()
    layout = SUBJECTS[args.model].layout
    task = prepare(load(args.dataset, args.data_root), layout, device=args.device)
    kept = args.keep("sensitivity.json", "model", "bits", "epochs", "points", "draws")
    if "slots" not in kept.content:
        kept.content |= study(args, task)
        kept.write()
    results = kept.content
    plot_sensitivities(results["slots"], args.out / "sensitivities.png")
    plot_evolution(results["evolution"], args.out / "evolution.png")
    args.show(f"{args.model} on {args.dataset}", table(_SLOTS, results["slots"]))
    title = "The noise of compression in the gradient"
    args.show(title, table(_VARIANCE, results["variance"]))
    args.say(
        f"by the sensitivities above no {args.bits} bits on average add less than "
        f"{results['least_variance']:.3g}; {args.draws} draws, {results['threads']} threads, "
        f"{args.device}"
    )


if __name__ == "__main__":
    raise SystemExit(main())

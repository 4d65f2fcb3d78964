"""Measured sensitivities beside the variance over many draws of the noise.

``python -m experiments.variance --dataset digits --draws 2000 --out DIR``
``python -m experiments.variance --model gat --norm BatchNorm --bits 2 --total --out DIR``

For each slot of a small model, the variance that Algorithm 1 of the GACT paper predicts from two
draws beside that over many draws with the slot alone quantized; and for all slots together, the
variance over many draws beside the sum of the single ones. Beside each variance, the bias: how far
the mean gradient is from the exact one, over its length. It is estimated from products of
independent means, as the length of a mean has a floor of sqrt(variance / draws).

``--total`` measures all slots together alone, which takes as many steps as there are draws.

``--averaged`` trains some steps with exact gradients, and compares the average of the last
gradients, each weighted by 0.9 of the next, with that of compressed gradients along the way: with
fresh noise at each step, and with the dither of training on one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import models

from datasets import load
from experiments.helpers import command
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.levels import LEVELS_BY_NAME
from experiments.helpers.noise import Draws, Moments, Probe, moments
from experiments.helpers.plot import plot_agreement, require_matplotlib
from experiments.helpers.recipes import Recipe
from experiments.helpers.tables import table
from experiments.helpers.train import seed_everything, training_loss
from experiments.models.nets import attention
from gact_graph.adaptive.allocator import noise

Subject = Callable[[int, int], nn.Module]

_DECAY = 0.9
"""Of the average of gradients, as the momentum of SGD and Adam's first moment have it."""

_BEFORE = 20
"""Steps before the average counts: nothing is left of its start."""

_SWEEPS = 10
"""Sweeps of Algorithm 1 whose mean is compared: a single one is one draw of a random number."""


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
    noisy = moments(together.gradient, draws, exact)
    stored = sum(row.stored_bytes for row in together.report.contexts)
    return {**singles, "together": noisy.variance, "stored_bytes": stored} | _bias(noisy)


def _singles(
    subject: Subject, task: NodeTask, bits: int, draws: int, exact: Tensor, together: Probe
) -> dict[str, Any]:
    """The noise of each slot, with the others exact."""
    sweeps = [together.sensitivities(number) for number in range(_SWEEPS)]
    widths = {row.slot: row.bits for row in together.report.contexts if row.bits is not None}
    slots: list[dict[str, Any]] = []
    for slot, width in widths.items():
        # Tensors that are computed again from this slot get its noise, so they are not pinned.
        pin = {slot: width} | {f"{other.rpartition('.')[0]}.*": 32 for other in widths}
        alone = Probe(_model(subject, task, pin, bits), task)
        predicted = sum(sweep[slot] for sweep in sweeps) / _SWEEPS * noise(width)
        noisy = moments(alone.gradient, draws, exact)
        row = {"slot": slot, "bits": width, "predicted": predicted, "true": noisy.variance}
        slots.append(row | _bias(noisy))
    return {"slots": slots, "sum_of_single": sum(s["true"] for s in slots)}


def averaged(subject: Subject, task: NodeTask, bits: int, steps: int) -> dict[str, float]:
    """Return the mean over the steps of the squared error of averaged gradients over ||average||^2,
    by kind of noise."""
    exact = _model(subject, task, {"*": 32}, bits)
    model = _model(subject, task, {}, bits)
    optimizer = torch.optim.Adam(exact.parameters(), 0.01)
    step = 0

    def loss(of: nn.Module) -> Tensor:
        seed_everything(step)
        return training_loss(of.train()(task.x, task.adjacency), task)

    noises = {"fresh": False, "dithered": True}
    draws = {name: Draws(model, lambda: loss(model), kind) for name, kind in noises.items()}
    averages = dict.fromkeys(("exact", *draws), torch.zeros(()))
    errors = dict.fromkeys(draws, 0.0)
    for step in range(steps):
        optimizer.zero_grad()
        loss(exact).backward()
        found = [p.grad.flatten() for p in exact.parameters() if p.grad is not None]
        gradients = {"exact": torch.cat(found)}
        model.load_state_dict(exact.state_dict())
        gradients |= {name: draw.gradient(step) for name, draw in draws.items()}
        averages = {n: _DECAY * averages[n] + (1 - _DECAY) * g for n, g in gradients.items()}
        if step >= _BEFORE:
            length = averages["exact"].square().sum()
            for name in errors:
                error = (averages[name] - averages["exact"]).square().sum() / length
                errors[name] += float(error) / (steps - _BEFORE)
        optimizer.step()
    return errors


def _bias(noisy: Moments) -> dict[str, float]:
    own = {"bias": noisy.bias, "bias_squared": noisy.bias_squared}
    return own | {"bias_squared_error": noisy.error, "floor": noisy.floor}


def _small_gat(i: int, o: int) -> nn.Module:
    # Batch norm and ReLU are its own.
    return attention(Recipe(2, 8, 0.5, 0.01, 1, heads=2), i, o)


def _basic(cls: Callable[..., nn.Module], **own: Any) -> Callable[..., nn.Module]:
    """Three layers of 64 of PyG's models."""
    return lambda i, o, **options: cls(i, 64, 3, o, **own, **options)


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
    return LEVELS_BY_NAME["L1"].wrap(model, bits, pin=pin)


@command.main(
    *command.GRAPH,
    command.choice("--model", MODELS, "small-gat"),
    command.flag("--norm", text="of PyG's models: BatchNorm, LayerNorm, GraphNorm ..."),
    command.flag("--act", default="relu", text="of PyG's models: relu, gelu, elu ..."),
    command.BITS,
    command.number("--draws", 2000, "of the noise"),
    command.flag("--dropout", float, 0.5, text="of PyG's models"),
    command.switch("--total", "measure no slot alone: much faster, without a plot"),
    command.number("--averaged", text="steps of a training whose averaged gradients are compared"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    if not (args.total or args.averaged):
        require_matplotlib()
    task = prepare(load(args.dataset, args.data_root), "edge_index", device=args.device)
    of_pyg = {"norm": args.norm, "act": args.act, "dropout": args.dropout}
    subject = functools.partial(MODELS[args.model], **({} if args.model == "small-gat" else of_pyg))
    if args.averaged:
        kept = args.keep("averaged.json", "model", "norm", "act", "bits", "dropout", "averaged")
        steps = args.averaged + _BEFORE
        found = kept.once(("errors",), functools.partial(averaged, subject, task, args.bits, steps))
        rows = [{"noise": name, "error": error} for name, error in found.items()]
        shown = table((("noise", "{noise}"), ("squared error of the average", "{error:.2e}")), rows)
        args.show(f"{args.model} on {args.dataset}, {args.bits} bit", shown)
        return
    kept = args.keep("variance.json", "model", "norm", "act", "bits", "draws", "dropout")
    if ("together" if args.total else "slots") not in kept.content:
        kept.content |= check(subject, task, args.bits, args.draws, args.total)
        kept.write()
    results = kept.content
    if not args.total:
        plot_agreement(results["slots"], args.out / "agreement.png")
        columns = (
            ("slot", "{slot}"),
            ("bits", "{bits}"),
            ("by Algorithm 1", "{predicted:.3e}"),
            (f"over {args.draws} draws", "{true:.3e}"),
            ("bias", "{bias:.2%}"),
        )
        args.show("Variance over the squared gradient", table(columns, results["slots"]))
        args.say(f"sum of the variances of single slots {results['sum_of_single']:.3e}")
    args.say(f"variance of all slots together {results['together']:.3e}")
    args.say(
        f"bias {results['bias']:.2%} of the gradient (squared {results['bias_squared']:.1e}, "
        f"standard error {results['bias_squared_error']:.1e}); "
        f"a mean of {args.draws} draws without bias is {results['floor']:.2%} off"
    )
    args.say(f"{args.dataset}, {results['threads']} threads, {args.device}")


if __name__ == "__main__":
    raise SystemExit(main())

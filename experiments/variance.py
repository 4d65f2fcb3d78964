"""Measured sensitivities beside the variance over many draws of the noise.

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

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import models

from datasets import load
from experiments.helpers import command
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.levels import LEVELS_BY_NAME
from experiments.helpers.noise import Moments, Probe, moments
from experiments.helpers.plot import plot_agreement, require_matplotlib
from experiments.helpers.recipes import Recipe
from experiments.helpers.tables import table
from experiments.helpers.train import seed_everything
from experiments.models.nets import attention
from gact_graph.adaptive.allocator import noise

Subject = Callable[[int, int], nn.Module]

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


def _bias(noisy: Moments) -> dict[str, float]:
    own = {"bias": noisy.bias, "bias_squared": noisy.bias_squared}
    return own | {"bias_squared_error": noisy.error, "floor": noisy.floor}


def _small_gat(i: int, o: int) -> nn.Module:
    # Batch norm and ReLU are its own.
    return attention(Recipe(2, 8, 0.5, 0.01, 1, heads=2), i, o)


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
    return LEVELS_BY_NAME["L1"].wrap(model, bits, pin=pin)


@command.main(
    *command.GRAPH,
    command.choice("--model", MODELS, "small-gat"),
    command.flag("--norm", text="of PyG's models: BatchNorm, LayerNorm, GraphNorm ..."),
    command.flag("--act", default="relu", text="of PyG's models: relu, gelu, elu ..."),
    command.BITS,
    command.number("--draws", 2000, "of the noise"),
    command.switch("--total", "measure no slot alone: much faster, without a plot"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    if not args.total:
        require_matplotlib()
    task = prepare(load(args.dataset, args.data_root), "edge_index", device=args.device)
    options = {} if args.model == "small-gat" else {"norm": args.norm, "act": args.act}
    subject = functools.partial(MODELS[args.model], **options)
    kept = args.keep("variance.json", "model", "norm", "act", "bits", "draws")
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

"""The variance and the bias of compressed gradients, and the bytes that they take.

``python -m experiments.variance --total --model gcn --bits 1,2,3,4 --epochs 40 --out DIR``
``python -m experiments.variance --total --model pyg-gat --norm none,BatchNorm --act elu --out DIR``
``python -m experiments.variance --model gat --hidden 8 --layers 2 --draws 2000 --out DIR``

``--total`` draws the gradient repeatedly with all slots quantized, for each width and each of
``--variants``, at the first weights or after ``--epochs`` of exact training; with ``--adaptive``,
after training with adaptive bits, and with the bits of its last measurement. It prints the variance
and the bias: the distance of the mean gradient from the exact one, relative to the length of the
exact one. The bias is estimated from products of independent means, because the length of a mean
has a floor of sqrt(variance / draws).

Otherwise, each slot follows alone: the variance that Algorithm 1 of the GACT paper predicts from
two draws, as a mean over several sweeps, beside that over many draws.

``--averaged`` trains some steps with exact gradients, and compares the average of the last
gradients, each weighted by 0.9 of the next, with that of compressed gradients along the way: with
fresh noise at each step, and with the dither of training on one graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from datasets import load
from experiments.helpers import command
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.errors import UsageError
from experiments.helpers.gradients import State, adapted, bias_of, total, trained
from experiments.helpers.levels import LEVELS_BY_NAME
from experiments.helpers.noise import Draws, Probe, moments
from experiments.helpers.strategies import STRATEGIES, Case
from experiments.helpers.subjects import BASIC, MODELS, make
from experiments.helpers.tables import Column, table
from experiments.helpers.train import gradient_of, seed_everything, training_loss
from experiments.helpers.values import FP32_BITS, parse_bits, parse_share
from gact_graph.adaptive.allocator import noise

_DECAY = 0.9
"""Decay of the average of gradients, as in the momentum of SGD and Adam's first moment."""

_BEFORE = 20
"""Steps before the average counts: the share of its start is then 0.9^20, or 12 %."""

_SWEEPS = 10
"""Sweeps of Algorithm 1 whose mean is compared: a single sweep is one draw of a random number."""


def singles(
    case: Case, task: NodeTask, state: State, exact: Tensor, draws: int
) -> list[dict[str, Any]]:
    """Return predicted and true variances by slot, each over ||g||^2, with other slots exact."""
    together = Probe(_wrapped(case, task, state=state), task)
    sweeps = [together.sensitivities(number) for number in range(_SWEEPS)]
    widths = {row.slot: row.bits for row in together.report.contexts if row.bits is not None}
    slots: list[dict[str, Any]] = []
    for slot, width in widths.items():
        # Tensors that are computed again from this slot get its noise, so they are not pinned.
        pin = {slot: int(width)} | {f"{other.rpartition('.')[0]}.*": 32 for other in widths}
        alone = Probe(_wrapped(case, task, pin, state), task)
        predicted = sum(sweep[slot] for sweep in sweeps) / _SWEEPS * noise(width)
        noisy = moments(alone.gradient, draws, exact)
        row = {"slot": slot, "bits": width, "predicted": predicted, "true": noisy.pop("variance")}
        slots.append(row | noisy)
    return slots


def averaged(case: Case, task: NodeTask, steps: int) -> dict[str, float]:
    """Return the mean over the steps of the squared error of averaged gradients over ||average||^2,
    by kind of noise."""
    exact, model = _wrapped(case, task, {"*": 32}), _wrapped(case, task)
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
        gradients = {"exact": gradient_of(exact)}
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


def _wrapped(
    case: Case, task: NodeTask, pin: Mapping[str, int] | None = None, state: State | None = None
) -> nn.Module:
    model = make(MODELS[case.model], task, **case.changes)
    if state is not None:
        model.load_state_dict(state)
    return LEVELS_BY_NAME["L1"].wrap(model, case.bits, pin=pin or {})


_TOTAL: tuple[Column, ...] = (
    ("norm", "{norm:|none}"),
    ("activation", "{act:|own}"),
    ("variant", "{variant}"),
    ("bits", "{bits}"),
    ("saved, MB", "{saved_bytes:2MB}"),
    ("variance", "{variance:.3g}"),
    ("bias", bias_of),
)
_AVERAGED: tuple[Column, ...] = (
    *_TOTAL[:2],
    ("bits", "{bits}"),
    ("fresh noise", "{fresh:.2e}"),
    ("dither", "{dithered:.2e}"),
)
_SINGLE: tuple[Column, ...] = (
    ("slot", "{slot}"),
    ("bits", "{bits}"),
    ("by Algorithm 1", "{predicted:.3e}"),
    ("variance", "{true:.3e}"),
    ("bias", bias_of),
)


def _text(name: str) -> str | None:
    return None if name == "none" else name


def _cases(args: command.Args) -> Iterator[tuple[dict[str, Any], Case]]:
    """Yield each case, after the entries by which its results differ from the others."""
    for norm, act, variant in itertools.product(args.norm, args.act, args.variants):
        own = STRATEGIES[variant].bits
        for bits in [own] if own else args.bits:
            key = {"norm": norm, "act": act, "bits": bits}
            yield key | {"variant": variant}, Case.of(args, strategy=variant, **key)


@command.main(
    *command.GRAPH,
    command.choice("--model", MODELS, "gat"),
    *command.SIZES,
    command.several("--norm", _text, "none", "of PyG's models: BatchNorm, LayerNorm ..."),
    command.several("--act", _text, "none", "of PyG's models: relu, gelu, elu ..."),
    command.flag("--dropout", parse_share, text="the same", metavar="P"),
    command.several("--bits", parse_bits, "4", "of an element"),
    command.names("--variants", STRATEGIES, "L1"),
    command.number("--epochs", text="of exact training before"),
    command.draws(2000),
    command.switch("--total", "measure no slot alone: much faster"),
    command.switch("--adaptive", "with --total: bits by sensitivity, and training with them"),
    command.number("--averaged", text="steps of a training whose averaged gradients are compared"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    if (args.norm, args.act, args.dropout) != ([None], [None], None) and args.model not in BASIC:
        raise UsageError(
            f"Expected --norm, --act and --dropout with {', '.join(BASIC)} (got {args.model})"
        )
    if args.variants != ["L1"] and not args.total:
        raise UsageError(f"Expected --variants with --total (got {', '.join(args.variants)})")
    if args.adaptive and not args.total:
        raise UsageError("Expected --total with --adaptive (got no --total)")
    graph = load(args.dataset, args.data_root)
    task = prepare(graph, MODELS[args.model].layout, device=args.device)
    settings = ("model", "hidden", "layers", "dropout")
    title = f"{args.model} on {args.dataset}"
    if args.averaged:
        kept, rows = args.keep("averaged.json", *settings, "averaged"), []
        for key, case in _cases(args):
            find = functools.partial(averaged, case, task, args.averaged + _BEFORE)
            rows.append(kept.once(("rows", key), find))
        args.show(f"{title}: squared error of the average", table(_AVERAGED, rows))
        return

    @functools.cache
    def start(norm: str | None, act: str | None) -> tuple[State, Tensor]:
        case = Case.of(args, strategy="stock", norm=norm, act=act, bits=FP32_BITS)
        return trained(case, graph, args.epochs or 0)

    def find_total(case: Case) -> dict[str, Any]:
        if args.adaptive:
            return adapted(case, graph, args.epochs or 0, args.draws)
        return total(case, graph, *start(case.norm, case.act), args.draws)

    def find_singles(case: Case) -> dict[str, Any]:
        return {"slots": singles(case, task, *start(case.norm, case.act), args.draws)}

    kept, rows, slots = args.keep("variance.json", *settings, "epochs", "draws", "adaptive"), [], []
    for key, case in _cases(args):
        rows.append(kept.once(("rows", key), functools.partial(find_total, case)))
        if not args.total:
            found = kept.once(("singles", key), functools.partial(find_singles, case))
            slots += found["slots"]
    if slots:
        args.show(f"{title}: each slot alone", table(_SINGLE, slots))
        args.say(f"sum of the variances of single slots {sum(s['true'] for s in slots):.3e}")
    args.show(f"{title}: all slots together", table(_TOTAL, rows))
    floor = max(row["floor"] for row in rows)
    args.say(f"a mean of {args.draws} draws without bias is up to {floor:.2%} off")
    args.say(f"{kept.content['threads']} threads, {args.device}")


if __name__ == "__main__":
    raise SystemExit(main())

"""The error of the gradient under compression, for many kinds of models.

``python -m experiments.gradient_error --out DIR``

For each model of :mod:`experiments.models.small`, the command prints the length of the difference
between the gradient of a wrapped model and the exact gradient, relative to the length of the exact
gradient: at the first step, and after some steps of training, with the same bits everywhere and
with adaptive bits. Before the first step nothing has been measured, so both are alike there. Each
error is a mean over several draws of the noise (and of dropout) in each of several trainings, shown
with its standard error. Further columns have the cost of measuring in CPU time, which other work on
the machine does not increase: the first measurement, in ordinary steps, and all measurements, as a
share of the training.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

import gact_graph
from experiments.helpers import command
from experiments.helpers.levels import Level
from experiments.helpers.meters import Trainee, train
from experiments.helpers.process import call
from experiments.helpers.tables import Column, table
from experiments.helpers.train import cost_of_measuring, gradient_of, seed_everything
from experiments.helpers.values import parse_bits
from experiments.models.small import SMALL, Small, make_small
from gact_graph.capture.config import BlockSize

_DRAWS = 4
"""Draws of the noise at each point of a training."""

_FAR = 1_000_000
"""Forwards between two draws: noise depends on the number of a forward, so none is repeated."""


def error_of(step: str) -> Callable[[Mapping[str, Any] | None], str]:
    """Return the text of an error with its standard error, at the ``first`` or ``last`` step."""

    def text(row: Mapping[str, Any] | None) -> str:
        if row is None or row.get(step) is None:
            return "not run"
        return f"{row[step]:.3f} ± {row[f'{step}_standard_error']:.3f}"

    return text


_COLUMNS: tuple[Column, ...] = (
    ("model", "{model}"),
    ("bits", lambda row: f"{row['bits']} {'adaptive' if row['adaptive'] else 'fixed'}"),
    ("first step", error_of("first")),
    ("loss", lambda row: f"{row['loss'][-1]:.4f}"),
    ("first measurement, steps", lambda row: _cost(row, row["first_measurement_steps"], ".1f")),
    ("measuring", lambda row: _cost(row, row["measuring_steps"] / len(row["loss"]), ".1%")),
)


def _cost(row: Mapping[str, Any], cost: float, spec: str) -> str:
    return format(cost, spec) if row["adaptive"] else ""


def gradient(model: nn.Module, small: Small, seed: int) -> Tensor:
    """Return the gradient of one step as one vector [P]; nothing in ``model`` changes."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    seed_everything(seed)
    small.loss(model).backward()
    return gradient_of(model)


def errors(model: nn.Module, small: Small) -> list[float]:
    """Return the relative errors of a wrapped model's gradient at its state, one per draw."""
    plain = gact_graph.unwrap(copy.deepcopy(model))
    distances = []
    for draw in range(_DRAWS):
        exact = gradient(plain, small, draw)
        noisy = copy.deepcopy(model)
        state = gact_graph.state_dict(noisy)
        gact_graph.load_state_dict(noisy, state | {"forwards": state["forwards"] + _FAR * draw})
        distances.append(float((gradient(noisy, small, draw) - exact).norm() / exact.norm()))
    return distances


def measure(
    name: str, bits: int, adaptive: bool, steps: int, seeds: int, blocks: BlockSize
) -> dict[str, Any]:
    """Return the errors of one model before and after each of ``seeds`` trainings, and the losses
    and the cost of measuring of the last training."""
    first, last = [], []
    for seed in range(seeds):
        small = make_small(name)
        model = Level("L1", blocks).wrap(small.model, bits, adaptive, seed=seed)
        first += errors(model, small)
        training = _train(model, small, steps, seed)
        last += errors(model, small)
    return {
        "model": name,
        "bits": bits,
        "adaptive": adaptive,
        "first": statistics.fmean(first),
        "first_standard_error": _standard_error(first),
        "last": statistics.fmean(last),
        "last_standard_error": _standard_error(last),
        **training,
    }


def _train(model: nn.Module, small: Small, steps: int, seed: int) -> dict[str, Any]:
    seeds = iter(range(steps * seed, steps * (seed + 1)))

    def loss() -> Tensor:
        seed_everything(next(seeds))
        return small.loss(model)

    passes: list[int] = []

    @contextmanager
    def counted() -> Iterator[None]:
        yield
        passes.append(gact_graph.report(model).measurements)

    taken = train(Trainee(model, loss), steps, small.lr, [counted])
    return {"loss": taken.losses, **cost_of_measuring(taken.process_seconds, passes)}


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


@command.main(
    command.names("--models", SMALL),
    command.several("--bits", parse_bits, "4,2"),
    command.number("--steps", 50, "of training"),
    command.number("--seeds", 1, "trainings"),
    command.number("--limit", text="seconds for one row"),
    command.flag("--blocks", default=False, choices=("auto",), text="message passing in blocks"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    settings = ("steps", "seeds", "blocks")
    rows = []
    for name in args.models:
        kept = args.keep(f"{name}.json", *settings, draws=_DRAWS)
        for bits in args.bits:
            for adaptive in (False, True):
                asked = (name, bits, adaptive, args.steps, args.seeds, args.blocks)
                function = "experiments.gradient_error:measure"
                find = functools.partial(call, function, *asked, limit=args.limit)
                key = {"model": name, "bits": bits, "adaptive": adaptive}
                rows.append(key | kept.once(("rows", key), find))
                if "reason" in rows[-1]:
                    args.say(f"{name}, {bits} bit: {rows[-1]['reason']}")
    columns = (*_COLUMNS[:3], (f"after {args.steps} steps", error_of("last")), *_COLUMNS[3:])
    done = [row for row in rows if "reason" not in row]
    args.show("Relative error of the gradient", table(columns, done))
    args.say(f"{_DRAWS} draws in each of {args.seeds} trainings")


if __name__ == "__main__":
    raise SystemExit(main())

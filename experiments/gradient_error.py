"""How far compression takes the gradient of a step, for many kinds of models.

``python -m experiments.gradient_error --out DIR``

For each model of :mod:`experiments.models.small`, the length of the difference between the gradient
of a wrapped model and the exact one, over the length of the exact one: at the first step, and after
some steps of training, with the same bits everywhere and with adaptive bits. At the first step
nothing was measured yet, so both are alike there. Each is a mean over several draws of the noise
(and of dropout) in each of several trainings, shown with its standard error. Beside them stands
what measuring cost, in time of the processor, which other work on the machine does not add to: the
first measurement, in ordinary steps, and all of them, as a share of the training. ``DIR`` gets a
JSON file for each model.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gact_graph
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.measuring import cost_of_measuring
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.subjects import choose, exit_code, write_json
from experiments.helpers.train import seed_everything
from experiments.helpers.values import parse_count
from experiments.models.small import SMALL, Small, make_small

_DRAWS = 4
"""Of the noise, at each point of a training."""

_FAR = 1_000_000
"""Forwards from one draw to the next: noise depends on a forward's number, and none comes twice."""


def gradient(model: nn.Module, small: Small, seed: int) -> Tensor:
    """The gradient of one step as one vector [P]; nothing in ``model`` changes."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    seed_everything(seed)
    small.loss(model).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def errors(model: nn.Module, small: Small) -> list[float]:
    """The relative errors of a wrapped model's gradient, where it stands, one for each draw."""
    plain = gact_graph.unwrap(copy.deepcopy(model))
    found = []
    for draw in range(_DRAWS):
        exact = gradient(plain, small, draw)
        noisy = copy.deepcopy(model)
        state = gact_graph.state_dict(noisy)
        gact_graph.load_state_dict(noisy, state | {"forwards": state["forwards"] + _FAR * draw})
        found.append(float((gradient(noisy, small, draw) - exact).norm() / exact.norm()))
    return found


def measure(
    name: str, bits: int, adaptive: bool, steps: int, seeds: int, blocks: str | bool
) -> dict[str, Any]:
    """One model's errors before and after each of ``seeds`` trainings; of the last one its losses,
    and what measuring took."""
    first, last = [], []
    for seed in range(seeds):
        small = make_small(name)
        options: dict[str, Any] = {"bits": bits, "adaptive": adaptive, "blocks": blocks}
        if "min_bytes" in inspect.signature(gact_graph.wrap).parameters:
            options["min_bytes"] = 0
        model = gact_graph.wrap(small.model, **options, seed=seed)
        first += errors(model, small)
        training = _train(model, small, steps, seed)
        last += errors(model, small)
    report = gact_graph.report(model).to_dict()
    return {
        "model": name,
        "bits": bits,
        "adaptive": adaptive,
        "first": statistics.fmean(first),
        "first_standard_error": _standard_error(first),
        "last": statistics.fmean(last),
        "last_standard_error": _standard_error(last),
        "last_errors": last,
        **training,
        "passes": report["measurements"],
        "average_bits": report["average_bits"],
        "rate": report["rate"],
        "reported": report.get("gradient_error"),
    }


def _train(model: nn.Module, small: Small, steps: int, seed: int) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=small.lr)
    losses, seconds, passes = [], [], []
    for step in range(steps):
        start = time.process_time()
        optimizer.zero_grad()
        seed_everything(steps * seed + step)
        loss = small.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.process_time() - start)
        passes.append(gact_graph.report(model).measurements)
    return {"loss": losses, **cost_of_measuring(seconds, passes)}


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _measure_within(limit: int | None, name: str, bits: int, *rest: Any) -> dict[str, Any]:
    """The same in a process of its own that ends after ``limit`` seconds, if there is a limit."""
    if limit is None:
        return measure(name, bits, *rest)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(measure, (name, bits, *rest)).get(limit)
        except multiprocessing.TimeoutError:
            row = {"model": name, "bits": bits, "adaptive": rest[0]}
            return row | {"not_finished_in_seconds": limit}


def main(argv: list[str] | None = None) -> int:
    """Measure; write a JSON; print a table; return the exit code as the main job does."""
    return exit_code("gradient_error", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    cells: list[tuple[str, ...]] = []
    head = {key: getattr(args, key) for key in ("steps", "seeds", "blocks")}
    head |= {"draws": _DRAWS, "threads": torch.get_num_threads()} | origin("gradient_error", argv)
    for name in args.models:
        rows = []
        for bits in args.bits:
            for adaptive in (False, True):
                rest = (adaptive, args.steps, args.seeds, args.blocks)
                rows.append(_measure_within(args.limit, name, bits, *rest))
                write_json(args.out / f"{name}.json", head | {"rows": rows})
        cells += map(_cells, rows)
    last = f"after {args.steps} steps"
    columns = ("model", "bits", "first step", last, "loss", "first measurement", "measuring")
    console.print(make_table("Relative error of the gradient", columns, cells))
    say(console, f"{_DRAWS} draws in each of {args.seeds} trainings")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = row["model"], f"{row['bits']} {'adaptive' if row['adaptive'] else 'fixed'}"
    if "not_finished_in_seconds" in row:
        return (*head, f"not finished in {row['not_finished_in_seconds']} s", *[""] * 4)
    return (
        *head,
        f"{row['first']:.3f} ± {row['first_standard_error']:.3f}",
        f"{row['last']:.3f} ± {row['last_standard_error']:.3f}",
        f"{row['loss'][-1]:.4f}",
        f"{row['first_measurement_steps']:.1f} steps" if row["adaptive"] else "",
        f"{row['measuring_steps'] / len(row['loss']):.1%}" if row["adaptive"] else "",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.gradient_error", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", default=",".join(SMALL), help="default: all")
    parser.add_argument("--bits", default="4,2", help="default: 4,2")
    parser.add_argument("--steps", type=parse_count, default=50, help="of training (default: 50)")
    parser.add_argument("--seeds", type=parse_count, default=1, help="trainings (default: 1)")
    parser.add_argument(
        "--limit", type=parse_count, metavar="S", help="seconds for one row (default: none)"
    )
    parser.add_argument(
        "--blocks", choices=("auto",), default=False, help="message passing in blocks"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.models = choose("--models", args.models, SMALL)
    args.bits = [int(bits) for bits in choose("--bits", args.bits, [*map(str, range(1, 17))])]
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Plans compared with the best strategy of uniform bits for all tensors, at the same memory.

``python -m experiments.plans --models gcn,gat --datasets D/cora.npz,D/flickr_graph.npz --out DIR``

Each budget is a share of the estimated peak of stock PyG. A fresh process plans and trains for some
steps with the memory capped, and reports the peak. In another process, without the cap, steps of a
plan alternate with steps of the best strategy of ``gact_graph.estimate`` that fits: exact in
blocks, or else with the most bits. That process reports the time of both, and the error of the
gradient, relative to the gradient in blocks without codes.

``--ways`` adds other ways to train on each graph, without a cap, and plans for the same budgets:
levels of the library, and peers, for which jemalloc keeps freed memory. Their peaks are bytes of
tensors. ``experiments.tables`` draws them. ``--no-times`` measures only the peaks of plans.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gact_graph
from experiments.helpers import command
from experiments.helpers.errors import UsageError
from experiments.helpers.kept import Kept
from experiments.helpers.levels import Level
from experiments.helpers.process import CAPPED, call_together, checked, environment, set_cap
from experiments.helpers.steps import loss_of, prepared, stepper, train
from experiments.helpers.strategies import checkpoint_layers
from experiments.helpers.summary import dataset_name
from experiments.helpers.tables import Column, Row, Table, table
from experiments.helpers.train import gradient_of, seed_everything
from experiments.models.memory import KINDS
from gact_graph.ops.allocations import watching_allocations

FILE_NAME = "plans.json"

PEERS = ("stock", "checkpoint", "compiled 100", "compiled 50", "compiled 25")
"""Stock PyG, torch's checkpoint of each layer, and torch.compile with a budget for saved tensors in
percent (``torch._functorch.config.activation_memory_budget``)."""

LEVELS = ("lossless", "lossless + blocks", "L1 8", "L1 4", "L1 2", "CB2 4")

_STEPS, _BEFORE = 16, 4
"""Timed steps, and the steps before them, in which memory and caches settle."""

_CAPPED = 5
"""Steps with the memory capped: the first plans and measures, the second does neither, and from the
third on, memory and sums of earlier steps are reused."""

_DRAWS = 2
"""Draws of the noise for the error of the gradient."""

REFUSED = "refused"

_COSTS = ("seconds", "error", "uniform_seconds", "uniform_error", "ratio")

_COLUMNS: tuple[Column, ...] = (
    ("model", "{model}"),
    ("graph", "{dataset}"),
    ("of stock's peak", "{share:.0%}"),
    ("budget, MB", "{memory:MB}"),
    ("plan", "{plan:|ended by the cap}"),
    ("planned, MB", "{planned:MB|}"),
    ("peak, MB", "{peak:MB|}"),
)

_COMPARED: tuple[Column, ...] = (
    ("s/step", "{seconds:.2f|}"),
    ("error", "{error:.2%|}"),
    ("uniform", "{uniform}"),
    ("s/step", "{uniform_seconds:.2f|}"),
    ("error", "{uniform_error:.2%|}"),
    ("ratio of times", lambda row: f"{row['ratio']:.2f}" if row.get("ratio") else ""),
)


def rows(results: Sequence[Row], *more: Column) -> Table:
    """Return one row per budget, with further columns at the end."""
    compared = any(row["uniform"] for row in results)
    return table((*_COLUMNS, *(_COMPARED if compared else ()), *more), results)


def verdict(results: Sequence[Row]) -> str:
    """Return sentences on kept budgets, on predicted peaks, and on plans beside uniform bits."""
    ran = [row for row in results if row["plan"] != REFUSED]
    off = [row["planned"] / row["peak"] - 1 for row in ran if row["peak"]]
    kept = sum(row["peak"] is not None and row["peak"] <= row["memory"] for row in ran)
    alone = sum(row["uniform"] == REFUSED for row in ran)
    text = [f"Budgets kept: {kept} of {len(ran)}"]
    text[0] += f", {alone} of them refused by each uniform strategy." if alone else "."
    if off:
        near = sum(abs(value) <= 0.05 for value in off)
        text.append(
            f"Planned peaks within 5 % of the measured: {near} of {len(off)}, from "
            f"{min(off):+.0%} to {max(off):+.0%}."
        )
    both = [row for row in ran if row["uniform"] not in ("", REFUSED)]
    errors = [row["error"] / row["uniform_error"] for row in both if row["uniform_error"]]
    times = [row["ratio"] for row in both if row.get("ratio")]
    for title, ratios in (("time", times), ("error of the gradient", errors)):
        if ratios:
            text.append(
                f"Ratio of {title}: {min(ratios):.2f} to {max(ratios):.2f}, median "
                f"{statistics.median(ratios):.2f}."
            )
    return " ".join(text)


def best(strategies: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the best strategy that fits: exact ones first, blocks before others; then by bits."""

    def rank(row: Mapping[str, Any]) -> tuple[float, bool, bool]:
        return -row["bits"], not row["blocks"], row["level"] == "CB2"

    return min((row for row in strategies if row["fits"]), key=rank, default=None)


def uniform(model: str, dataset: str, root: str, memory: int) -> dict[str, Any]:
    """Return the best strategy of the estimate that fits a budget."""
    made, inputs, _ = prepared(model, dataset, root)
    return {"way": best(gact_graph.estimate(made, *inputs, memory=memory).to_dict()["strategies"])}


def stock(model: str, dataset: str, root: str) -> dict[str, Any]:
    """Return the estimated peak of stock PyG in bytes."""
    made, inputs, _ = prepared(model, dataset, root)
    return {"peak": gact_graph.estimate(made, *inputs).to_dict()["strategies"][0]["peak_bytes"]}


def peak_of(model: str, dataset: str, root: str, memory: int) -> dict[str, Any]:
    """Return the peak of a plan with the memory capped."""
    made, inputs, y = prepared(model, dataset, root)
    wrapped = gact_graph.wrap(made, memory=memory)
    set_cap(torch.device("cpu"), memory)
    try:
        peak = train(wrapped, inputs, y, _CAPPED)
    except gact_graph.MemoryBudgetError:
        return {"strategy": REFUSED}
    report = gact_graph.report(wrapped)
    return {"strategy": report.strategy, "planned": report.planned_bytes, "peak": peak}


def costs_of(
    model: str, dataset: str, root: str, memory: int, way: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the time of a step, and the error of the gradient as a share of its length, of a plan
    and of a strategy, whose steps alternate in one process; and the median ratio of their times.

    There is no cap, because under a cap the library keeps no memory between steps. Each of the two
    is first in every other pair of steps, so that the contents of the caches favor neither.
    """
    made, inputs, y = prepared(model, dataset, root)
    exact = gact_graph.wrap(copy.deepcopy(made), level="lossless", blocks="auto", min_bytes=0)
    trained = {"": gact_graph.wrap(copy.deepcopy(made), memory=memory)}
    steps = {"": stepper(trained[""], inputs, y)}
    try:
        steps[""]()  # plans before the other takes memory
    except gact_graph.MemoryBudgetError:
        return {}  # by some memory of the process, which differs from that of the run above
    if way is not None:
        level = Level(way["level"] or "L0", way["blocks"], way["bits"])
        trained["uniform_"] = level.wrap(made, adaptive=True)
        steps["uniform_"] = stepper(trained["uniform_"], inputs, y)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(_BEFORE + _STEPS):
        for name in [*steps] if number % 2 else [*steps][::-1]:
            seconds[name].append(_time_of(steps[name]))
    pairs = [*zip(*(own[_BEFORE:] for own in seconds.values()), strict=True)]
    return {
        "ratio": statistics.median(own / other for own, other in pairs) if way else None,
        **{f"{name}seconds": statistics.median(own[_BEFORE:]) for name, own in seconds.items()},
        **{f"{name}error": _error(exact, wrapped, inputs, y) for name, wrapped in trained.items()},
    }


def _time_of(step: Callable[[], None]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def _error(exact: nn.Module, trained: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> float:
    """Return the error of the gradient of a trained model, as a share of its length."""
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    errors = []
    for draw in range(_DRAWS):
        right, own = (_gradient(net, state, inputs, y, draw) for net in (exact, trained))
        errors.append(float((own - right).norm() / right.norm()))
    return statistics.fmean(errors)


def beside(model: str, dataset: str, root: str, way: str | int) -> dict[str, Any]:
    """Return peak, time and error of a way to train, or of the plan for a budget in bytes."""
    made, inputs, y = prepared(model, dataset, root)
    exact, trained = copy.deepcopy(made), _in_way(made, way)
    gact_graph.wrap(exact, level="lossless", blocks="auto", min_bytes=0)
    train(trained, inputs, y, 2)  # compiles, plans and measures
    trained.zero_grad(set_to_none=True)
    with watching_allocations() as watch:
        train(trained, inputs, y, 1)
        peak = None if watch is None else watch.peak()
    step = stepper(trained, inputs, y)
    seconds = [_time_of(step) for _ in range(_BEFORE + _STEPS)][_BEFORE:]
    error = _error(exact, trained, inputs, y)
    return {"peak": peak, "seconds": statistics.median(seconds), "error": error}


def _in_way(model: nn.Module, way: str | int) -> nn.Module:
    if isinstance(way, int):
        return gact_graph.wrap(model, memory=way)
    name, _, number = way.rpartition(" ")
    if name == "compiled":
        torch._functorch.config.activation_memory_budget = int(number) / 100
        torch._inductor.config.fallback_random = True
        model.compile()
    elif way == "checkpoint":
        checkpoint_layers(model)
    elif way.startswith("lossless"):
        Level("lossless", "blocks" in way).wrap(model)
    elif way != "stock":
        Level(name, "auto", int(number)).wrap(model, adaptive=True)
    return model


def _gradient(
    model: nn.Module, state: Mapping[str, Tensor], inputs: tuple[Any, ...], y: Tensor, draw: int
) -> Tensor:
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    seed_everything(draw)
    loss_of(model, inputs, y).backward()
    return gradient_of(model).clone()


def _compare(
    kept: Kept, task: tuple[str, ...], shares: Sequence[float], ways: Sequence[str], times: bool
) -> None:
    """Measure one model on one graph, at some shares of the peak of stock PyG and in some ways.

    Without times, plans are compared with nothing.
    """
    key = {"model": task[0], "dataset": dataset_name(task[1])}
    peak = kept.once(("stock", key), lambda: _apart("stock", task))["peak"]

    def find(memory: int) -> dict[str, Any]:
        own = _apart("peak_of", task, memory) or {}
        found = {
            "plan": own.get("strategy"),
            "planned": own.get("planned"),
            "peak": own.get("peak"),
        }
        found |= {"uniform": ""} | dict.fromkeys(_COSTS)
        if times:
            way = _apart("uniform", task, memory)["way"]
            found["uniform"] = REFUSED if way is None else way["strategy"]
            if found["plan"] != REFUSED:
                found |= _apart("costs_of", task, memory, way) or {}
        return found

    for share in shares:
        memory = int(peak * share)
        kept.once(("plans", key | {"share": share, "memory": memory}), find, memory)
    budgets = [int(peak * share) for share in shares] if ways else []
    for way in (*ways, *budgets):
        place = ("ways", key | {"way": way})
        kept.once(place, lambda way=way: _apart("beside", task, way) or {"peak": None})


def _apart(function: str, task: tuple[str, ...], *more: Any) -> Any:
    """Return a result from a fresh process; None where the memory did not suffice for training."""
    allocator = "jemalloc-tuned" if more and more[-1] in PEERS else "kept"
    variables = environment(allocator)
    if function == "peak_of":  # under a cap
        variables = CAPPED | variables
    name, calls = f"experiments.plans:{function}", [(*task, *more)]
    needed = function in ("stock", "uniform")
    return checked(call_together(name, calls, variables)[0], f"{function} of {task[0]}", needed)


def _shares(text: str) -> list[float]:
    return [float(share) / 100 for share in text.split(",")]


def _ways(text: str) -> list[str]:
    ways = [way for way in text.split(",") if way]
    for way in ways:
        if way not in (*PEERS, *LEVELS):
            raise UsageError(f"Expected ways of {', '.join((*PEERS, *LEVELS))} (got {way!r})")
    return ways


@command.main(
    command.names("--models", KINDS),
    command.flag("--datasets", default="digits", metavar="D,D"),
    command.DATA_ROOT,
    command.flag("--shares", _shares, "75,50,25,10", "of stock's peak, in percent"),
    command.flag("--ways", _ways, "", f"of {','.join((*PEERS, *LEVELS))}"),
    command.NO_TIMES,
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    steps = _CAPPED if args.no_times else _STEPS
    kept = args.keep(FILE_NAME, steps=steps, times=not args.no_times)
    kept.content |= {kind: kept.content.get(kind, []) for kind in ("stock", "plans", "ways")}
    for dataset in args.datasets.split(","):
        for model in args.models:
            args.say(f"{model} on {dataset_name(dataset)}")
            task = model, dataset, str(args.data_root)
            _compare(kept, task, args.shares, args.ways, not args.no_times)
    args.show("plans", rows(kept.content["plans"]))
    args.say(verdict(kept.content["plans"]))


if __name__ == "__main__":
    raise SystemExit(main())

"""Plans beside the best strategy with the same bits for all tensors, at the same memory.

``python -m experiments.plans --models gcn,gat --datasets D/cora.npz,D/flickr_graph.npz --out DIR``

For each budget, a share of the peak that is estimated for stock PyG, a fresh process plans and
trains for some steps with the memory capped, and another one trains in the best strategy of
``gact_graph.estimate`` that fits: exact in blocks, or else with the most bits. Both report peak,
time and the error of the gradient, relative to the gradient in blocks without codes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gact_graph
from experiments.estimates import loss_of, prepared, train
from experiments.helpers import command
from experiments.helpers.kept import Kept
from experiments.helpers.levels import Level
from experiments.helpers.process import call, checked, set_cap
from experiments.helpers.summary import dataset_name
from experiments.helpers.tables import Column, Row, Table, table
from experiments.helpers.train import gradient_of, seed_everything
from experiments.models.memory import KINDS

FILE_NAME = "plans.json"

_STEPS = 5
_DRAWS = 2
"""Draws of the noise for the error of the gradient."""

REFUSED = "refused"

_COLUMNS: tuple[Column, ...] = (
    ("model", "{model}"),
    ("graph", "{dataset}"),
    ("of stock's peak", "{share:.0%}"),
    ("budget, MB", "{memory:MB}"),
    ("plan", "{plan:|ended by the cap}"),
    ("planned, MB", "{planned:MB|}"),
    ("peak, MB", "{peak:MB|}"),
    ("s/step", "{seconds:.2f|}"),
    ("error", "{error:.2%|}"),
    ("uniform", "{uniform}"),
    ("s/step", "{uniform_seconds:.2f|}"),
    ("error", "{uniform_error:.2%|}"),
)


def rows(results: Sequence[Row]) -> Table:
    """Return one row a budget."""
    return table(_COLUMNS, results)


def verdict(results: Sequence[Row]) -> str:
    """Return how well peaks were predicted and kept, and how plans compare."""
    ran = [row for row in results if row["plan"] != REFUSED]
    off = [row["planned"] / row["peak"] - 1 for row in ran if row["peak"]]
    kept = sum(row["peak"] is not None and row["peak"] <= row["memory"] for row in ran)
    alone = sum(row["uniform"] == REFUSED for row in ran)
    text = [
        f"Budgets kept: {kept} of {len(ran)}, {alone} of them refused by each uniform strategy."
    ]
    if off:
        near = sum(abs(value) <= 0.05 for value in off)
        most = max(off, key=abs)
        text.append(f"Planned peaks within 5 % of the measured: {near} of {len(off)}, {most:+.0%}.")
    both = [row for row in ran if row["uniform"] != REFUSED and row["seconds"]]
    for name, title in (("seconds", "time"), ("error", "error of the gradient")):
        pairs = [(row[name], row[f"uniform_{name}"]) for row in both]
        ratios = [own / other for own, other in pairs if own is not None and other]
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


def peak_of(
    model: str, dataset: str, root: str, memory: int, way: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the peak with the memory capped, by a plan or in a strategy of the estimate."""
    made, inputs, y = prepared(model, dataset, root)
    wrapped = _wrapped(made, memory, way)
    set_cap(torch.device("cpu"), memory)
    try:
        peaks = train(wrapped, inputs, y, _STEPS)
    except gact_graph.MemoryBudgetError:
        return {"strategy": REFUSED}
    report = gact_graph.report(wrapped)
    found = {"strategy": report.strategy, "planned": report.planned_bytes}
    return {**found, "peak": max(peaks)}


def cost_of(
    model: str, dataset: str, root: str, memory: int, way: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the time of a step, and the error of the gradient as a share of its length.

    Without the cap, under which the library keeps no memory between steps.
    """
    made, inputs, y = prepared(model, dataset, root)
    exact, wrapped = copy.deepcopy(made), _wrapped(made, memory, way)
    gact_graph.wrap(exact, level="lossless", blocks="auto", min_bytes=0)
    seconds = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        try:
            train(wrapped, inputs, y, 1)
        except gact_graph.MemoryBudgetError:
            return {}  # by some memory of the process, which differs from that of the run above
        seconds.append(time.perf_counter() - begun)
    state = {name: value.clone() for name, value in wrapped.state_dict().items()}
    errors = []
    for draw in range(_DRAWS):
        right, own = (_gradient(net, state, inputs, y, draw) for net in (exact, wrapped))
        errors.append(float((own - right).norm() / right.norm()))
    return {"error": statistics.fmean(errors), "seconds": statistics.median(seconds[1:])}


def _wrapped(model: nn.Module, memory: int, way: Mapping[str, Any] | None) -> nn.Module:
    if way is None:
        return gact_graph.wrap(model, memory=memory)
    blocks = "auto" if way["blocks"] else False
    return Level(way["level"] or "L0", blocks, way["bits"]).wrap(model, adaptive=True)


def _gradient(
    model: nn.Module, state: Mapping[str, Tensor], inputs: tuple[Any, ...], y: Tensor, draw: int
) -> Tensor:
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    seed_everything(draw)
    loss_of(model, inputs, y).backward()
    return gradient_of(model).clone()


def _compare(kept: Kept, task: tuple[str, ...], shares: Sequence[float]) -> None:
    """One model on one graph, at some shares of the peak of stock PyG."""
    key = {"model": task[0], "dataset": dataset_name(task[1])}
    peak = kept.once(("stock", key), lambda: _apart("stock", task))["peak"]

    def run(memory: int, way: Mapping[str, Any] | None) -> dict[str, Any]:
        found = _apart("peak_of", task, memory, way) or {}
        refused = found.get("strategy") == REFUSED
        return found if refused else found | (_apart("cost_of", task, memory, way) or {})

    def find(memory: int) -> dict[str, Any]:
        names = ("peak", "seconds", "error")
        own, way = run(memory, None), (_apart("uniform", task, memory) or {})["way"]
        other = {} if way is None else run(memory, way)
        return {
            "plan": own.get("strategy"),
            "planned": own.get("planned"),
            **{name: own.get(name) for name in names},
            "uniform": REFUSED if way is None else way["strategy"],
            **{f"uniform_{name}": other.get(name) for name in names},
        }

    for share in shares:
        memory = int(peak * share)
        kept.once(("plans", key | {"share": share, "memory": memory}), find, memory)


def _apart(function: str, task: tuple[str, ...], *more: Any) -> Any:
    """Return a result from a fresh process; None where the memory did not suffice."""
    return checked(call(f"experiments.plans:{function}", *task, *more), f"{function} of {task[0]}")


def _shares(text: str) -> list[float]:
    return [float(share) / 100 for share in text.split(",")]


@command.main(
    command.names("--models", KINDS),
    command.flag("--datasets", default="digits", metavar="D,D"),
    command.DATA_ROOT,
    command.flag("--shares", _shares, "75,50,25,10", "of stock's peak, in percent"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    kept = args.keep(FILE_NAME, steps=_STEPS)
    kept.content |= {kind: kept.content.get(kind, []) for kind in ("stock", "plans")}
    for dataset in args.datasets.split(","):
        for model in args.models:
            args.say(f"{model} on {dataset_name(dataset)}")
            _compare(kept, (model, dataset, str(args.data_root)), args.shares)
    args.show("plans", rows(kept.content["plans"]))
    args.say(verdict(kept.content["plans"]))


if __name__ == "__main__":
    raise SystemExit(main())

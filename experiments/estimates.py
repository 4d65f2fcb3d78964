"""The peaks that a memory budget predicts beside measured ones, and whether budgets are kept.

``python -m experiments.estimates --models gat,gcn --datasets D/cora.npz,D/flickr_graph.npz --out
DIR`` estimates each model on each graph, then trains it for some steps in each way, in a fresh
process each and after a step of a copy, and compares the peaks. ``--budgets`` also has
``wrap(memory=)`` choose under a few budgets, in a process that can get no more memory than that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gact_graph
from datasets import load
from experiments.helpers import command
from experiments.helpers.errors import UsageError
from experiments.helpers.kept import Kept
from experiments.helpers.levels import Level
from experiments.helpers.process import call, checked, set_cap
from experiments.helpers.summary import dataset_name
from experiments.helpers.tables import Column, Row, Table, cell, table
from experiments.helpers.train import seed_everything
from experiments.models.memory import KINDS
from gact_graph.support.memory import heap
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import PeakMeter
from gact_graph.support.storage import tensors_in

FILE_NAME = "estimates.json"

_STEPS = 4
_WAYS = "stock,lossless,lossless + blocks,L1 8,L1 4,L1 2,CB2 4"
REFUSED = "refused"
"""In place of a strategy, where :func:`gact_graph.wrap` raised that none fits."""

_WITHIN = 0.1
"""Largest relative error of a prediction that counts as right."""


def predictions(pairs: Sequence[Row]) -> Table:
    """Return predicted and measured peaks, one row a model and graph, one column a strategy."""
    ways = [*dict.fromkeys(pair["way"] for pair in pairs)]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for pair in pairs:
        row = rows.setdefault((pair["model"], pair["dataset"]), {})
        row[pair["way"]] = cell("{predicted:MB} / {measured:MB|does not fit}", pair)
    lines = [(*key, *(row.get(way, "") for way in ways)) for key, row in rows.items()]
    return Table(("model", "graph", *ways), lines)


_BUDGETS: tuple[Column, ...] = (
    ("model", "{model}"),
    ("graph", "{dataset}"),
    ("budget, MB", "{memory:MB}"),
    ("made for", "{for}"),
    ("chosen", "{chosen:|ended by the cap}"),
    ("peak, MB", "{peak:MB}"),
)


def budgets(rows: Sequence[Row]) -> tuple[Table, str]:
    """Return one row a budget, and how many were kept."""
    kept = sum(row["peak"] is not None and row["peak"] <= row["memory"] for row in rows)
    refused = sum(row["chosen"] == REFUSED for row in rows)
    text = f"Budgets kept: {kept} of {len(rows)}; refused although a strategy fits: {refused}."
    return table(_BUDGETS, rows), text


def verdict(pairs: Sequence[Row]) -> str:
    """Return how many predictions were right, and the largest error."""
    off = [p["predicted"] / p["measured"] - 1 for p in pairs if p["measured"] is not None]
    if not off:
        return "Nothing was measured."
    within = sum(abs(value) <= _WITHIN for value in off)
    return (
        f"{within} of {len(off)} predictions are within {_WITHIN:.0%} of the measurement; the "
        f"largest error is {max(off, key=abs):+.0%}."
    )


def _compare(kept: Kept, task: tuple[str, ...], ways: list[str], budgets: list[str]) -> None:
    """One model on one graph: its estimate, the peak in each way, and the result of budgets."""
    key = {"model": task[0], "dataset": dataset_name(task[1])}
    estimates = kept.once(("estimates", key), lambda: _apart("estimate", task) or {"ways": []})
    rows = {row["way"]: row for row in estimates["ways"]}
    for way in (*ways, *budgets):
        if way not in rows:
            raise UsageError(f"Expected ways of {'; '.join(rows)} (got {way!r})")
    nothing = {"way": None, "peak_bytes": None}

    def measure(way: str) -> dict[str, Any]:
        answer = _apart("peak_of", task, rows[way]) or nothing
        return {"predicted": rows[way]["peak_bytes"], "measured": answer["peak_bytes"]}

    def give(memory: int) -> dict[str, Any]:
        answer = _apart("choice", task, memory) or nothing
        return {"chosen": answer["way"], "peak": answer["peak_bytes"]}

    for way in ways:
        kept.once(("pairs", key | {"way": way}), measure, way)
    for way in budgets:
        memory = int(rows[way]["peak_bytes"] * 1.05) + (5 << 20)
        place = ("budgets", key | {"for": way, "memory": memory})
        kept.once(place, give, memory)


def _apart(function: str, task: tuple[str, ...], *more: Any) -> Any:
    """Return a result from a fresh process; None where the memory did not suffice."""
    return checked(
        call(f"experiments.estimates:{function}", *task, *more), f"{function} of {task[0]}"
    )


def prepared(model: str, dataset: str, root: str) -> tuple[nn.Module, tuple[Any, ...], Tensor]:
    """Return a model with initialized parameters, its inputs on a graph, and the labels."""
    graph = load(dataset, root)
    seed_everything(0)
    made, inputs = KINDS[model].make(graph), KINDS[model].inputs(graph)
    with torch.no_grad():
        made.eval()(*inputs)  # gives lazily initialised parameters their values
    heap.trim()  # else training would start in memory that this has left, and seem to take less
    return made.train(), inputs, graph.y


def estimate(*task: str) -> dict[str, Any]:
    """Return the library's estimate of a model on a graph."""
    model, inputs, _ = prepared(*task)
    rows = gact_graph.estimate(model, *inputs).to_dict()["strategies"]
    return {"ways": [{"way": row.pop("strategy"), **row} for row in rows]}


def peak_of(model: str, dataset: str, root: str, way: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of a model in a way of the estimate."""
    made, inputs, y = prepared(model, dataset, root)
    memory_policy.limit(way["peak_bytes"])  # as within a budget of that size
    # Libraries stay in a process after its first step, whatever trains.
    train(_in_way(copy.deepcopy(made), way), inputs, y, 1)
    return {"peak_bytes": train(_in_way(made, way), inputs, y, _STEPS)}


def choice(model: str, dataset: str, root: str, memory: int) -> dict[str, Any]:
    """Return the way that a budget of ``memory`` bytes leads to, and the peak."""
    made, inputs, y = prepared(model, dataset, root)
    gact_graph.wrap(made, memory=memory)
    try:
        # The first training call chooses; its graph is dropped.
        for output in tensors_in(made(*inputs)):
            del output
    except gact_graph.MemoryBudgetError:
        return {"way": REFUSED, "peak_bytes": None}
    set_cap(torch.device("cpu"), memory)
    peak = train(made, inputs, y, _STEPS)
    return {"peak_bytes": peak, "way": gact_graph.report(made).strategy}


def _in_way(model: nn.Module, way: dict[str, Any]) -> nn.Module:
    if way["level"] is None:
        return model
    return Level(way["level"], way["blocks"], way["bits"]).wrap(model, adaptive=True)


def train(model: nn.Module, inputs: tuple[Any, ...], y: Tensor, steps: int) -> int:
    """Train, and return the peak in bytes, above the memory of the process before.

    Freed memory that is kept for the next step goes back to the system first: it is as much as
    there is room for, not what training needs.
    """
    step, device = stepper(model, inputs, y), torch.device("cpu")
    with PeakMeter(device) as meter:
        for _ in range(steps):
            memory_policy.release(device)
            step()
    assert meter.peak_bytes is not None
    return meter.peak_bytes


def stepper(model: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Callable[[], None]:
    """Return a function that runs a training step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, inputs, y).backward()
        optimizer.step()

    return step


def loss_of(model: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
    """Return the sum of the losses of all outputs, a scalar."""
    outputs = tensors_in(model(*inputs))
    return torch.stack([nn.functional.cross_entropy(output, y) for output in outputs]).sum()


def _ways(text: str) -> list[str]:
    """``L1 4`` on the command line is ``L1, 4 bits`` in the table of an estimate."""
    parts = (way.rpartition(" ") for way in text.split(",") if way)
    return [f"{a}, {bits} bits" if bits.isdigit() else f"{a}{s}{bits}" for a, s, bits in parts]


@command.main(
    command.names("--models", KINDS),
    command.flag("--datasets", default="digits", metavar="D,D"),
    command.DATA_ROOT,
    command.flag("--ways", _ways, _WAYS),
    command.flag("--budgets", _ways, "", "ways for each of which a budget is given"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    kept = args.keep(FILE_NAME, steps=_STEPS)
    kept.content |= {kind: kept.content.get(kind, []) for kind in ("estimates", "pairs", "budgets")}
    for dataset in args.datasets.split(","):
        for model in args.models:
            args.say(f"{model} on {dataset_name(dataset)}")
            _compare(kept, (model, dataset, str(args.data_root)), args.ways, args.budgets)
    pairs = kept.content["pairs"]
    args.show("predicted / measured peaks, MB", predictions(pairs))
    args.say(verdict(pairs))
    shown, text = budgets(kept.content["budgets"])
    args.show("budgets", shown)
    args.say(text)


if __name__ == "__main__":
    raise SystemExit(main())

"""The memory and the traffic of graphs that do not fit on this machine, from plans for their size.

``python -m experiments.scale --counted PARTITION.json --out DIR`` takes published graphs, or one
graph of ``--nodes``, ``--edges``, ``--features`` and ``--classes``. The plans are made by
``gact_graph.plan(..., nodes=, edges=)`` with a small random graph of as many edges per node.
``--counted`` is a result of ``experiments.partition``: the cuts of its graph give the rows of the
largest of several parts, as shares of the graph. ``--check`` compares each formula with
measurements on graphs of four sizes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import gact_graph
from datasets import Graph, load
from datasets.published import Size
from experiments.helpers import command
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.kept import Kept
from experiments.helpers.process import CAPPED, call_together, checked, environment, set_cap
from experiments.helpers.recipes import Recipe
from experiments.helpers.runner import reason_of, run_parts
from experiments.helpers.steps import train
from experiments.helpers.strategies import Case
from experiments.helpers.subjects import ON_EDGES
from experiments.helpers.tables import Column, Row, Table, table
from experiments.helpers.train import seed_everything
from experiments.helpers.values import parse_count
from experiments.models.nets import attention, gcn
from experiments.partition import count
from gact_graph.api.report.names import parse_bytes
from gact_graph.support.memory import heap
from gact_graph.support.peak import resident_bytes

GRAPHS = {
    "Reddit": Size(232_965, 114_615_892, 602, 41),
    "ogbn-products": Size(2_449_029, 123_718_280, 100, 47),
    "ogbn-papers100M": Size(111_059_956, 1_615_685_872, 128, 172),
    "MAG240M, citations": Size(121_751_666, 1_297_748_926, 768, 153),
    "mesh": Size(166_666_667, 1_000_000_000, 12, 3),
}
"""Nodes, edges, features and classes as published; the mesh has six edges per node."""

MODELS = ("gat", "gcn")

_SAMPLE = 2048
"""Nodes of the random graph from which plans are made."""

_CHECKED = tuple(f"synthetic:ogbn-arxiv@{scale}" for scale in (0.25, 0.5, 1, 2))
_BUDGETS = 0.5, 0.2
_ANY = 1e18
"""A budget that is large enough for any step."""

_STEPS = 3


class Network(NamedTuple):
    """The sizes of a network.

    Attributes:
        model: One of :data:`MODELS`.
        layers: The number of convs.
        hidden: The channels of a hidden layer; of each head for GAT.
        heads: The number of heads of GAT.
    """

    model: str
    layers: int
    hidden: int
    heads: int

    def make(self, size: Size) -> nn.Module:
        """Return the network for a graph, with batch norm, ReLU and dropout between convs."""
        seed_everything(0)
        recipe = Recipe(self.layers, self.hidden, 0.5, 0.01, 1, heads=self.heads)
        if self.model == "gcn":
            return gcn(recipe, size.features, size.classes, normalize=True)
        return attention(recipe, size.features, size.classes, GATConv)

    def row_bytes(self, classes: int) -> tuple[int, int]:
        """Return the bytes of a row of the halo in forward, and of its gradient in backward.

        A conv exchanges transformed rows. GAT adds a score for each head, and GCN the degree, which
        has no gradient.
        """
        if self.model == "gcn":
            numbers = (self.layers - 1) * self.hidden + classes
            return 4 * (numbers + self.layers), 4 * numbers
        numbers = self.heads * ((self.layers - 1) * (self.hidden + 1) + classes + 1)
        return 4 * numbers, 4 * numbers


class Part(NamedTuple):
    """A part of a graph, in numbers of rows.

    Attributes:
        nodes: Its nodes.
        halo: Rows that it fetches.
        sends: Rows that it sends.
        edges: Its edges.
    """

    nodes: float
    halo: float
    sends: float
    edges: float

    def data_bytes(self, size: Size) -> float:
        """Return the bytes of features, labels and edges."""
        return self.nodes * (4 * size.features + 8) + self.edges * 16

    def sent_bytes(self, network: Network, classes: int) -> float:
        """Return the bytes that the part sends in a step."""
        forward, backward = network.row_bytes(classes)
        return self.sends * forward + self.halo * backward


def parts_of(size: Size, counted: Row) -> list[Part]:
    """Return the parts of a graph that is cut like a counted graph."""
    of_nodes, of_edges = size.nodes / sum(counted["nodes"]), size.edges / sum(counted["edges"])
    rows = zip(*(counted[name] for name in ("nodes", "halo", "sends", "edges")), strict=True)
    return [
        Part(nodes * of_nodes, halo * of_nodes, sends * of_nodes, edges * of_edges)
        for nodes, halo, sends, edges in rows
    ]


def whole(size: Size) -> Part:
    """Return the part that is the whole graph."""
    return Part(size.nodes, 0, 0, size.edges)


def largest(parts: Sequence[Part]) -> Part:
    """Return the maximum of each number over the parts."""
    return Part(*map(max, zip(*parts, strict=True)))


def sample_of(size: Size) -> tuple[Tensor, Tensor]:
    """Return features and edges of a random graph with as many edges per node."""
    generator = torch.Generator().manual_seed(0)
    edges = round(_SAMPLE * size.edges / size.nodes)
    x = torch.randn(_SAMPLE, size.features, generator=generator)
    return x, torch.randint(_SAMPLE, (2, edges), generator=generator)


def plan_of(network: Network, size: Size, part: Part, memory: float) -> gact_graph.Plan | None:
    """Return the plan of a part in memory that includes its data; None if nothing fits."""
    model = network.make(size)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    left = memory - part.data_bytes(size) - parameters
    if left < 1:
        return None
    nodes = round(part.nodes + part.halo)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a budget above the memory of this machine
        try:
            return gact_graph.plan(
                *(model, *sample_of(size)), memory=left, nodes=nodes, edges=round(part.edges)
            )
        except gact_graph.MemoryBudgetError:
            return None


def alone(network: Network, size: Size) -> dict[str, Any]:
    """Return the bytes of the data, alone, with a step of stock PyG, and with the smallest step."""
    model, one = network.make(size), whole(size)
    estimate = gact_graph.estimate(*(model, *sample_of(size)), nodes=size.nodes, edges=size.edges)
    stock, (strategy, least) = estimate.rows[0].peak_bytes, estimate.smallest()
    data = one.data_bytes(size)
    return {"data": data, "stock": data + stock, "least": data + least, "by": strategy.name}


def processes(network: Network, size: Size, memory: int, counted: Sequence[Row]) -> dict[str, Any]:
    """Return the smallest counted number of processes that each have enough memory."""
    cuts = [[whole(size)], *(parts_of(size, row) for row in counted)]
    found: tuple[list[Part], gact_graph.Plan] | None = None
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        plan = plan_of(network, size, largest(cuts[middle]), memory)
        if plan is None:
            low = middle + 1
        else:
            high, found = middle, (cuts[middle], plan)
    if found is None:
        return {"parts": None, "most": len(cuts[-1])}
    parts, plan = found
    sent = max(part.sent_bytes(network, size.classes) for part in parts)
    return {"parts": len(parts), "bits": plan.strategy.bits, "sent": sent}


_NEEDS: tuple[Column, ...] = (
    ("graph", "{graph}"),
    ("model", "{model}"),
    ("nodes", "{nodes:,}"),
    ("edges", "{edges:,}"),
    ("data, GB", lambda row: _gb(row["data"])),
    ("stock PyG, GB", lambda row: _gb(row["stock"])),
    ("at least, GB", lambda row: _gb(row["least"])),
)


def needs(content: Row) -> Table:
    """Return a row for each graph and model."""

    def column(memory: int) -> Column:
        def processes_in(row: Row) -> str:
            found = next(f for f in row["processes"] if f["memory"] == memory)
            if found["parts"] is None:
                return f"more than {found['most']}"
            bits = "exact" if found["bits"] == 32 else f"{found['bits']:g} bits"
            sent = f", {_gb(found['sent'])} GB sent" if found["parts"] > 1 else ""
            return f"{found['parts']}: {bits}{sent}"

        return f"processes of {_gb(memory)} GB", processes_in

    rows = content["rows"]
    memories = [found["memory"] for found in rows[0]["processes"]] if rows else []
    return table([*_NEEDS, *map(column, memories)], rows)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.3g}" if count < 1e11 else f"{count / 1e9:,.0f}"


_CHECKS: tuple[Column, ...] = (
    ("formula", "{formula}"),
    ("graph", "{graph}"),
    ("predicted, MB", "{predicted:1MB|}"),
    ("measured, MB", "{measured:1MB|}"),
    ("difference", "{difference:+.1%|}"),
)


def checks(content: Row) -> Table:
    """Return a row for each formula and graph."""

    def line(row: Row) -> Row:
        measured = row["measured"]
        return {**row, "difference": row["predicted"] / measured - 1 if measured else None}

    return table(_CHECKS, map(line, content["rows"]))


def _size_of(graph: Graph) -> Size:
    return Size(graph.num_nodes, graph.num_edges, graph.x.size(1), graph.num_classes)


def stock(network: Sequence[Any], dataset: str) -> dict[str, Any]:
    """Return the bytes of a step of stock PyG on a graph, by a plan."""
    own, size = Network(*network), _size_of(load(dataset, "data"))
    plan = plan_of(own, size, whole(size), _ANY)
    assert plan is not None
    return {"peak": plan.stock_bytes}


def trained(network: Sequence[Any], dataset: str, memory: float | None = None) -> dict[str, int]:
    """Return the predicted and the measured peak of training with a plan; empty if nothing fits.

    The process plans and trains, as with ``wrap(model, memory=...)``: the libraries that the search
    loads are in its peak, and in the plan.

    Args:
        network: A :class:`Network`.
        dataset: The name of a graph.
        memory: The budget of the plan, in addition to the data, which caps the process; None
            trains with stock PyG, without a prediction.
    """
    own, graph = Network(*network), load(dataset, "data")
    size = _size_of(graph)
    model = own.make(size)
    heap.trim()
    before, found = resident_bytes() or 0, {}
    if memory is not None:
        set_cap(torch.device("cpu"), int(memory))
        plan = plan_of(own, size, whole(size), memory + whole(size).data_bytes(size))
        if plan is None:
            return {}
        gact_graph.wrap(model, plan=plan)
        found = {"predicted": plan.peak_bytes}
        heap.trim()
    grown = (resident_bytes() or 0) - before
    inputs = graph.x, graph.edge_index
    return found | {"measured": grown + train(model, inputs, graph.y, _STEPS)}


def sent(network: Sequence[Any], dataset: str, parts: int) -> dict[str, Any]:
    """Return the predicted and the measured bytes that the parts of a graph send in a step."""
    own, size = Network(*network), _size_of(load(dataset, "data"))
    cuts = parts_of(size, count(dataset, "data", "order", parts))
    case = Case(
        ON_EDGES[own.model],
        "L1+blocks",
        dataset,
        steps=2,
        hidden=own.hidden,
        layers=own.layers,
        parts=parts,
        cut="order",  # edges of these graphs are random: no cut is better
        threads=1,
    )
    ranks = run_parts(case)
    if reason := reason_of(ranks):
        raise ExperimentError(f"{parts} processes on {dataset}: {reason}")
    measured = max(rank["sent_bytes"] for rank in ranks)
    predicted = max(part.sent_bytes(own, size.classes) for part in cuts)
    return {"predicted": predicted, "measured": measured}


def _apart(function: str, *arguments: Any) -> dict[str, Any]:
    """Return a result from a fresh process; empty where the memory did not suffice for training."""
    variables, name = environment("kept"), f"experiments.scale:{function}"
    variables = CAPPED | variables
    needed = function == "stock"
    return checked(call_together(name, [arguments], variables)[0], function, needed) or {}


def _compare(kept: Kept, network: Network, dataset: str) -> None:
    """Compare the formulas with measurements on a graph."""

    def keep(formula: str, predicted: int | None, function: str, *arguments: Any) -> None:
        def find() -> dict[str, Any]:
            found = _apart(function, [*network], dataset, *arguments)
            return {"predicted": predicted, "measured": None} | found

        place = {"formula": f"{network.model}: {formula}", "graph": dataset}
        kept.once(("rows", place), find)

    of_stock = _apart("stock", [*network], dataset)["peak"]
    keep("stock PyG", of_stock, "trained")
    for share in _BUDGETS:
        keep(f"plan for {share:.0%} of stock PyG", None, "trained", share * of_stock)
    keep("bytes sent by 2 processes", None, "sent", 2)


def _counted(path: Path | None) -> list[Row]:
    """Read the cuts of a result of ``experiments.partition``."""
    if path is None:
        return []
    try:
        content = json.loads(path.read_text())
        rows: list[Row] = content["counted"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"Expected --counted to be a result of experiments.partition (got {path}: {error})"
        ) from None
    return sorted(rows, key=lambda row: int(row["parts"]))


def _memories(text: str) -> list[int]:
    return [parse_bytes(part) for part in text.split(",")]


@command.main(
    command.number("--nodes", text="nodes of a graph of your own, with the next three"),
    command.number("--edges", text="its edges"),
    command.number("--features", text="its features"),
    command.number("--classes", text="its classes"),
    command.names("--models", MODELS),
    command.flag("--layers", parse_count, 3, "convs", metavar="N"),
    command.number("--hidden", text="channels, of each head for GAT (default: 64, GCN 256)"),
    command.flag("--heads", parse_count, 3, "of GAT", metavar="N"),
    command.flag("--memory", _memories, "24 GB,80 GB,141 GB", "of a process"),
    command.flag("--counted", Path, text="a result of experiments.partition", metavar="FILE"),
    command.switch("--check", "compare the formulas with measurements on graphs of four sizes"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    own = args.nodes, args.edges, args.features, args.classes
    if any(own) and not all(own):
        raise UsageError(
            f"Expected --nodes, --edges, --features and --classes together (got {own})"
        )
    graphs = {"your graph": Size(*own)} if all(own) else GRAPHS
    counted = _counted(args.counted)
    settings: dict[str, Any] = {}
    if not args.check:
        settings = {"memory": list(args.memory), "counted": args.counted and args.counted.name}
    file = "checks.json" if args.check else "scale.json"
    kept = args.keep(file, "layers", "hidden", "heads", **settings)
    kept.content.setdefault("rows", [])
    for model in args.models:
        hidden = args.hidden or {"gat": 64, "gcn": 256}[model]
        network = Network(model, args.layers, hidden, args.heads)
        if args.check:
            args.say(f"{model}: formulas and measurements")
            for dataset in _CHECKED:
                _compare(kept, network, dataset)
            continue
        for name, size in graphs.items():
            args.say(f"{model} on {name}")
            key = {"graph": name, "model": model, **size._asdict()}
            kept.once(("rows", key), _need, network, size, args.memory, counted)
    title = "formulas beside measurements" if args.check else "what a graph needs"
    args.show(title, (checks if args.check else needs)(kept.content))


def _need(
    network: Network, size: Size, memories: Sequence[int], counted: Sequence[Row]
) -> dict[str, Any]:
    found = [{"memory": m, **processes(network, size, m, counted)} for m in memories]
    return {**alone(network, size), "processes": found}


if __name__ == "__main__":
    raise SystemExit(main())

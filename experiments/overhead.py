"""The cost of compression in time by the size of the graph, mini-batches included.

``python -m experiments.overhead --models gat --nodes 1000,10000,100000 --out FILE.json``

Each size is a block model with that many nodes. Models train on the whole graph and, for the
largest size, also on mini-batches, each the subgraph of ``--batch`` random nodes. Stock and wrapped
copies of a model take steps in turn, each on the same graphs: see
:func:`experiments.helpers.timing.time_models`. The model is wrapped with the library's defaults, so
contexts of small graphs are not compressed, as for a user, unless ``--small`` is given. With
``--compile``, all models but stock are compiled, and so is a second copy of stock.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch_geometric.utils import subgraph

import gact_graph
from datasets.published import Size
from datasets.synthetic import block_model
from experiments.helpers import command
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.levels import EXACT_LEVELS, LEVELS, label
from experiments.helpers.subjects import LAYERS, SUBJECTS, make
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.timing import STOCK, time_models
from experiments.helpers.values import FP32_BITS, parse_count
from gact_graph.api.report.names import counted

_MODELS = [name for name, subject in SUBJECTS.items() if subject.layout == "edge_index"]
_FEATURES, _CLASSES = 128, 40
_COMPILED = "compiled"
_BEFORE = 4
"""Steps before the first timed one, in which the wrapped model finds its bits."""


def by_graph(content: Mapping[str, Any]) -> Table:
    """Return one row for each model and size: the time of a step and its ratio at each level."""
    levels, bits = content["levels"], content["bits"]
    spec: tuple[Column, ...] = (
        *(("", "{model}"), ("", "{row}"), ("edges", "{edges:,.0f}")),
        ("stock PyG", "{median_seconds[fp32]:.3g} s"),
        *(((_COMPILED, f"{{ratio[{_COMPILED}]:.2f}}x"),) if content.get("compile") else ()),
        *((label(level, bits), f"{{ratio[{level}]:.2f}}x") for level in levels),
    )
    rows = (
        {"model": LAYERS.get(model, model), "row": row, **timing}
        for model, timings in content["models"].items()
        for row, timing in timings.items()
    )
    return table(spec, rows)


def batches_of(task: NodeTask, nodes: int, count: int) -> list[NodeTask]:
    """Return subgraphs of random nodes, all of which are training nodes."""
    generator = torch.Generator().manual_seed(0)
    subgraphs = []
    for _ in range(count):
        chosen = torch.randperm(len(task.x), generator=generator)[:nodes].to(task.x.device)
        edges, _ = subgraph(chosen, task.adjacency, relabel_nodes=True, num_nodes=len(task.x))
        every = torch.arange(len(chosen), device=task.x.device)
        x, y = task.x[chosen], task.y[chosen]
        subgraphs.append(dataclasses.replace(task, x=x, adjacency=edges, y=y, train_idx=every))
    return subgraphs


def time_steps(args: command.Args, name: str, graphs: Sequence[NodeTask]) -> dict[str, Any]:
    """Time steps on these graphs, one after another.

    Returns:
        ``nodes`` and ``edges`` of a graph on average, ``median_seconds`` of ``fp32`` and of each
        level, and ``ratio``, each level's median over that of ``fp32``. With ``--compile`` also
        those of ``compiled``, without compression.
    """
    sizes = {} if args.hidden is None else {"hidden": args.hidden}
    models: dict[str, Any] = {STOCK: make(SUBJECTS[name], graphs[0], **sizes)}
    if args.compile:
        torch.compiler.reset()
        models[_COMPILED] = torch.compile(copy.deepcopy(models[STOCK]))
    options: dict[str, Any] = {"min_bytes": 0} if args.small else {}
    for level in args.levels:
        bits = FP32_BITS if level in EXACT_LEVELS else args.bits
        own = gact_graph.wrap(copy.deepcopy(models[STOCK]), bits=bits, level=level, **options)
        models[level] = torch.compile(own) if args.compile else own
    order = {model: itertools.cycle(graphs) for model in models}
    timing = time_models(
        models, lambda model: next(order[model]), SUBJECTS[name].lr, args.rounds, _BEFORE
    )
    return {
        "nodes": statistics.mean(len(graph.x) for graph in graphs),
        "edges": statistics.mean(graph.adjacency.size(1) for graph in graphs),
        **{key: timing[key] for key in ("median_seconds", "ratio")},
    }


@command.main(
    command.DEVICE,
    command.names("--models", _MODELS, "gcn-edge_index,gat"),
    command.names("--levels", LEVELS, "lossless,L1"),
    command.several("--nodes", parse_count, "1000,10000,100000", "the sizes"),
    command.number("--degree", 14, "edges a node"),
    command.number("--batch", 20_000, "nodes of a mini-batch"),
    command.number("--hidden", text="in place of the model's"),
    command.BITS,
    command.switch("--small", "compress small graphs too"),
    command.switch("--compile", "compile all models but stock"),
    command.number("--rounds", 5),
    command.OUT_FILE,
)
def main(args: command.Args) -> None:
    torch._dynamo.config.recompile_limit = 64  # several models of one class
    settings = ("levels", "bits", "degree", "hidden", "small", "compile", "rounds")
    largest = max(args.nodes)  # the graph of the mini-batches
    kept = args.keep(None, *settings, largest=largest)
    for nodes in sorted(args.nodes):
        size = Size(nodes, args.degree * nodes, _FEATURES, _CLASSES)
        task = prepare(block_model(size), "edge_index", device=args.device)
        graphs = {f"full batch, {nodes:,} nodes": [task]}
        if nodes == largest:
            batch = min(args.batch, nodes)
            graphs[f"mini-batches of {batch:,} nodes"] = batches_of(task, batch, args.rounds)
        for name, row in itertools.product(args.models, graphs):
            kept.once(("models", name, row), time_steps, args, name, graphs[row])
    args.show("A training step, median", by_graph(kept.content))
    threads = counted(kept.content["threads"], "thread")
    args.say(f"{counted(args.rounds, 'round')} in turn, {threads}, {args.device}")


if __name__ == "__main__":
    raise SystemExit(main())

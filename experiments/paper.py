"""The tables of the GACT paper, each from one command, with the paper's numbers beside ours.

``python -m experiments.paper table2 --data DIR --out DIR`` trains GCN, GAT and GCNII in fp32 and
with 4, 3 and 2 bits. ``table3`` finds the deepest and the widest model within a memory, ``table4``
compares ways to swap on a GPU, ``figure3`` draws sensitivities.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from datasets import load
from experiments import scaling, sensitivity, swap
from experiments.helpers import command
from experiments.helpers.data import layout_of, prepare
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.job import Job, run_variants
from experiments.helpers.kept import write_atomically, write_json
from experiments.helpers.paper import table2, table3
from experiments.helpers.recipes import MODELS, recipe_for
from experiments.helpers.summary import dataset_name
from experiments.helpers.tables import Table
from experiments.helpers.train import Setup
from experiments.helpers.values import parse_path, parse_seeds

_FOLDERS = {
    "flickr": ("Flickr",),
    "reddit": ("Reddit2",),
    "yelp": ("Yelp",),
    "ogbn-arxiv": ("ogbn_arxiv", "ogbn_arxiv_pyg"),
}
"""Where the files of the paper's data sets lie, in ``--data``."""

_RECORDED = (
    *("seed", "test_score", "val_score", "best_epoch", "rate", "raw_bytes", "stored_bytes"),
    *("average_bits", "epoch_seconds", "train_seconds", "measuring_seconds", "passes"),
)
"""The entries of each run in ``table2.json``."""

_VARIED = ("bits", "level", "adaptive", "blocks")
"""The entries of a configuration that differ between variants."""

_SCALED = ("stock", "lossless+blocks", "L1+blocks")
"""Variants of Table 3: the paper's L0 and L1, and exact tensors; the last two in blocks."""


def graphs_in(data: Path) -> dict[str, str]:
    """Return the graphs to train on, by name: the paper's data sets, else the ``.npz`` files.

    Raises:
        ExperimentError: If there is neither.
    """
    published = {
        name: name
        for name, folders in _FOLDERS.items()
        if any((data / folder).is_dir() for folder in folders)
    }
    entries = published or {path.stem: str(path) for path in sorted(data.glob("*.npz"))}
    if not entries:
        raise ExperimentError(
            f"Expected --data to hold data sets of the paper or .npz files (got neither in {data})"
        )
    return entries


def _table2(args: command.Args) -> None:
    entries: dict[str, Any] = {}
    for graph, dataset in _graphs(args).items():
        for model in args.models:
            entries[f"{graph}-{model}"] = _study(args, graph, dataset, model)
            write_json(args.out / "table2.json", entries)
    title = "Table 2: score, %, difference to fp32 with its 95 % interval, and rate"
    _show(args, title, table2(entries))


def _study(args: command.Args, graph: str, dataset: str, model: str) -> dict[str, Any]:
    loaded = load(dataset, args.data)
    sizes = {"epochs": args.epochs, "hidden": args.hidden, "layers": args.layers}
    recipe = recipe_for(model, dataset, **sizes)
    task = prepare(loaded, layout_of(model), standardize=recipe.standardize, device=args.device)
    setup, out = Setup(model, recipe, 4, "L1"), args.out / f"{graph}-{model}"
    job = Job(setup, dataset, loaded, task, args.seeds, out)
    results, _ = run_variants(job, args.console, f"{graph}, {model}, ")
    runs = {
        name: [
            {key: record[key] for key in _RECORDED}
            for record in found["runs"]
            if record["seed"] in args.seeds
        ]
        for name, found in results.items()
    }
    config = results["fp32"]["config"]
    shown = {key: value for key, value in config.items() if key not in _VARIED}
    head = {"graph": graph, "model": model, "config": shown | {"dataset": Path(dataset).name}}
    return head | args.origin | {"runs": runs}


def _table3(args: command.Args) -> None:
    dataset = _one_graph(args)
    content = {"dataset": dataset_name(dataset)}
    content |= args.origin | {"threads": torch.get_num_threads()}
    rows: list[dict[str, Any]] = []
    for model, memory in itertools.product(args.models, args.memory.split(",")):
        out = args.out / "table3" / model / memory
        _call(
            scaling.main,
            *("--model", model, "--dataset", dataset, "--memory", memory, "--out", out),
            *("--variants", ",".join(args.variants), "--device", args.device),
        )
        largest = json.loads((out / "scaling.json").read_text())["largest"]
        rows += [
            {"model": model, "memory": memory, "vary": vary, "variant": variant, **sizes[variant]}
            for vary, sizes in largest.items()
            for variant in args.variants
        ]
        write_json(args.out / "table3.json", content | {"rows": rows})
    _show(args, "Table 3: the largest model that trains", table3(rows))


def _table4(args: command.Args) -> None:
    if args.device.type != "cuda":
        raise UsageError("Expected a CUDA device for table4, which swaps to host memory (got cpu)")
    for model in args.models:
        flags = ("--model", model, "--dataset", _one_graph(args), "--device", args.device)
        _call(swap.main, *flags, "--out", args.out / "table4" / model)


def _figure3(args: command.Args) -> None:
    for model in args.models:
        out = args.out / "figure3" / model
        flags: list[Any] = ["--model", model, "--dataset", _one_graph(args), "--out", out]
        if args.epochs is not None:
            flags += ["--epochs", args.epochs, "--points", min(6, args.epochs)]
        if args.draws is not None:
            flags += ["--draws", args.draws]
        _call(sensitivity.main, *flags, "--device", args.device)


def _show(args: command.Args, title: str, table: Table) -> None:
    """Print a table, and write it as Markdown."""
    args.show(title, table)
    write_atomically(args.out / f"{args.table}.md", f"{table.markdown()}\n".encode())


def _graphs(args: command.Args) -> dict[str, str]:
    """Return the graphs of ``--graphs``, by name."""
    graphs = graphs_in(args.data)
    names = command.choose("--graphs", args.graphs, graphs) if args.graphs else graphs
    return {name: graphs[name] for name in names}


def _one_graph(args: command.Args) -> str:
    return next(iter(_graphs(args).values()))


def _call(other: Callable[[list[str]], int], *flags: Any) -> None:
    """Run another command of the experiments.

    Raises:
        ExperimentError: If it fails; it has printed the reason.
        KeyboardInterrupt: If Ctrl-C ended it.
    """
    code = other([str(flag) for flag in flags])
    if code == command.INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ExperimentError(f"stopped: {' '.join(map(str, flags))} ended with {code}")


_TABLES: dict[str, tuple[Callable[[command.Args], None], str]] = {
    "table2": (_table2, ",".join(MODELS)),
    "table3": (_table3, ",".join(MODELS)),
    "table4": (_table4, "gat"),
    "figure3": (_figure3, "gat"),
}
"""The function of each table, and its default models."""


@command.main(
    command.choice("table", _TABLES),
    command.flag("--data", parse_path, required=True, metavar="DIR", text="has the graphs"),
    command.OUT_NEEDED,
    command.flag(
        "--graphs",
        text="names separated by commas (default: the paper's data sets that are there, else all "
        ".npz files; the first of them but for table2)",
    ),
    command.flag("--models", text=f"of {', '.join(MODELS)} (default: those of the table)"),
    command.flag("--seeds", parse_seeds, "0-9", "of table2"),
    command.number("--epochs", text="in place of the recipe's"),
    *command.SIZES,
    command.draws(text="of figure3"),
    command.flag("--memory", default="1GB,2GB,4GB", text="of table3"),
    command.names("--variants", _SCALED),
    command.DEVICE,
)
def main(args: command.Args) -> None:
    make, usual = _TABLES[args.table]
    args.models = command.choose("--models", args.models or usual, MODELS)
    make(args)


if __name__ == "__main__":
    raise SystemExit(main())

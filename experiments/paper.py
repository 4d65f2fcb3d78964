"""The tables of the GACT paper, each from one command, with the paper's numbers beside ours.

``python -m experiments.paper table2 --data DIR --out DIR`` trains GCN, GAT and GCNII in fp32 and
with 4, 3 and 2 bits. ``table3`` finds the deepest and the widest model within a memory, ``table4``
compares ways to swap on a GPU, ``figure3`` draws sensitivities. What was trained or found is kept
under ``--out``: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from datasets import load
from experiments import scaling, sensitivity, swap
from experiments.helpers import table2, table3
from experiments.helpers.atomic import write_atomically
from experiments.helpers.compare import VARIANTS
from experiments.helpers.data import layout_of, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.job import Job, run
from experiments.helpers.markdown import markdown_table
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.recipes import MODELS, recipe_for
from experiments.helpers.subjects import choose, exit_code, write_json
from experiments.helpers.summary import dataset_name
from experiments.helpers.train import Setup
from experiments.helpers.values import FP32_BITS, parse_count, parse_device, parse_seeds

_FOLDERS = {
    "flickr": ("Flickr",),
    "reddit": ("Reddit2",),
    "yelp": ("Yelp",),
    "ogbn-arxiv": ("ogbn_arxiv", "ogbn_arxiv_pyg"),
}
"""Where the files of the paper's data sets lie, in ``--data``."""

_SCALED = ("stock", "L1", "L1+blocks", "CB1", "CB2")
"""Of Table 3: the paper's L0, L1, CB1 and CB2, and L1 in blocks."""


@dataclass(frozen=True)
class Run:
    """A command line, read."""

    args: argparse.Namespace
    argv: list[str] | None
    console: Console


def main(argv: list[str] | None = None) -> int:
    """Make the table; return the exit code as the main job does."""
    return exit_code("paper", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    _TABLES[args.table](Run(args, argv, make_console()))


def graphs_in(data: Path) -> dict[str, str]:
    """What to train on, by name: the paper's data sets if all files of one are there, else the
    ``.npz`` files.

    Raises:
        ExperimentError: If there is neither.
    """
    published = {
        name: name
        for name, folders in _FOLDERS.items()
        if any((data / folder).is_dir() for folder in folders)
    }
    found = published or {path.stem: str(path) for path in sorted(data.glob("*.npz"))}
    if not found:
        raise ExperimentError(
            f"Expected --data to hold data sets of the paper or .npz files (got neither in {data})"
        )
    return found


def _table2(given: Run) -> None:
    args = given.args
    found: dict[str, Any] = {}
    graphs = graphs_in(args.data)
    names = choose("--graphs", args.graphs, graphs) if args.graphs else [*graphs]
    for graph in names:
        for model in args.models:
            found[f"{graph}-{model}"] = _study(given, graph, graphs[graph], model)
            write_json(args.out / "table2.json", found)
            table = markdown_table(table2.HEAD, table2.rows(found))
            write_atomically(args.out / "table2.md", f"{table}\n".encode())
    title = "Table 2: score, %, difference to fp32 with its 95 % interval, and rate"
    given.console.print(make_table(title, table2.HEAD, table2.rows(found)))


def _study(given: Run, graph: str, dataset: str, model: str) -> dict[str, Any]:
    args = given.args
    loaded = load(dataset, args.data)
    sizes = {"epochs": args.epochs, "hidden": args.hidden, "layers": args.layers}
    recipe = recipe_for(model, dataset, **sizes)
    task = prepare(loaded, layout_of(model), standardize=recipe.standardize, device=args.device)
    runs: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for variant in VARIANTS:
        say(given.console, f"{graph}, {model}, {variant.label}")
        exact = variant.bits == FP32_BITS
        level, blocks = ("L0", False) if exact else ("L1", None)
        setup = Setup(model, recipe, variant.bits, level, variant.adaptive, blocks)
        out = args.out / f"{graph}-{model}" / variant.name
        results, _ = run(Job(setup, dataset, loaded, task, args.seeds, out), given.console)
        config = config or results.config
        runs[variant.name] = [
            {key: record[key] for key in table2.KEPT}
            for record in results.runs
            if record["seed"] in args.seeds
        ]
    shown = {key: value for key, value in config.items() if key not in table2.VARIED}
    head = {"graph": graph, "model": model, "config": shown | {"dataset": Path(dataset).name}}
    return head | origin("paper", given.argv) | {"runs": runs}


def _table3(given: Run) -> None:
    args = given.args
    model, dataset = args.models[0], _one_graph(args)
    content = {"model": model, "dataset": dataset_name(dataset)}
    content |= origin("paper", given.argv) | {"threads": torch.get_num_threads()}
    rows: list[dict[str, Any]] = []
    for memory in args.memory.split(","):
        for vary in ("depth", "width"):
            for variant in args.variants:
                # A folder for each search: one that is there is not made again.
                out = args.out / "table3" / memory / vary / variant
                if not (out / "scaling.json").exists():
                    _call(
                        scaling.main,
                        *("--model", model, "--dataset", dataset, "--vary", vary),
                        *("--memory", memory, "--variants", variant, "--device", args.device),
                        *("--out", out),
                    )
                found = json.loads((out / "scaling.json").read_text())["largest"][vary][variant]
                rows.append({"memory": memory, "vary": vary, "variant": variant, **found})
                write_json(args.out / "table3.json", content | {"rows": rows})
    head, shown = table3.head(rows), table3.rows(rows)
    write_atomically(args.out / "table3.md", f"{markdown_table(head, shown)}\n".encode())
    given.console.print(make_table("Table 3: the largest model that trains", head, shown))


def _table4(given: Run) -> None:
    if given.args.device.type != "cuda":
        raise UsageError("Expected a CUDA device for table4, which swaps to host memory (got cpu)")
    for model in given.args.models:
        out = given.args.out / "table4" / model
        flags = ("--model", model, "--dataset", _one_graph(given.args), "--out", out)
        _call(swap.main, *flags, "--device", given.args.device)


def _figure3(given: Run) -> None:
    for model in given.args.models:
        out = given.args.out / "figure3" / model
        if (out / "sensitivity.json").exists():
            say(given.console, f"{out} is there already.")
            continue
        flags: list[Any] = ["--model", model, "--dataset", _one_graph(given.args), "--out", out]
        if given.args.epochs is not None:
            flags += ["--epochs", given.args.epochs, "--points", min(6, given.args.epochs)]
        if given.args.draws is not None:
            flags += ["--draws", given.args.draws]
        _call(sensitivity.main, *flags, "--device", given.args.device)


def _one_graph(args: argparse.Namespace) -> str:
    graphs = graphs_in(args.data)
    names = choose("--graphs", args.graphs, graphs) if args.graphs else [*graphs]
    return graphs[names[0]]


def _call(command: Callable[[list[str]], int], *flags: Any) -> None:
    """Run another command of the experiments.

    Raises:
        ExperimentError: If it fails; it has said why.
    """
    code = command([str(flag) for flag in flags])
    if code:
        raise ExperimentError(f"stopped: {' '.join(map(str, flags))} ended with {code}")


_TABLES: dict[str, Callable[[Run], None]] = {
    "table2": _table2,
    "table3": _table3,
    "table4": _table4,
    "figure3": _figure3,
}

_MODELS_OF = {"table2": MODELS, "table3": ("gcn",), "table4": ("gat",), "figure3": ("gat",)}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.paper", description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=tuple(_TABLES))
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="has the graphs")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument(
        "--graphs",
        help="names separated by commas (default: the paper's data sets that are there, else all "
        ".npz files; the first of them but for table2)",
    )
    parser.add_argument("--models", help=f"of {', '.join(MODELS)} (default: those of the table)")
    parser.add_argument(
        "--seeds", type=parse_seeds, default=tuple(range(10)), help="of table2 (default: 0-9)"
    )
    for name in ("epochs", "hidden", "layers"):
        parser.add_argument(
            f"--{name}", type=parse_count, metavar="N", help="default: the recipe's"
        )
    parser.add_argument("--draws", type=parse_count, metavar="N", help="of figure3")
    parser.add_argument(
        "--memory", default="500MB,1GB,2GB,4GB", help="of table3 (default: 500MB,1GB,2GB,4GB)"
    )
    parser.add_argument(
        "--variants", default=",".join(_SCALED), help=f"of table3 (default: {','.join(_SCALED)})"
    )
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    args = parser.parse_args(argv)
    usual = ",".join(_MODELS_OF[args.table])
    args.models = choose("--models", args.models or usual, MODELS)
    args.variants = choose("--variants", args.variants, _SCALED)
    args.device = parse_device(args.device)
    return args


if __name__ == "__main__":
    sys.exit(main())

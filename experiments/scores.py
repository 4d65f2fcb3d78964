"""Test scores of fp32 and of adaptive bits, over graphs, models and seeds.

``python -m experiments.scores --data DIR --out DIR`` trains GCN, GAT and GCNII on the graphs of
:data:`STUDIES`, each in fp32 and with 4, 3 and 2 bits, and writes ``scores.json`` and ``scores.md``
after each. What was trained is kept under ``--out``: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from datasets import load
from experiments.helpers import summary
from experiments.helpers.atomic import write_atomically
from experiments.helpers.compare import VARIANTS
from experiments.helpers.data import layout_of, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.job import Job, run
from experiments.helpers.markdown import markdown_table
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.recipes import MODELS, recipe_for
from experiments.helpers.results import Results
from experiments.helpers.subjects import exit_code, write_json
from experiments.helpers.train import Setup
from experiments.helpers.values import FP32_BITS, parse_device


@dataclass(frozen=True)
class Study:
    """One model on one graph.

    Attributes:
        graph: Its file's name, without the ending.
        model: As in :data:`experiments.helpers.recipes.MODELS`.
        seeds: One run each.
        overrides: Of the recipe's fields.
        blocks: As :func:`gact_graph.wrap` takes it, where contexts are compressed.
    """

    graph: str
    model: str
    seeds: tuple[int, ...]
    overrides: dict[str, int]
    blocks: str | bool = False

    @property
    def name(self) -> str:
        return f"{self.graph}-{self.model}"


_SMALLER = {"hidden": 64, "epochs": 100}

STUDIES = (
    *(Study(g, m, tuple(range(10)), {}) for g in ("cora", "citeseer") for m in MODELS),
    *(
        Study(g, m, (0, 1, 2), _SMALLER)
        for g in ("amazon_computers", "coauthor_cs")
        for m in MODELS
    ),
    Study("arxiv_graph", "gcn", (0,), {"epochs": 40}),
    # In blocks a step takes little more than half the time.
    Study("arxiv_graph", "gat", (0,), {"epochs": 40, "hidden": 64}, blocks="auto"),
)

_COMPARED = tuple(v for v in VARIANTS if v.adaptive or v.bits == FP32_BITS)

_KEPT = (
    *("seed", "test_score", "val_score", "best_epoch", "rate", "raw_bytes", "stored_bytes"),
    *("average_bits", "peak_bytes", "epoch_seconds", "train_seconds", "passes"),
)

HEAD = ("graph", "model", "seeds", *(variant.label for variant in _COMPARED))


def train_study(
    study: Study, args: argparse.Namespace, console: Console, argv: list[str] | None
) -> dict[str, Any]:
    """Train all variants of one study; return what ``scores.json`` holds of it."""
    path = args.data / f"{study.graph}.npz"
    graph = load(str(path), "data")
    recipe = recipe_for(study.model, str(path), **study.overrides)
    task = prepare(
        graph, layout_of(study.model), standardize=recipe.standardize, device=args.device
    )
    found: dict[str, Results] = {}
    for variant in _COMPARED:
        say(console, f"{study.name}, {variant.label}")
        exact = variant.bits == FP32_BITS
        level, blocks = ("L0", False) if exact else ("L1", study.blocks)
        setup = Setup(study.model, recipe, variant.bits, level, variant.adaptive, blocks)
        out = args.out / study.name / variant.name
        job = Job(setup, str(path), graph, task, study.seeds, out)
        found[variant.name], _ = run(job, console)
    # Not the whole path: it is another on each machine.
    config = found[_COMPARED[0].name].config | {"dataset": path.name}
    for varied in ("bits", "level", "adaptive", "blocks"):
        del config[varied]
    return {
        "config": config,
        "blocks": study.blocks,
        **origin("scores", argv),
        "runs": {
            name: [{key: record[key] for key in _KEPT} for record in results.runs]
            for name, results in found.items()
        },
    }


def score_rows(scores: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table's rows under :data:`HEAD`, one a study."""
    rows = []
    for study in STUDIES:
        if study.name in scores:
            runs = scores[study.name]["runs"]
            cells = []
            for variant in _COMPARED:
                records = runs[variant.name]
                cell = summary.percent([record["test_score"] for record in records])
                if variant.bits != FP32_BITS:
                    rates = [record["rate"] for record in records]
                    cell = f"{cell} ({summary.factor(rates)})"
                cells.append(cell)
            rows.append((study.graph, study.model.upper(), str(len(study.seeds)), *cells))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the studies; return the exit code as the main job does."""
    return exit_code("scores", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    console = make_console()
    scores: dict[str, Any] = {}
    for study in STUDIES:
        if study.graph in args.graphs:
            scores[study.name] = train_study(study, args, console, argv)
            write_json(args.out / "scores.json", scores)
            table = markdown_table(HEAD, score_rows(scores))
            write_atomically(args.out / "scores.md", table.encode())
    console.print(make_table("Test scores, %, and rates", HEAD, score_rows(scores)))
    say(console, f"{torch.get_num_threads()} threads, {args.device}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    graphs = tuple(dict.fromkeys(study.graph for study in STUDIES))
    parser = Parser(prog="python -m experiments.scores", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="has the .npz")
    parser.add_argument("--graphs", nargs="+", choices=graphs, default=graphs, help="default: all")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    return args


if __name__ == "__main__":
    sys.exit(main())

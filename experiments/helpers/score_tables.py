"""Tables of test scores: the paper's Table 2 on the graphs at hand, and single studies."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.helpers import summary
from experiments.helpers.compare import VARIANTS
from experiments.helpers.interval import paired_difference, signed_percent
from experiments.helpers.markdown import markdown_table
from experiments.helpers.paper import paper_rates, paper_score
from experiments.helpers.recipes import MODELS
from experiments.helpers.table2 import scores_by_seed
from experiments.helpers.table_sources import read, sources
from experiments.helpers.values import FP32_BITS

_PAPER_DATASETS = ("flickr", "reddit", "yelp", "ogbn-arxiv")

_COMPRESSED = tuple(variant for variant in VARIANTS if variant.bits != FP32_BITS)


def studies(results: Path) -> dict[str, Any]:
    """Each model on each graph, by both names: what ``experiments.paper table2`` has written."""
    found: dict[str, Any] = {}
    for path in (results / "table2").glob("*.json"):
        found |= read(path)
    by_name = sorted(
        found.items(), key=lambda item: (item[1]["graph"], MODELS.index(item[1]["model"]))
    )
    return dict(by_name)


def scores(results: Path) -> str:
    """Scores in fp32, and by how much each compressed run differs from fp32's with its seed."""
    found = studies(results)
    rows = []
    for study in found.values():
        by_seed = scores_by_seed(study)
        exact = by_seed["fp32"]
        rows.append(
            (
                study["graph"],
                study["model"].upper(),
                str(len(exact)),
                summary.percent([*exact.values()]),
                *(
                    signed_percent(paired_difference(by_seed[variant.name], exact))
                    for variant in _COMPRESSED
                ),
                study["commit"],
            )
        )
    labels = (variant.label for variant in _COMPRESSED)
    head = ("graph", "model", "seeds", "fp32", *labels, "commit")
    table = markdown_table(head, rows)
    return f"{table}\n\n{_furthest(found)}\n\n{sources(found.values())}"


def _furthest(found: Mapping[str, Any]) -> str:
    """Say how far below fp32 the worst mean of each width lies, of studies with several seeds."""
    by_seed = {name: scores_by_seed(study) for name, study in found.items()}
    several = {name: scores for name, scores in by_seed.items() if len(scores["fp32"]) > 1}
    said = []
    for variant in _COMPRESSED:
        below = {
            name: 0 - paired_difference(scores[variant.name], scores["fp32"])[0]
            for name, scores in several.items()
        }
        worst = max(below, key=lambda name: below[name])
        where = f"{found[worst]['model'].upper()} on {found[worst]['graph']}"
        said.append(f"{100 * below[worst]:.2f} points with {variant.label} ({where})")
    return f"Largest drop below fp32 among the rows with several seeds: {', '.join(said)}."


def rates(results: Path) -> str:
    """Raw over stored bytes of each model, from the graph with the least to the one with most."""
    found = studies(results)
    rows = []
    for model in MODELS:
        mine = [study for study in found.values() if study["model"] == model]
        means = [
            sorted(_mean_rate(study["runs"][variant.name]) for study in mine)
            for variant in _COMPRESSED
        ]
        ranges = (f"{rates[0]:.1f} to {rates[-1]:.1f}x" for rates in means)
        commits = dict.fromkeys(study["commit"] for study in mine)
        rows.append((model.upper(), *ranges, ", ".join(commits)))
    head = ("", *(variant.label for variant in _COMPRESSED), "commit")
    table = markdown_table(head, rows)
    return f"{table}\n\n{sources(found.values())}"


def _mean_rate(runs: Iterable[Mapping[str, Any]]) -> float:
    return statistics.fmean(run["rate"] for run in runs)


def trainings(results: Path, file: str) -> str:
    """The runs of one file, each entry a row."""
    found = read(results / file)
    rows = [
        (
            name,
            str(len(entry["runs"])),
            summary.percent([run["test_score"] for run in entry["runs"]]),
            summary.factor([run["rate"] for run in entry["runs"]]),
            entry["commit"],
        )
        for name, entry in found.items()
    ]
    table = markdown_table(("", "seeds", "test accuracy, %", "rate", "commit"), rows)
    return f"{table}\n\n{sources(found.values())}"


def paper_scores() -> str:
    """The paper's Table 2."""
    rows = [
        (
            model.upper(),
            *(
                " / ".join(
                    f"{paper_score(model, dataset, variant):.2f}"
                    for variant in ("fp32", "adaptive-4", "adaptive-2")
                )
                for dataset in _PAPER_DATASETS
            ),
        )
        for model in MODELS
    ]
    return markdown_table(("fp32 / 4 bit / 2 bit", *_PAPER_DATASETS), rows)


def paper_rate_ranges() -> str:
    """The paper's rates."""
    widths = [variant for variant in VARIANTS if variant.adaptive]
    rows = []
    for model in MODELS:
        ranges = [paper_rates(model, variant.name) for variant in widths]
        rows.append((model.upper(), *(f"{r[0]} to {r[1]}x" if r else "-" for r in ranges)))
    return markdown_table(("", *(variant.label for variant in widths)), rows)

"""Tables 2 and 3 of the GACT paper (Liu et al., ICML 2022), as far as their numbers are known.

Accuracies (Yelp: micro-F1) are in per cent, means of 10 seeds. Compression rates are given as
the range over the paper's four data sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.helpers import summary
from experiments.helpers.comparison import beside_stock
from experiments.helpers.strategies import LABELS
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.train import Setup
from experiments.helpers.values import FP32_BITS

_SCORES = {
    # (model, data set): fp32, adaptive 4 bit, adaptive 2 bit
    ("gcn", "flickr"): (51.17, 51.08, 51.20),
    ("gcn", "reddit"): (95.33, 95.32, 95.34),
    ("gcn", "yelp"): (39.86, 40.06, 39.89),
    ("gcn", "ogbn-arxiv"): (71.51, 71.35, 70.87),
    ("gat", "flickr"): (52.40, 52.26, 51.62),
    ("gat", "reddit"): (95.95, 96.02, 95.82),
    ("gat", "yelp"): (52.41, 52.18, 51.15),
    ("gat", "ogbn-arxiv"): (71.68, 71.80, 71.21),
    ("gcnii", "flickr"): (52.37, 52.31, 52.23),
    ("gcnii", "reddit"): (96.32, 96.11, 95.54),
    ("gcnii", "yelp"): (62.33, 62.28, 62.33),
    ("gcnii", "ogbn-arxiv"): (72.52, 72.28, 71.74),
}
SCORED = ("fp32", "adaptive-4", "adaptive-2")
DATASETS = ("flickr", "reddit", "yelp", "ogbn-arxiv")

_RATES = {
    # model: adaptive 4, 3, 2 bit, each lowest and highest
    "gcn": ((6.4, 8.1), (7.5, 11.3), (9.0, 17.6)),
    "gat": ((4.2, 5.1), (4.5, 6.1), (5.2, 7.0)),
    "gcnii": ((4.5, 6.7), (5.2, 8.0), (5.9, 10.2)),
}
_RATED = ("adaptive-4", "adaptive-3", "adaptive-2")

_GROWTH = {"depth": (24, 152, 240), "width": (2464, 3948, 4244)}
"""Table 3: the deepest and the widest GCN in 16 GB, at L0, L1 and L2."""


def paper_score(model: str, dataset: str, variant: str) -> float | None:
    """Return the paper's score in percent; ``None`` if it is missing or not known.

    ``dataset`` must be the data set itself: scores of a file with its graph, or of a synthetic
    graph of its size, are not comparable.
    """
    scores = _SCORES.get((model, dataset))
    return dict(zip(SCORED, scores, strict=True)).get(variant) if scores else None


def paper_rates(model: str, variant: str) -> tuple[float, float] | None:
    """Return the paper's lowest and highest compression rate over its data sets, or ``None``."""
    return dict(zip(_RATED, _RATES[model], strict=True)).get(variant)


@dataclass(frozen=True)
class Variant:
    """One line of Table 2; ``name`` is also its folder under ``--out``."""

    name: str
    label: str
    bits: int
    adaptive: bool = False

    def of(self, setup: Setup) -> Setup:
        """Return a setup with these bits: stock's in fp32, else at the setup's own level."""
        exact = self.bits == FP32_BITS
        level, blocks = ("L0", False) if exact else (setup.level, setup.blocks)
        return replace(setup, bits=self.bits, level=level, blocks=blocks, adaptive=self.adaptive)


VARIANTS = (
    Variant("fp32", "fp32", 32),
    Variant("fixed-4", "fixed 4 bit", 4),
    Variant("adaptive-4", "adaptive 4 bit", 4, adaptive=True),
    Variant("adaptive-3", "adaptive 3 bit", 3, adaptive=True),
    Variant("adaptive-2", "adaptive 2 bit", 2, adaptive=True),
)
COMPRESSED = VARIANTS[1:]

_SCORE: tuple[Column, ...] = (("score, %", "{score}"), ("paper", "{paper_score:.2f|-}"))
_RATE: tuple[Column, ...] = (("rate", "{rate}"), ("paper", "{paper_rate}"))


def _beside(
    model: str, dataset: str, variant: Variant, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the score and the rate of a variant, and the paper's."""
    rates = paper_rates(model, variant.name)
    return {
        "label": variant.label,
        "score": summary.percent(summary.values(runs, "test_score")) if runs else "not yet",
        "rate": summary.factor(summary.values(runs, "rate")) if runs else "not yet",
        "paper_score": paper_score(model, dataset, variant.name),
        "paper_rate": "{}-{}x".format(*rates) if rates else "-",
    }


def compared(model: str, dataset: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return our results beside the paper's Table 2, one row per variant.

    Args:
        model: The model of all variants.
        dataset: As ``--dataset`` names it; the paper's scores appear only for its own data sets.
        results: Results by the variant's name; the cells of a missing one say "not yet".
    """
    rows = []
    for variant in VARIANTS:
        runs = results.get(variant.name, {"runs": []})["runs"]
        row = _beside(model, dataset, variant, runs)
        row["saved"] = summary.mean_bytes(summary.values(runs, "stored_bytes")) if runs else ""
        row["peak"] = summary.mean_bytes(summary.values(runs, "peak_bytes")) if runs else ""
        row["seconds"] = summary.seconds(summary.values(runs, "epoch_seconds")) if runs else ""
        rows.append(row)
    own = (("saved", "{saved}"), ("peak", "{peak}"), ("s/epoch", "{seconds}"))
    return table((("", "{label}"), *_SCORE, *_RATE, *own), rows)


def compare_notes(model: str, dataset: str) -> list[str]:
    """Return remarks on the paper's columns."""
    lines = ["Saved: bytes kept for backward. Paper's rates: the range over its four data sets."]
    if paper_score(model, dataset, "fp32") is None:
        lines.append("The paper has no scores for this data set.")
    return lines


def scores_by_seed(study: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return the test scores of each variant, by seed."""
    return {
        name: {run["seed"]: run["test_score"] for run in runs if run["test_score"] is not None}
        for name, runs in study["runs"].items()
    }


def to_fp32(study: Mapping[str, Any], variant: Variant) -> str:
    """Return the difference to fp32 with its interval, as text; empty for fp32."""
    scores = scores_by_seed(study)
    if variant not in COMPRESSED:
        return ""
    difference = summary.paired_difference(scores[variant.name], scores["fp32"])
    return summary.signed_percent(difference)


def table2(studies: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return Table 2: each model on each graph and variant, grouped by model as in the paper."""
    rows = []
    for study in sorted(studies.values(), key=lambda study: [*_RATES].index(study["model"])):
        for variant in VARIANTS:
            runs = study["runs"][variant.name]
            row = _beside(study["model"], study["graph"], variant, runs)
            seeds, difference = len(summary.values(runs, "test_score")), to_fp32(study, variant)
            row |= {"model": study["model"].upper(), "graph": study["graph"], "seeds": seeds}
            rows.append(row | {"to_fp32": difference})
    who = (("model", "{model}"), ("graph", "{graph}"), ("", "{label}"), ("seeds", "{seeds}"))
    return table((*who, *_SCORE, ("to fp32", "{to_fp32}"), *_RATE), rows)


def table3(searches: Sequence[Mapping[str, Any]]) -> Table:
    """Return Table 3: for each memory and dimension the largest size, and its ratio to stock's.

    Args:
        searches: ``model``, ``memory``, ``vary``, ``variant`` and ``largest`` of each.
    """
    cases = [(row["model"], row["vary"], row["memory"]) for row in searches]
    sizes: dict[tuple[str, ...], int] = {
        (*case, row["variant"]): row["largest"] for case, row in zip(cases, searches, strict=True)
    }
    variants = dict.fromkeys(row["variant"] for row in searches)

    def size(*case: str) -> str:
        *shared, variant = case
        largest, stock = (sizes.get((*shared, name)) for name in (variant, "stock"))
        if largest is None:
            return "not run"
        return beside_stock(largest, None if variant == "stock" else stock)

    rows = [
        (
            *(model.upper(), vary, memory),
            *(size(model, vary, memory, variant) for variant in variants),
            _growth(vary) if model == "gcn" else "",
        )
        for model, vary, memory in dict.fromkeys(cases)
    ]
    heads = (LABELS[variant] for variant in variants)
    return Table(("", "", "memory", *heads, "paper, 16 GB: L0, L1, L2"), rows)


def _growth(vary: str) -> str:
    stock, *others = _GROWTH[vary]
    return ", ".join([f"{stock:,}", *(f"{size:,} ({size / stock:.1f}x)" for size in others)])

"""The paper's Table 2 in its layout: each model on each graph, in fp32 and with fewer bits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from experiments.helpers import summary
from experiments.helpers.compare import VARIANTS
from experiments.helpers.interval import paired_difference, signed_percent
from experiments.helpers.paper import paper_rates, paper_score
from experiments.helpers.recipes import MODELS
from experiments.helpers.values import FP32_BITS

HEAD = ("model", "graph", "", "seeds", "score, %", "paper", "to fp32", "rate", "paper")

KEPT = (
    *("seed", "test_score", "val_score", "best_epoch", "rate", "raw_bytes", "stored_bytes"),
    *("average_bits", "epoch_seconds", "train_seconds", "measuring_seconds", "passes"),
)
"""The kept entries of each run."""

VARIED = ("bits", "level", "adaptive", "blocks")
"""The entries of a configuration that differ between variants."""


def rows(studies: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`HEAD`, grouped by model as in the paper."""
    ordered = sorted(studies.values(), key=lambda study: MODELS.index(study["model"]))
    return [row for study in ordered for row in _rows(study)]


def scores_by_seed(study: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return the test scores of each variant, by seed."""
    return {
        name: {run["seed"]: run["test_score"] for run in runs if run["test_score"] is not None}
        for name, runs in study["runs"].items()
    }


def _rows(study: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    model, graph = study["model"], study["graph"]
    scores = scores_by_seed(study)
    for variant in VARIANTS:
        mine = scores[variant.name]
        compressed = variant.bits != FP32_BITS
        published = paper_score(model, graph, variant.name)
        rates = paper_rates(model, variant.name)
        found.append(
            (
                model.upper(),
                graph,
                variant.label,
                str(len(mine)),
                summary.percent([*mine.values()]),
                "" if published is None else f"{published:.2f}",
                signed_percent(paired_difference(mine, scores["fp32"])) if compressed else "",
                f"{statistics.fmean(r['rate'] for r in study['runs'][variant.name]):.1f}x"
                if compressed
                else "",
                "" if rates is None else f"{rates[0]:.1f}-{rates[1]:.1f}x",
            )
        )
    return found

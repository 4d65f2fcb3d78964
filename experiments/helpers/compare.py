"""``--compare``: fp32 beside compressed training, and the paper's Table 2 row beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from experiments.helpers import summary
from experiments.helpers.paper import paper_rates, paper_score
from experiments.helpers.results import Results
from experiments.helpers.train import Setup
from experiments.helpers.values import FP32_BITS


@dataclass(frozen=True)
class Variant:
    """One line of the comparison; ``name`` is also its folder under ``--out``."""

    name: str
    label: str
    bits: int
    adaptive: bool = False

    def of(self, setup: Setup) -> Setup:
        """Return a setup with these bits: stock's in fp32, else at the setup's own level."""
        exact = self.bits == FP32_BITS
        level, blocks = ("L0", False) if exact else (setup.level, setup.blocks)
        adaptive = self.adaptive
        return replace(setup, bits=self.bits, level=level, blocks=blocks, adaptive=adaptive)


VARIANTS = (
    Variant("fp32", "fp32", 32),
    Variant("fixed-4", "fixed 4 bit", 4),
    Variant("adaptive-4", "adaptive 4 bit", 4, adaptive=True),
    Variant("adaptive-3", "adaptive 3 bit", 3, adaptive=True),
    Variant("adaptive-2", "adaptive 2 bit", 2, adaptive=True),
)

HEAD = ("", "score, %", "paper", "rate", "paper", "saved", "peak", "s/epoch")


def compare_rows(
    model: str, dataset: str, compared: Mapping[str, Results]
) -> list[tuple[str, ...]]:
    """Return the comparison, one row a variant, under :data:`HEAD`.

    Args:
        model: The model of all variants.
        dataset: As ``--dataset`` names it; the paper's scores appear only for its own data sets.
        compared: Results by the variant's name; those not there say "not yet".
    """
    rows: list[tuple[str, ...]] = []
    for variant in VARIANTS:
        score = paper_score(model, dataset, variant.name)
        rates = paper_rates(model, variant.name)
        paper = (
            "-" if score is None else f"{score:.2f}",
            "-" if rates is None else f"{rates[0]:.1f}-{rates[1]:.1f}x",
        )
        if variant.name not in compared:
            rows.append((variant.label, "not yet", paper[0], "not yet", paper[1], "", "", ""))
            continue
        results = compared[variant.name]
        rows.append(
            (
                variant.label,
                summary.percent(summary.values(results, "test_score")),
                paper[0],
                summary.factor(summary.values(results, "rate")),
                paper[1],
                summary.mean_bytes(summary.values(results, "stored_bytes")),
                summary.mean_bytes(summary.values(results, "peak_bytes")),
                summary.seconds(summary.values(results, "epoch_seconds")),
            )
        )
    return rows


def compare_notes(model: str, dataset: str) -> list[str]:
    """Return remarks on the paper's columns."""
    lines = ["Saved: bytes kept for backward. Paper's rates: the range over its four data sets."]
    if paper_score(model, dataset, "fp32") is None:
        lines.append("The paper has no scores for this data set.")
    return lines

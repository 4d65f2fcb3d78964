"""Tables 2 and 3 of the GACT paper (Liu et al., ICML 2022), as far as their numbers are at hand.

Accuracies (Yelp: micro-F1) are in per cent, means of 10 seeds. Compression rates are given as
the range over the paper's four data sets.
"""

from __future__ import annotations

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
_SCORE_VARIANTS = ("fp32", "adaptive-4", "adaptive-2")

_RATES = {
    # model: adaptive 4, 3, 2 bit, each lowest and highest
    "gcn": ((6.4, 8.1), (7.5, 11.3), (9.0, 17.6)),
    "gat": ((4.2, 5.1), (4.5, 6.1), (5.2, 7.0)),
    "gcnii": ((4.5, 6.7), (5.2, 8.0), (5.9, 10.2)),
}
_RATE_VARIANTS = ("adaptive-4", "adaptive-3", "adaptive-2")


def paper_score(model: str, dataset: str, variant: str) -> float | None:
    """Return the paper's score in per cent; ``None`` where it has none, or it is not at hand.

    ``dataset`` must be the data set itself: a file with its graph, or a made-up graph of its
    size, gives scores that do not compare.
    """
    scores = _SCORES.get((model, dataset))
    if scores is None or variant not in _SCORE_VARIANTS:
        return None
    return scores[_SCORE_VARIANTS.index(variant)]


def paper_rates(model: str, variant: str) -> tuple[float, float] | None:
    """Return the paper's lowest and highest compression rate over its data sets, or ``None``."""
    if variant not in _RATE_VARIANTS:
        return None
    return _RATES[model][_RATE_VARIANTS.index(variant)]


_GROWTH = {"depth": (24, 152, 240), "width": (2464, 3948, 4244)}


def paper_growth(vary: str) -> str:
    """Table 3: the deepest or the widest GCN in 16 GB, at L0, L1 and L2.

    >>> paper_growth("depth")
    '24, 152 (6.3x), 240 (10.0x)'
    """
    stock, *others = _GROWTH[vary]
    return ", ".join([f"{stock:,}", *(f"{size:,} ({size / stock:.1f}x)" for size in others)])

"""The library's levels, and names of levels, strategies and layers in tables."""

from __future__ import annotations

EXACT_LEVELS = ("L0", "lossless")
"""Levels that quantize nothing."""

LEVELS = (*EXACT_LEVELS, "L1", "L2", "CB1", "CB2")

LABELS = {
    "stock": "stock PyG",
    "checkpoint": "torch's checkpoint, each conv",
    "lossless": "`lossless`",
    "L1": "`L1`",
    "lossless+blocks": "`lossless`, blocks",
    "L1+blocks": "`L1`, blocks",
    "CB1": "`CB1`",
    "CB2": "`CB2`",
}
"""Of strategies, in tables whose bits stand in their caption."""

LAYERS = {
    "gat": "GAT",
    "gcn-edge_index": "GCN",
    "gcnii": "GCNII",
    "gatv2": "GATv2",
    "transformer": "TransformerConv",
}


def label(level: str, bits: int) -> str:
    """Return the name of a level with its bits.

    >>> label("lossless", 4), label("L1", 4)
    ('lossless', 'L1 4 bit')
    """
    return level if level in EXACT_LEVELS else f"{level} {bits} bit"

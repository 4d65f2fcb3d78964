"""What ways to train and layers are called in tables."""

from __future__ import annotations

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

LAYERS = {
    "gat": "GAT",
    "gcn-edge_index": "GCN",
    "gcnii": "GCNII",
    "gatv2": "GATv2",
    "transformer": "TransformerConv",
}

"""A net of two layers, options to wrap it, and the state that a step must not change."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

WAYS: dict[str, dict[str, Any]] = {
    "lossless": {"level": "lossless"},
    "lossless in blocks": {"level": "lossless", "blocks": 16},
    "L1": {"level": "L1", "bits": 32, "blocks": False},
    "CB2, no blocks": {"level": "CB2", "bits": 32, "blocks": False},
    "CB2": {"level": "CB2", "bits": 32, "blocks": 16},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gcn, self.gat = pyg.GCNConv(8, 8), pyg.GATConv(8, 4, heads=2)
        self.norm = pyg.BatchNorm(8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.gat(torch.dropout(self.norm(self.gcn(x, edges)).relu(), 0.3, True), edges)


def parts_of(model: nn.Module) -> dict[str, Any]:
    """The state that a broken step must not change: attributes by name, parameters by identity."""
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        parts[f"{name} attributes"] = sorted(vars(module))
        parts[f"{name} methods"] = {
            key: id(value) for key, value in vars(module).items() if callable(value)
        }
        for kind in ("_parameters", "_buffers"):
            parts[f"{name} {kind}"] = {k: id(v) for k, v in getattr(module, kind).items()}
    return parts

"""The models that measurements train, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import PNA, GATConv, GATv2Conv, GraphSAGE, TransformerConv, models

from experiments.helpers.data import Layout, NodeTask
from experiments.helpers.recipes import Recipe, recipe_for
from experiments.helpers.train import seed_everything
from experiments.models.nets import attention, build


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        layout: The layout of its graph.
        make: Makes it from the numbers of features and of classes; ``hidden`` and ``layers``
            replace its own, and in :data:`BASIC` ``norm``, ``act`` and ``dropout``.
        lr: Adam's learning rate.
    """

    layout: Layout
    make: Callable[..., nn.Module]
    lr: float = 0.01


def _attention(conv: Callable[..., nn.Module]) -> Subject:
    def make(i: int, o: int, hidden: int = 64, layers: int = 3) -> nn.Module:
        return attention(Recipe(layers, hidden, 0.5, 0.01, 1, heads=3), i, o, conv)

    return Subject("edge_index", make)


def _of(model: str, recipe: Recipe, layout: Layout) -> Subject:
    def make(i: int, o: int, **sizes: Any) -> nn.Module:
        changed = dataclasses.replace(recipe, **sizes)
        return build(model, changed, i, o, normalize=layout == "edge_index")

    return Subject(layout, make, recipe.lr)


def _sage(i: int, o: int, hidden: int = 256, layers: int = 3) -> nn.Module:
    return GraphSAGE(i, hidden, layers, o, dropout=0.5, norm="batch_norm")


def _pna(i: int, o: int, hidden: int = 64, layers: int = 3) -> nn.Module:
    """Return PNA with the aggregators and scalers of its paper (Corso et al., NeurIPS 2020)."""
    degrees = torch.zeros(_DEGREE + 1, dtype=torch.long)
    degrees[_DEGREE] = 1
    return PNA(
        *(i, hidden, layers, o),
        dropout=0.5,
        norm="batch_norm",
        aggregators=["mean", "max", "min", "std"],
        scalers=["identity", "amplification", "attenuation"],
        deg=degrees,
    )


_DEGREE = 10
"""Degree of each node, for the scalers of PNA: about the mean degree of flickr_graph."""

_GCN = Recipe(3, 256, 0.5, 0.01, 1)
_GCNII = recipe_for("gcnii", "ogbn-arxiv")  # 16 layers of 256

# GCN and GCNII twice: with messages along edge_index, and as the main job runs them, on a sparse
# matrix.
SUBJECTS = {
    "gcn": _of("gcn", _GCN, "csr"),
    "gcn-edge_index": _of("gcn", _GCN, "edge_index"),
    "gat": _attention(GATConv),
    "gatv2": _attention(GATv2Conv),
    "transformer": _attention(TransformerConv),
    "sage": Subject("edge_index", _sage),
    "pna": Subject("edge_index", _pna),
    "gcnii": _of("gcnii", _GCNII, "csr"),
    "gcnii-edge_index": _of("gcnii", _GCNII, "edge_index"),
}


def _basic(cls: Callable[..., nn.Module], **own: Any) -> Subject:
    def make(i: int, o: int, hidden: int = 64, layers: int = 3, **options: Any) -> nn.Module:
        return cls(i, hidden, layers, o, **{"dropout": 0.5, **own, **options})

    return Subject("edge_index", make)


BASIC = {
    "pyg-gcn": _basic(models.GCN),
    "pyg-sage": _basic(models.GraphSAGE),
    "pyg-sage-max": _basic(models.GraphSAGE, aggr="max"),
    "pyg-gat": _basic(models.GAT, heads=4),
    "pyg-gatv2": _basic(models.GAT, heads=4, v2=True),
}
"""PyG's own models, which take any normalization and activation."""

MODELS = SUBJECTS | BASIC

ON_EDGES = {
    **{"gcn": "gcn-edge_index", "gat": "gat", "gatv2": "gatv2", "transformer": "transformer"},
    **{"sage": "sage", "pna": "pna", "gcnii": "gcnii"},
}
"""Models by the short names of commands that compare message passing."""


LAYERS = {
    "gat": "GAT",
    "gcn-edge_index": "GCN",
    "gcnii": "GCNII",
    "gatv2": "GATv2",
    "transformer": "TransformerConv",
    "sage": "GraphSAGE",
    "pna": "PNA",
}
"""The layers of these models, as tables name them."""


def make(subject: Subject, task: NodeTask, **changes: Any) -> nn.Module:
    """Return the model for this task, with the same weights and the same dropout at every call."""
    seed_everything(0)
    return subject.make(task.x.size(1), task.num_classes, **changes).to(task.x.device)

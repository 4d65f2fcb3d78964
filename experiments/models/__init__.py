"""The three networks of the experiments, and the one function that builds them from a recipe."""

from __future__ import annotations

from torch import nn

from experiments.helpers.recipes import Recipe
from experiments.models.gat import GAT
from experiments.models.gcn import GCN
from experiments.models.gcnii import GCNII

__all__ = ["GAT", "GCN", "GCNII", "build"]


def build(
    model: str, recipe: Recipe, in_channels: int, out_channels: int, *, normalize: bool = False
) -> nn.Module:
    """Return a freshly initialised network; its weights come from torch's global generator.

    Args:
        model: ``"gcn"``, ``"gat"`` or ``"gcnii"``.
        recipe: Widths, depths and dropout rates.
        in_channels: Number of features of a node.
        out_channels: Number of classes.
        normalize: Whether a GCN or GCNII gets ``edge_index`` and normalises it itself.

    Raises:
        ValueError: If ``model`` names none of the three.
    """
    if model == "gcn":
        return GCN(
            in_channels,
            recipe.hidden,
            out_channels,
            recipe.layers,
            dropout=recipe.dropout,
            batch_norm=recipe.batch_norm,
            normalize=normalize,
        )
    if model == "gat":
        return GAT(
            in_channels,
            recipe.hidden,
            out_channels,
            recipe.layers,
            heads=recipe.heads,
            dropout=recipe.dropout,
            input_dropout=recipe.input_dropout,
            attention_dropout=recipe.attention_dropout,
            batch_norm=recipe.batch_norm,
        )
    if model == "gcnii":
        return GCNII(
            in_channels,
            recipe.hidden,
            out_channels,
            recipe.layers,
            alpha=recipe.alpha,
            theta=recipe.theta,
            dropout=recipe.dropout,
            residual=recipe.residual,
            batch_norm=recipe.batch_norm,
            normalize=normalize,
        )
    raise ValueError(f"Expected model 'gcn', 'gat' or 'gcnii' (got {model!r})")

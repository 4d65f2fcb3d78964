"""Sums of weighted rows in plain torch: the oracle of ``csrc/cpu``, and what other devices run."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_sum(
    out: Tensor, x: Tensor, places: Tensor | None, weight: Tensor, starts: Tensor
) -> None:
    rows = x if places is None else x.index_select(0, places)
    out.zero_().index_add_(0, _owners(starts, weight.size(0)), _times(rows, weight))


def weighted_sum_weights(
    gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
) -> Tensor:
    rows = x if places is None else x.index_select(0, places)
    product = gradient.index_select(0, _owners(starts, rows.size(0))).mul_(rows)
    return product.unflatten(1, (heads, -1)).sum(-1)


def weighted_sum_rows(
    total: Tensor, gradient: Tensor, places: Tensor, weight: Tensor, starts: Tensor
) -> None:
    of_arcs = gradient.index_select(0, _owners(starts, weight.size(0)))
    total.index_add_(0, places.long(), _times(of_arcs, weight))


def _owners(starts: Tensor, arcs: int) -> Tensor:
    return torch.repeat_interleave(starts.diff(), output_size=arcs)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    return (rows.unflatten(1, (weight.size(1), -1)) * weight.unsqueeze(-1)).flatten(1)

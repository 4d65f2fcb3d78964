"""Checks that every loaded graph must pass.

A wrong id raises no error by itself: it appears later as a fault inside a kernel, or as a wrong
accuracy. Each loader therefore checks its graph once, in one pass over each tensor.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from datasets.errors import DatasetError


def check_features(x: Tensor) -> None:
    """Check node features: [N, F] float32, finite, N and F at least 1."""
    if x.dim() != 2 or x.dtype != torch.float32:
        raise DatasetError(f"Expected x to be [N, F] float32 (got {_kind(x)})")
    if x.numel() == 0:
        raise DatasetError(f"Expected x to hold at least one node and one feature (got {_kind(x)})")
    # The extremes show any NaN or Inf, and need no mask as large as x.
    low, high = (float(v) for v in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DatasetError(
            f"Expected finite values in x (got NaN or Inf: min {low}, max {high}); "
            "replace them before loading"
        )


def check_edge_index(edge_index: Tensor, num_nodes: int) -> None:
    """Check edges: [2, E] int64, each entry a node id. A graph may have no edges."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise DatasetError(f"Expected edge_index to be [2, E] int64 (got {_kind(edge_index)})")
    _check_ids("edge_index", edge_index, num_nodes, "node ids")


def check_targets(y: Tensor, num_nodes: int, num_classes: int) -> None:
    """Check targets: [N] int64 class ids, or [N, C] float32 of zeros and ones."""
    if y.dim() == 1 and y.dtype == torch.int64:
        expected: tuple[int, ...] = (num_nodes,)
    elif y.dim() == 2 and y.dtype == torch.float32:
        expected = (num_nodes, num_classes)
    else:
        raise DatasetError(
            "Expected y to be [N] int64 class ids or [N, C] float32 zeros and ones "
            f"(got {_kind(y)})"
        )
    if num_classes < 1 and num_nodes == y.size(0):
        raise DatasetError(f"Expected y to have at least one class (got {_kind(y)})")
    if tuple(y.shape) != expected:
        raise DatasetError(
            f"Expected y of shape {list(expected)}, one row for each row of x (got {_kind(y)})"
        )
    if y.dim() == 1:
        _check_ids("y", y, num_classes, "class ids")
    elif not bool(((y == 0) | (y == 1)).all()):
        low, high = (float(v) for v in torch.aminmax(y))
        raise DatasetError(
            f"Expected only 0 and 1 in the [N, C] targets y (got values from {low:g} to {high:g})"
        )


def check_split(train_idx: Tensor, val_idx: Tensor, test_idx: Tensor, num_nodes: int) -> None:
    """Check a split: three int64 lists of node ids, no node twice, the first one not empty."""
    split = {"train_idx": train_idx, "val_idx": val_idx, "test_idx": test_idx}
    for key, idx in split.items():
        if idx.dim() != 1 or idx.dtype != torch.int64:
            raise DatasetError(f"Expected {key} to be a list of int64 node ids (got {_kind(idx)})")
        _check_ids(key, idx, num_nodes, "node ids")
    if train_idx.numel() == 0:
        raise DatasetError("Expected at least one node in train_idx (got none)")
    for key, idx in split.items():
        node = _first_twice(idx)
        if node is not None:
            raise DatasetError(f"Expected each node once in {key} (got node {node} twice)")
    # The epoch is chosen on one part and scored on another: a node in both inflates the score.
    for (a, left), (b, right) in combinations(split.items(), 2):
        node = _first_twice(torch.cat((left, right)))
        if node is not None:
            equal = left.numel() == right.numel() and torch.equal(left.sort()[0], right.sort()[0])
            got = f"the same {left.numel()} nodes in both" if equal else f"node {node} in both"
            raise DatasetError(f"Expected {a} and {b} to have no node in common (got {got})")


def _first_twice(ids: Tensor) -> int | None:
    ordered = ids.sort().values
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if again.numel() else None


def _check_ids(key: str, ids: Tensor, end: int, what: str) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= end:
        raise DatasetError(
            f"Expected {what} from 0 to {end - 1} in {key} (got {low if low < 0 else high})"
        )


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

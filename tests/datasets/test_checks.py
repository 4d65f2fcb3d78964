"""Checks of a loaded graph: each error names the wrong entry."""

import re

import pytest
import torch

from datasets import DatasetError
from datasets.checks import check_edge_index, check_features, check_split, check_targets

NODES, CLASSES = 3, 2


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(3), "Expected x to be [N, F] float32 (got [3] float32)"),
        (torch.ones(3, 2).double(), "Expected x to be [N, F] float32 (got [3, 2] float64)"),
        (torch.ones(0, 2), "at least one node and one feature (got [0, 2] float32)"),
        (torch.ones(3, 0), "at least one node and one feature (got [3, 0] float32)"),
        (torch.tensor([[1.0, float("nan")]]), "Expected finite values in x (got NaN or Inf"),
        (torch.tensor([[1.0, float("-inf")]]), "Expected finite values in x (got NaN or Inf"),
    ],
)
def test_features(x, words):
    with pytest.raises(DatasetError, match=re.escape(words)):
        check_features(x)


@pytest.mark.parametrize(
    ("edge_index", "words"),
    [
        (torch.zeros(3, 2).long(), "Expected edge_index to be [2, E] int64 (got [3, 2] int64)"),
        (torch.zeros(2).long(), "Expected edge_index to be [2, E] int64 (got [2] int64)"),
        (torch.zeros(2, 2).int(), "Expected edge_index to be [2, E] int64 (got [2, 2] int32)"),
        (torch.tensor([[0], [3]]), "Expected node ids from 0 to 2 in edge_index (got 3)"),
        (torch.tensor([[0], [-1]]), "Expected node ids from 0 to 2 in edge_index (got -1)"),
    ],
)
def test_edge_index(edge_index, words):
    with pytest.raises(DatasetError, match=re.escape(words)):
        check_edge_index(edge_index, NODES)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (torch.zeros(3), "Expected y to be [N] int64 class ids or [N, C] float32"),
        (torch.zeros(3, 2).long(), "Expected y to be [N] int64 class ids or [N, C] float32"),
        (torch.zeros(4).long(), "Expected y of shape [3], one row for each row of x"),
        (torch.zeros(4, 2), "Expected y of shape [3, 2]"),
        (torch.zeros(3, 5), "Expected y of shape [3, 2]"),
        (torch.tensor([0, 1, 2]), "Expected class ids from 0 to 1 in y (got 2)"),
        (torch.tensor([0, 1, -1]), "Expected class ids from 0 to 1 in y (got -1)"),
        (torch.full((3, 2), 0.5), "Expected only 0 and 1 in the [N, C] targets y"),
        (torch.full((3, 2), float("nan")), "Expected only 0 and 1 in the [N, C] targets y"),
    ],
)
def test_targets(y, words):
    with pytest.raises(DatasetError, match=re.escape(words)):
        check_targets(y, NODES, CLASSES)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("idx", "words"),
    [
        (torch.tensor([3]), "Expected node ids from 0 to 2 in {} (got 3)"),
        (torch.tensor([-1]), "Expected node ids from 0 to 2 in {} (got -1)"),
        (torch.tensor([[0]]), "Expected {} to be a list of int64 node ids (got [1, 1] int64)"),
        (torch.tensor([True]), "Expected {} to be a list of int64 node ids (got [1] bool)"),
    ],
)
def test_split_names_the_part(position, idx, words):
    parts = [torch.tensor([0]), torch.tensor([1]), torch.tensor([2])]
    parts[position] = idx
    key = ("train_idx", "val_idx", "test_idx")[position]
    with pytest.raises(DatasetError, match=re.escape(words.format(key))):
        check_split(*parts, NODES)


def test_split_needs_a_node_to_train_on():
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(DatasetError, match=r"at least one node in train_idx \(got none\)"):
        check_split(none, torch.tensor([0]), torch.tensor([1]), NODES)

"""A random split for graphs without a split of their own."""

from __future__ import annotations

import torch
from torch import Tensor


def random_split(num_nodes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    r"""Split nodes at random into 60 % for training, 20 % for validation and the rest for testing.

    The split depends on the arguments alone: the global random state is neither read nor changed.

    Args:
        num_nodes (int): Number of nodes :math:`N`.
        seed (int, optional): Another seed gives another split. (default: :obj:`0`)

    Returns:
        Three int64 tensors of ascending node ids, in which each node appears exactly once. The
        first is never empty, however small the graph.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_nodes, generator=generator)
    num_train = max(1, num_nodes * 6 // 10)
    num_val = num_nodes * 2 // 10
    train, val, test = order.tensor_split((num_train, num_train + num_val))
    # Ascending ids: gathers read memory in order, and two splits are easy to compare.
    return train.sort().values, val.sort().values, test.sort().values

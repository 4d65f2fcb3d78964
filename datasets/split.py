"""The split of graphs that come without one."""

from __future__ import annotations

import torch
from torch import Tensor


def random_split(num_nodes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    r"""Split nodes at random into 60 % to train, 20 % to validate and the rest to test.

    The split is a function of the arguments alone: the global random state is neither read nor
    moved.

    Args:
        num_nodes (int): Number of nodes :math:`N`.
        seed (int, optional): Another seed gives another split. (default: :obj:`0`)

    Returns:
        Three int64 tensors of ascending node ids that share no node and leave out none. The first
        is never empty, however small the graph.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_nodes, generator=generator)
    num_train = max(1, num_nodes * 6 // 10)
    num_val = num_nodes * 2 // 10
    train, val, test = order.tensor_split((num_train, num_train + num_val))
    # Ascending ids: gathers by them walk memory forwards, and two splits are easy to compare.
    return train.sort().values, val.sort().values, test.sort().values

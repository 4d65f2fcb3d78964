"""A random split: its parts share no node, and its seed decides."""

import pytest
import torch

from datasets.split import random_split


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 1000])
def test_parts_share_no_node_and_leave_out_none(num_nodes):
    parts = random_split(num_nodes)
    assert torch.cat(parts).sort().values.tolist() == list(range(num_nodes))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    assert parts[0].numel() >= 1


def test_proportions():
    assert [part.numel() for part in random_split(1000)] == [600, 200, 200]


def test_seed_decides_and_global_state_stays():
    before = torch.get_rng_state()
    first, again, other = random_split(100)[0], random_split(100)[0], random_split(100, seed=1)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)

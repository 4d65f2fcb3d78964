"""Sizes on a part of a graph that stands for the whole."""

from __future__ import annotations

import pytest
import torch

from gact_graph.support.part import in_proportion, part_of_graph, piece


def test_sizes_are_in_proportion_inside_the_context_alone() -> None:
    assert in_proportion(1000) == 1000
    with part_of_graph(0.25):
        assert in_proportion(1000) == 250 and in_proportion(1) == 1
        with part_of_graph(0.5):
            assert in_proportion(1000) == 500
        assert in_proportion(1000) == 250
    with pytest.raises(KeyError), part_of_graph(0.1):
        raise KeyError
    assert in_proportion(1000) == 1000


def test_a_piece_of_a_gpu_is_larger() -> None:
    assert [piece(1000, torch.device(kind)) for kind in ("cpu", "cuda")] == [1000, 16_000]
    with part_of_graph(0.1):
        assert [piece(1000, torch.device(kind)) for kind in ("cpu", "cuda")] == [100, 1600]

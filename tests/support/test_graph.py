"""The nodes of autograd's graph."""

from __future__ import annotations

import torch

from gact_graph.support.graph import nodes_of


def test_each_node_comes_once_from_the_results_to_the_leaves() -> None:
    x = torch.ones(4, requires_grad=True)
    hidden = x.exp()
    first, second, *_ = hidden.unbind()
    nodes = [*nodes_of([first, second, first.detach(), hidden, second])]
    assert len(nodes) == len({*nodes}) == 3
    names = [node.name() for node in nodes_of([first, second])]
    assert names == ["UnbindBackward0", "ExpBackward0", "torch::autograd::AccumulateGrad"]

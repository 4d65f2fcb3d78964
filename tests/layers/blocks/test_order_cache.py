"""Orders of edges that are found again: by tensor, by content, and not after a change."""

from __future__ import annotations

import weakref

import pytest
import torch
from samples import graph
from waits import Waits

from gact_graph.layers.blocks.order import Orders
from gact_graph.support.content import checksum

_, EDGES = graph()


def test_one_for_the_same_tensor_and_for_an_equal_one():
    orders = Orders()
    first = orders.get(EDGES, 1, 300)
    assert orders.get(EDGES, 1, 300) is first
    assert orders.get(EDGES.clone(), 1, 300) is first
    assert orders.get(EDGES, 0, 300) is not first
    assert orders.seconds > 0


@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_others_are_told_apart_to_the_last_edge(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gact_graph.support.content._CHUNK", chunk)
    for edges in (EDGES, EDGES[:, EDGES[1].argsort(stable=True)]):
        orders = Orders()
        first = orders.get(edges, 1, 300)
        for row in (0, 1):
            other = edges.clone()
            other[row, -1] = (other[row, -1] + 1) % 300
            assert orders.get(other, 1, 300) is not first
        swapped = edges.clone()
        swapped[:, [0, -1]] = swapped[:, [-1, 0]]  # the same edges at other places
        assert orders.get(swapped, 1, 300) is not first
        assert orders.get(edges[:, 1:], 1, 300) is not first
        assert orders.get(edges, 1, 301) is not first
        assert orders.get(edges.clone(), 1, 300) is first


def test_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many edges there are: GATConv has its edges recognized in each forward."""
    monkeypatch.setattr("gact_graph.support.content._CHUNK", 100)
    orders = Orders()
    first = orders.get(EDGES, 1, 300)
    with Waits() as waits:
        assert orders.get(EDGES.clone(), 1, 300) is first
    assert waits.seen == ["_local_scalar_dense"]


def test_a_change_in_place_is_noticed():
    orders, edges = Orders(), EDGES.clone()
    first = orders.get(edges, 1, 300)
    edges[0, 0] = (edges[0, 0] + 1) % 300
    assert orders.get(edges, 1, 300) is not first


def test_a_change_that_autograd_does_not_see_is_noticed_in_the_next_forward():
    orders, edges = Orders(), EDGES.clone()
    first = orders.get(edges, 1, 300)
    edges.numpy()[0, 0] = (edges[0, 0] + 1) % 300
    orders.next_forward()
    assert orders.get(edges, 1, 300) is not first


def test_what_is_not_taken_is_dropped():
    orders = Orders()
    kept, dropped = weakref.ref(orders.get(EDGES, 1, 300)), None
    for _ in range(5):
        orders.next_forward()
        orders.get(EDGES, 1, 300)
        dropped = weakref.ref(orders.get(torch.randint(300, (2, 50)), 1, 300))
    size = orders.nbytes
    for _ in range(4):
        orders.next_forward()
        orders.get(EDGES, 1, 300)
    assert kept() is not None and dropped() is None
    assert orders.nbytes < size


def test_an_edge_index_is_read_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "gact_graph.layers.blocks.order.checksum", lambda edges: calls.append(1) or checksum(edges)
    )
    orders = Orders()
    for forward in range(1, 4):
        orders.next_forward()
        first = orders.get(EDGES, 1, 300)
        assert all(orders.get(EDGES, 1, 300) is first for _ in range(3))
        assert len(calls) == forward

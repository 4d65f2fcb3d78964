"""What the CPU allocator hands out, watched."""

import pytest
import torch
from torch.autograd import profiler

from gact_graph.ops import cpu
from gact_graph.ops.allocations import watching_allocations

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="no C++ compiler")

KB = 1 << 10


def zeros(kilobytes):
    return torch.zeros(kilobytes * KB, dtype=torch.uint8)


def test_the_most_at_once_counts_and_not_the_sum():
    with watching_allocations() as actual:
        kept = zeros(300)
        for _ in range(5):
            zeros(1000)
        assert actual.most_bytes == 1300 * KB
    assert kept.numel() == 300 * KB


def test_a_restart_begins_at_what_is_held_then():
    with watching_allocations() as actual:
        first = zeros(500)
        zeros(2000)
        actual.restart()
        assert actual.most_bytes == 0
        del first
        zeros(600)
        assert actual.most_bytes == 100 * KB


def test_backward_counts_too():
    x = torch.ones(1000, 256, requires_grad=True)
    with watching_allocations() as actual:
        loss = x.exp().sum()
        actual.restart()
        loss.backward()
        assert 1000 * KB <= actual.most_bytes < 3000 * KB  # the gradient, and one on its way
    assert x.grad is not None


def test_another_watch_inside_is_refused_as_a_profiler_is():
    with watching_allocations() as actual, watching_allocations() as inner:
        assert actual is not None and inner is None
        zeros(100)
        assert actual.most_bytes == 100 * KB
    with profiler.profile(), watching_allocations() as actual:
        assert actual is None


def test_where_kernels_cannot_be_built_nothing_is_told(monkeypatch):
    monkeypatch.setattr(cpu, "load", lambda: None)
    with watching_allocations() as actual:
        assert actual is None


def test_without_a_watch_there_is_nothing_to_ask():
    with watching_allocations() as actual:
        pass
    with pytest.raises(RuntimeError, match="Expected a watch of allocations in this thread"):
        actual.restart()

"""The peak of the CPU allocator during a watch."""

import pytest
import torch
from torch.autograd import profiler

from gact_graph.ops import allocator
from gact_graph.ops.allocations import watching_allocations

pytestmark = pytest.mark.skipif(allocator.load() is None, reason="nothing watches allocations")

KB = 1 << 10


def zeros(kilobytes):
    return torch.zeros(kilobytes * KB, dtype=torch.uint8)


def test_the_peak_counts_and_not_the_sum():
    with watching_allocations() as watch:
        kept = zeros(300)
        for _ in range(5):
            zeros(1000)
        assert watch.peak() == 1300 * KB
    assert kept.numel() == 300 * KB


def test_backward_counts_too():
    x = torch.ones(1000, 256, requires_grad=True)
    loss = x.exp().sum()
    with watching_allocations() as watch:
        loss.backward()
        assert 1000 * KB <= watch.peak() < 3000 * KB  # the gradient, and one on its way
    assert x.grad is not None


def test_there_is_no_watch_inside_another_or_inside_a_profiler():
    with watching_allocations() as watch, watching_allocations() as inner:
        assert watch is not None and inner is None
        zeros(100)
        assert watch.peak() == 100 * KB
    with profiler.profile(), watching_allocations() as watch:
        assert watch is None


def test_after_its_end_a_watch_raises():
    with watching_allocations() as watch:
        pass
    with pytest.raises(RuntimeError, match="Expected a watch of allocations in this thread"):
        watch.peak()

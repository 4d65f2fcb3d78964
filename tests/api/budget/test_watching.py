"""The bytes of a step and of its parts, on each kind of device."""

from __future__ import annotations

import pytest
import torch

from gact_graph.api.budget import steps
from gact_graph.api.budget.steps import watching
from gact_graph.ops import allocator


class Allocator:
    """Stands in for that of a CUDA device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.most = 1000
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.used)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device: torch.device) -> None:
        self.most = self.used

    def change(self, count: int) -> None:
        self.used += count
        self.most = max(self.most, self.used)


def test_parts_on_cuda_have_peaks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    with watching(torch.device("cuda")) as watch:
        for count in (300, -200, 50):
            allocator.change(count)
        assert watch.mark() == 300
        allocator.change(60)
        assert watch.mark() == 210 and watch.peak() == 300
        allocator.change(400)
        assert watch.peak() == 610


@pytest.mark.skipif(allocator.load() is None, reason="nothing watches allocations")
def test_parts_on_a_cpu_have_peaks_of_their_own() -> None:
    with watching(torch.device("cpu")) as watch:
        kept = torch.zeros(1 << 20, dtype=torch.uint8)
        torch.zeros(3 << 20, dtype=torch.uint8)
        assert watch.mark() == 4 << 20
        assert watch.mark() == 1 << 20 and watch.peak() == 4 << 20
    assert kept.numel()


def test_the_resident_set_counts_in_full_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        peak_bytes = 7

        def __init__(self, device: torch.device) -> None: ...

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(allocator, "load", lambda: None)
    monkeypatch.setattr(steps, "PeakMeter", Meter)
    with watching(torch.device("cpu")) as watch:
        assert watch.mark() == watch.peak() == 7

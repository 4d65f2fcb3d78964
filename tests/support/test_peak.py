from __future__ import annotations

import sys

import pytest
import torch

from gact_graph.support.peak import PeakMeter

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MEGA = 1_000_000


@needs_proc
@pytest.mark.parametrize("resettable", [True, False])
def test_sees_what_was_freed_again(
    resettable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """By the kernel's high-water mark, and by a thread where that cannot be reset."""
    if not resettable:
        monkeypatch.setattr(
            "gact_graph.support.peak._CLEAR_REFS", tmp_path / "absent" / "clear_refs"
        )
    with PeakMeter(torch.device("cpu")) as meter:
        for _ in range(10):
            torch.ones(25_000_000).sum()  # 100 MB, dropped at once
    assert 90 * MEGA < meter.peak_bytes < 200 * MEGA


@needs_proc
def test_counts_from_the_start_of_the_block() -> None:
    before = torch.ones(50_000_000)
    with PeakMeter(torch.device("cpu")) as meter:
        before[:10].sum()
    assert meter.peak_bytes < 50 * MEGA


@needs_proc
def test_second_block_is_not_spoilt_by_the_first() -> None:
    """Small tensors come from a heap that keeps its pages: they must not hide in the start."""

    def peak() -> int:
        with PeakMeter(torch.device("cpu")) as meter:
            held = [torch.ones(5_000) for _ in range(5_000)]  # 100 MB in pieces of 20 kB
            del held
        return meter.peak_bytes

    first, second = peak(), peak()
    assert second > 0.8 * first > 70 * MEGA


def test_unknown_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr("gact_graph.support.peak._STATM", tmp_path / "statm")
    with PeakMeter(torch.device("cpu")) as meter:
        pass
    assert meter.peak_bytes is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_cuda_asks_the_allocator() -> None:
    with PeakMeter(torch.device("cuda")) as meter:
        torch.ones(25_000_000, device="cuda").sum()
    assert meter.peak_bytes >= 100 * MEGA

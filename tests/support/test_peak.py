"""The peak of memory within a block of code."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from fresh import run

from gact_graph.support import peak
from gact_graph.support.peak import PeakMeter

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MEGA = 1_000_000
SETUP = """
import torch
from gact_graph.support import peak
meter = peak.PeakMeter(torch.device("cpu"))
"""


def measured(code: str) -> list[int]:
    """The numbers that ``code`` prints in a process of its own.

    Tests that ran before leave free memory behind, which the resident set counts already.
    """
    return [int(word) for word in run(SETUP + textwrap.dedent(code)).split()]


@needs_proc
@pytest.mark.parametrize("resettable", [True, False])
def test_sees_what_was_freed_again(resettable: bool, tmp_path: Path) -> None:
    """By the kernel's high-water mark, and by a thread where that cannot be reset."""
    absent = "" if resettable else f"peak._CLEAR_REFS = peak.Path({str(tmp_path / 'absent')!r})"
    [most] = measured(f"""
        {absent}
        with meter:
            for _ in range(10):
                torch.ones(25_000_000).sum()  # 100 MB, dropped at once
        print(meter.peak_bytes)
        """)
    assert 90 * MEGA < most < 200 * MEGA


@needs_proc
def test_counts_from_the_start_of_the_block() -> None:
    [most] = measured("""
        before = torch.ones(50_000_000)
        with meter:
            before[:10].sum()
        print(meter.peak_bytes)
        """)
    assert most < 50 * MEGA


@needs_proc
def test_second_block_is_not_spoilt_by_the_first() -> None:
    """Small tensors come from a heap that keeps its pages: they must not hide in the start."""
    first, second = measured("""
        for _ in range(2):
            with meter:
                held = [torch.ones(5_000) for _ in range(5_000)]  # 100 MB in pieces of 20 kB
                del held
            print(meter.peak_bytes)
        """)
    assert second > 0.8 * first > 70 * MEGA


def test_unknown_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gact_graph.support.peak._STATM", tmp_path / "statm")
    with PeakMeter(torch.device("cpu")) as meter:
        pass
    assert meter.peak_bytes is None


@pytest.mark.gpu
def test_cuda_asks_the_allocator() -> None:
    with PeakMeter(torch.device("cuda")) as meter:
        torch.ones(25_000_000, device="cuda").sum()
    assert meter.peak_bytes >= 100 * MEGA


_STEPS = """
import torch
from gact_graph.support.peak import StepPeak, resident_bytes

MB = 10**6
meter = StepPeak(torch.device("cpu"))
found = []

def step(size):
    x = torch.ones(1000, requires_grad=True)
    meter.begin(1)
    saved = torch.ones(size // 4)  # lives until backward ends
    out = x * 2
    meter.end_after([saved, out])
    out.sum().backward()
    del saved
    found.append(meter.nbytes / MB)

step(400 * MB)
step(100 * MB)                     # a smaller step is not known to take more
outside = torch.ones(150 * MB)     # nor does memory between two steps count
del outside
step(100 * MB)
step(1000 * MB)
print(*found)
"""


@needs_proc
def test_the_peak_of_steps_counts_and_no_other() -> None:
    process = run(_STEPS)
    first, second, third, last = map(float, process.split())
    assert 400 <= first < 460 and second == third == first
    assert 1000 <= last < 1100


_BESIDE = """
import torch
from gact_graph.support.peak import StepPeak

MB = 10**6
meter, x = StepPeak(torch.device("cpu")), torch.ones(1000, requires_grad=True)
beside = torch.ones(200 * MB)  # memory of the training loop: 800 MB
meter.begin(1)
saved = torch.ones(100 * MB)
out = x * 2
meter.end_after([out])
out.sum().backward()
print(meter.nbytes / MB)
"""


@needs_proc
def test_memory_of_the_training_loop_does_not_count() -> None:
    assert 400 <= float(run(_BESIDE)) < 460


def test_a_system_without_a_high_water_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t1 kB\n")  # as in gVisor
    monkeypatch.setattr(peak, "_STATUS", status)
    assert peak.peak_so_far(torch.device("cpu")) is None

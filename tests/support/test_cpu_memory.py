"""Freed tensors go back to the system, also where the heap has gaps of earlier ones."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from gact_graph.support import cpu_memory

_SCRIPT = """
import json, torch
from gact_graph.support.cpu_memory import return_tensors
from gact_graph.support.peak import _resident_bytes

large = torch.empty(24 << 20, dtype=torch.uint8)
del large  # from now on glibc keeps what is freed
tensors, between = [], []
for _ in range(40):
    tensors.append(torch.ones(1 << 20, dtype=torch.uint8))
    between.append(torch.ones(2048, dtype=torch.uint8))  # keeps the gaps from being joined
del tensors
return_tensors({least})
before = _resident_bytes()
tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(30)]
full = _resident_bytes()
del tensors
print(json.dumps([before, full, _resident_bytes()]))
"""


def resident(least: int) -> list[int]:
    """The resident set before 30 tensors of 1 MiB, with them, and when they are freed."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(least=least)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
class TestReturnTensors:
    def test_freed_tensors_do_not_stay_in_gaps_of_earlier_ones(self) -> None:
        before, full, after = resident(1 << 16)
        assert full - before > 25 << 20
        assert after - before < 2 << 20

    def test_smaller_ones_stay(self) -> None:
        """The gaps are there: otherwise the test above tells nothing."""
        before, full, after = resident(4 << 20)
        assert full - before > 25 << 20
        assert after - before > 25 << 20


def test_does_nothing_where_the_c_library_has_none_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "_of_libc", lambda name: None)
    cpu_memory._info.cache_clear()
    try:
        cpu_memory.return_tensors(1 << 16)
    finally:
        cpu_memory._info.cache_clear()

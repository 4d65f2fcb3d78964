"""Freed memory goes back to the system, also where the heap has gaps of earlier tensors."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from fresh import run

from gact_graph.support.memory import heap, policy
from gact_graph.support.memory.policy import MemoryPolicy

_SCRIPT = """
import json, torch
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import resident_bytes

large = torch.empty(24 << 20, dtype=torch.uint8)
del large  # from now on glibc keeps what is freed
tensors, between = [], []
for _ in range(40):
    tensors.append(torch.ones(1 << 20, dtype=torch.uint8))
    between.append(torch.ones(2048, dtype=torch.uint8))  # keeps the gaps from being joined
del tensors
memory_policy.limit({budget}, memory_policy)
before = resident_bytes()
tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(30)]
full = resident_bytes()
del tensors
print(json.dumps([before, full, resident_bytes()]))
"""


def resident(budget: int) -> list[int]:
    """The resident set before 30 tensors of 1 MiB, with them, and when they are freed."""
    found: list[int] = json.loads(run(_SCRIPT.format(budget=budget)))
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
class TestLimit:
    def test_freed_tensors_do_not_stay_in_gaps_of_earlier_ones(self) -> None:
        before, full, after = resident(64 << 20)
        assert full - before > 25 << 20
        assert after - before < 2 << 20

    def test_smaller_ones_stay(self) -> None:
        """The gaps are there: otherwise the test above tells nothing."""
        before, full, after = resident(4 << 30)
        assert full - before > 25 << 20
        assert after - before > 25 << 20


def test_a_limit_holds_after_others_and_until_its_owner_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[int] = []
    monkeypatch.setattr(heap, "return_from", applied.append)
    monkeypatch.setattr(heap, "close_gaps", lambda least: None)
    memory, owner, other = MemoryPolicy(), MemoryPolicy(), MemoryPolicy()
    memory.limit(1 << 30, owner)
    memory.limit(2 << 30, other)
    with memory.limited():
        assert applied.pop() < 1 << 20
    assert applied.pop() == 1 << 20
    del owner
    assert applied.pop() == 2 << 20
    del other
    assert applied.pop() == heap.LARGEST_LIMIT


def test_the_heap_is_trimmed_where_much_of_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    trims, free = [], 0
    monkeypatch.setattr(heap, "trim", lambda: trims.append(free))
    monkeypatch.setattr(heap, "free_bytes", lambda: free)
    memory, piece = MemoryPolicy(), torch.empty(9 << 20, dtype=torch.uint8)
    for free, tensor in (  # noqa: B007
        (policy._TRIM_FROM, piece),
        (policy._TRIM_FROM + 1, piece),
        (policy._TRIM_FROM + 2, piece.to("meta")),
    ):
        for _ in range(16):
            memory.coded(tensor)
    assert trims == [policy._TRIM_FROM + 1] * 2


def test_memory_of_other_devices_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(heap, "trim", lambda: trims.append(None))
    MemoryPolicy().release(torch.device("meta"))
    assert not trims
    MemoryPolicy().release(torch.device("cpu"))
    assert trims


def test_does_nothing_where_the_c_library_has_none_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_function", lambda name: None)
    MemoryPolicy().limit(1 << 26, heap)
    assert not heap.free_bytes()


def test_gaps_of_another_allocator_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts of free bytes never fall: the process would take all addresses."""
    monkeypatch.setattr(heap, "allocator", lambda: "jemalloc")
    monkeypatch.setattr(heap, "_function", lambda name: pytest.fail(name))
    monkeypatch.setattr(heap, "trim", lambda: None)
    heap.close_gaps(1 << 20)


def test_a_limit_that_the_user_has_set_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    monkeypatch.setattr(heap, "return_from", applied.append)
    monkeypatch.setattr(heap, "close_gaps", lambda least: None)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    with MemoryPolicy().limited():
        pass
    assert applied.pop() == 4194304

"""Memory of large tensors that is kept for those that follow: whose it is, and how much."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gact_graph
from gact_graph.ops import cpu, kept_memory

LEAST = 1 << 16
PAGE = 4096


@pytest.fixture
def library() -> Iterator[Any]:
    found = cpu.load()
    if found is None:
        pytest.skip("no compiler")
    found.end_keeping()
    if not found.start_keeping():
        pytest.skip("no mremap on this system, or an allocator that cannot be asked")
    yield found
    found.end_keeping()


def tensor(bytes_: int) -> torch.Tensor:
    return torch.empty(bytes_, dtype=torch.uint8)


def test_the_next_tensor_takes_what_a_freed_one_has_left(library: Any) -> None:
    first = tensor(8 * LEAST)
    place = first.data_ptr()
    del first
    assert library.kept_bytes() == 8 * LEAST
    second = tensor(8 * LEAST)
    assert second.data_ptr() == place and library.kept_bytes() == 0


def test_a_smaller_one_takes_a_part_and_the_rest_stays(library: Any) -> None:
    first = tensor(8 * LEAST)
    place = first.data_ptr()
    del first
    second, third = tensor(3 * LEAST), tensor(5 * LEAST)
    assert second.data_ptr() == place + 5 * LEAST and third.data_ptr() == place
    assert library.kept_bytes() == 0
    del third, second
    assert tensor(8 * LEAST).data_ptr() == place  # the parts are one again


def test_a_larger_one_extends_what_is_kept(library: Any) -> None:
    first = tensor(2 * LEAST).fill_(7)
    del first
    second = tensor(9 * LEAST)
    assert library.kept_bytes() == 0
    assert int(second[: 2 * LEAST].min()) == 7  # its pages moved along


def test_one_tensor_takes_the_pages_of_several(library: Any) -> None:
    tensors = [tensor(2 * LEAST).fill_(7) for _ in range(9)]
    last = tensors.pop()
    del tensors[1::2]
    joined = tensor(8 * LEAST)
    assert library.kept_bytes() == 0
    assert int(joined.min()) == 7  # no page of it is new
    assert int(last.fill_(3).min()) == 3 and all(int(one.min()) == 7 for one in tensors)
    assert int(joined.min()) == 7
    del joined, tensors
    assert int(tensor(16 * LEAST).min()) == 7


def test_parts_are_joined_again_and_again(library: Any) -> None:
    large = 100 * LEAST
    for number in range(20):
        held = [tensor(size * LEAST).fill_(number) for size in (40, 3, 70, 9, 64, 11)]
        del held[number % 3 :: 2]
        joined = tensor(large + number * PAGE).fill_(100)
        assert all(int(one.min()) == int(one.max()) == number for one in held)
        assert int(joined.min()) == 100
        del joined, held


def test_memory_is_joined_after_very_many_small_tensors_too(library: Any) -> None:
    many = [tensor(LEAST) for _ in range(20_000)]  # never written to
    held = tensor(4 * LEAST).fill_(5)
    library.end_keeping()
    del many  # returned one by one
    library.start_keeping()
    test_one_tensor_takes_the_pages_of_several(library)
    assert int(held.min()) == int(held.max()) == 5


def test_large_tensors_begin_where_a_huge_page_does(library: Any) -> None:
    held = []
    for size in (5 << 20, 9 << 20, 6 << 20):
        held.append(tensor(size))
        assert held[-1].data_ptr() % (2 << 20) == 0
    small, _ = tensor(3 * LEAST), held.pop(1)
    assert tensor(8 << 20).data_ptr() % (2 << 20) == 0
    del small


@pytest.mark.skipif(sys.platform != "linux", reason="no count of page faults")
def test_steps_of_other_sizes_fetch_no_pages(library: Any) -> None:
    import resource

    def step(number: int) -> int:
        library.start_keeping()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        live: list[torch.Tensor] = []
        for size in (30, 100, 17, 64, 250, 5):
            live.append(tensor(size * LEAST + 7 * number * PAGE).fill_(1))
            live.append(tensor(16 * LEAST).fill_(2))
            del live[: len(live) - 4]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for number in range(5, 0, -1):
        step(number)
    fetched = [step(number % 5) for number in range(20)]
    # A step writes to more than 10,000 pages.
    assert sorted(fetched)[10] < 200


def test_small_tensors_are_left_to_torch(library: Any) -> None:
    small = tensor(LEAST - 1)
    del small
    assert library.kept_bytes() == 0


def test_what_is_kept_and_in_use_is_no_more_than_was_in_use(library: Any) -> None:
    tensors = [tensor(4 * LEAST) for _ in range(4)]
    tensors = tensors[:1]
    assert library.kept_bytes() == 12 * LEAST
    tensors.append(tensor(14 * LEAST))  # 18 in use, more than ever
    assert library.kept_bytes() == 0
    tensors.pop()
    assert library.kept_bytes() == 14 * LEAST


def test_keeps_what_two_steps_need_and_no_more(library: Any) -> None:
    large = tensor(40 * LEAST)
    del large
    library.start_keeping()
    small = tensor(2 * LEAST)
    del small
    assert library.kept_bytes() == 40 * LEAST
    library.start_keeping()
    assert library.kept_bytes() == 2 * LEAST
    library.start_keeping()
    assert library.kept_bytes() == 0


def test_nothing_is_kept_after_the_end(library: Any) -> None:
    before, freed = tensor(4 * LEAST).fill_(3), tensor(4 * LEAST)
    del freed
    library.end_keeping()
    assert library.kept_bytes() == 0
    after = tensor(4 * LEAST)
    del after
    assert library.kept_bytes() == 0
    assert int(before.min()) == 3
    del before
    assert library.kept_bytes() == 0


def test_more_than_there_is_raises_as_torch_does(library: Any) -> None:
    kept = tensor(4 * LEAST)
    del kept
    with pytest.raises(RuntimeError, match=r"not enough memory|can't allocate"):
        tensor(1 << 60)
    assert int(tensor(4 * LEAST).fill_(5).max()) == 5


def test_resized_storages_keep_their_content(library: Any) -> None:
    one = torch.arange(LEAST, dtype=torch.float32)
    one.resize_(16 * LEAST)
    assert torch.equal(one[:LEAST], torch.arange(LEAST, dtype=torch.float32))
    shared = one.numpy()
    del one
    assert shared[LEAST - 1] == LEAST - 1


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, 40 * LEAST)),
        st.tuples(st.just("new"), st.integers(60 * LEAST, 130 * LEAST)),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("step"), st.just(0)),
        st.tuples(st.just("end"), st.just(0)),
    ),
    max_size=60,
)


@given(_STEPS)
@settings(max_examples=100, deadline=None)
def test_tensors_never_share_memory_whatever_the_order(steps: list[tuple[str, int]]) -> None:
    """And what is kept stays within its bound, which is counted here a second time."""
    library = cpu.load()
    if library is None or not library.start_keeping():
        pytest.skip("no compiler, or no mremap")
    library.end_keeping()
    library.start_keeping()
    live: list[tuple[int, torch.Tensor, int]] = []
    on, most, last = True, 0, 0

    def in_use() -> int:
        return sum(size for _, _, size in live)

    for number, (what, how) in enumerate(steps):
        if what == "new":
            made = tensor(how).fill_(number % 251)
            pages = -(-how // PAGE) * PAGE if on and how >= LEAST else 0
            live.append((number % 251, made, pages))
            del made
        elif what == "free" and live:
            _, freed, _ = live.pop(how % len(live))
            del freed
        elif what == "step":
            most, last, on = in_use(), most if on else in_use(), True
            library.start_keeping()
        elif what == "end":
            on = False
            library.end_keeping()
        most = max(most, in_use())
        # What others hold here was there before, and counts on both sides.
        assert library.kept_bytes() <= (max(most, last) - in_use() if on else 0)
        for value, held, _ in live:
            assert int(held.min()) == int(held.max()) == value
    live.clear()
    library.end_keeping()


def test_threads_do_not_get_the_same_memory(library: Any) -> None:
    wrong = []

    def work(number: int) -> None:
        for i in range(200):
            own = tensor((1 + (i * 7 + number) % 9) * LEAST).fill_(number)
            if int(own.min()) != number or int(own.max()) != number:
                wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises what a thread raised
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_has_memory_of_its_own(library: Any) -> None:
    held, freed = tensor(4 * LEAST).fill_(1), tensor(4 * LEAST).fill_(2)
    del freed
    child = os.fork()
    if child == 0:
        own = tensor(4 * LEAST)
        own.numpy()[:] = 9  # no threads of torch's in a child
        os._exit(0 if held.numpy().max() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert int(tensor(4 * LEAST)[0]) == 2


_PEAK = """
import json, random
import torch
from gact_graph.ops import cpu
from gact_graph.support.peak import PeakMeter

library = cpu.load()
generator = random.Random(0)
with PeakMeter(torch.device("cpu")) as meter:
    live, most = [], 0
    for number in range(600):
        if number % 100 == 0:
            library.start_keeping()
        while live and generator.random() < 0.4 or len(live) > 12:
            live.pop(generator.randrange(len(live)))
        live.append(torch.ones(generator.randrange(1 << 16, 1 << 23), dtype=torch.uint8))
        most = max(most, sum(one.nbytes for one in live))
    print(json.dumps([meter.peak_bytes, most]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_the_process_peaks_as_if_all_were_returned_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    peak, most = json.loads(done.stdout)
    assert most <= peak <= most + (2 << 20)


_REFUSING = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void* mremap(void* from, size_t size, size_t new_size, int flags, ...) {
  static int calls = 0;
  va_list more;
  va_start(more, flags);
  void* to = va_arg(more, void*);
  va_end(more);
  if (++calls % 5 == 0) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void*)syscall(SYS_mremap, from, size, new_size, flags, to);
}
"""

_JOINS = """
import random
import torch
from gact_graph.ops import cpu

library = cpu.load()
generator = random.Random(0)
live = []
for number in range(800):
    if number % 100 == 0:
        library.start_keeping()
    while live and generator.random() < 0.4 or len(live) > 12:
        live.pop(generator.randrange(len(live)))
    size = generator.randrange(1 << 16, 1 << 22)
    live.append((number % 251, torch.full((size,), number % 251, dtype=torch.uint8)))
    assert all(int(one.min()) == int(one.max()) == value for value, one in live)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no mremap")
def test_where_the_system_moves_no_pages_memory_is_fetched(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler")
    source, shared = tmp_path / "refusing.c", tmp_path / "refusing.so"
    source.write_text(_REFUSING)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shared, source], check=True)
    environment = os.environ | {"LD_PRELOAD": str(shared)}
    subprocess.run([sys.executable, "-c", _JOINS], env=environment, check=True)


class TestWrappedModels:
    @pytest.fixture
    def model(self) -> torch.nn.Module:
        layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        return gact_graph.wrap(torch.nn.Sequential(*layers), bits=4, min_bytes=0)

    def test_a_step_keeps_memory_and_unwrap_returns_it(
        self, library: Any, model: torch.nn.Module
    ) -> None:
        library.end_keeping()
        for _ in range(2):
            model(torch.randn(4096, 64)).sum().backward()
        assert library.kept_bytes() > LEAST
        gact_graph.unwrap(model)
        assert library.kept_bytes() == 0

    def test_so_does_a_step_of_parts(self, library: Any, model: torch.nn.Module) -> None:
        library.end_keeping()
        with gact_graph.compress(model):
            out = model[0](torch.randn(4096, 64))
        out.sum().backward()
        del out
        assert library.kept_bytes() > LEAST


def test_without_kernels_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "_library", None)
    kept_memory.start_step()
    kept_memory.end()

"""Memory of freed tensors that is kept for later ones: whose it is, and how much."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gact_graph
from gact_graph import info
from gact_graph.ops import allocator
from gact_graph.support.memory.policy import SWITCH, MemoryPolicy

LEAST = 1 << 16
PAGE = 4096


@pytest.fixture
def library() -> Iterator[Any]:
    actual = allocator.load()
    if actual is None:
        pytest.skip("no library for this torch")
    actual.end_keeping()
    if not actual.start_keeping(60.0):
        pytest.skip("another system, or an allocator that cannot be asked")
    yield actual
    actual.end_keeping()


def tensor(bytes_: int) -> torch.Tensor:
    return torch.empty(bytes_, dtype=torch.uint8)


def run(script: str, *arguments: str, **environment: str) -> Any:
    """Run a script in a process of its own; return the value that its last line prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != SWITCH} | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_next_tensor_takes_the_memory_of_a_freed_one(library: Any) -> None:
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


def test_parts_are_taken_again_and_again(library: Any) -> None:
    large = 100 * LEAST
    for number in range(20):
        held = [tensor(size * LEAST).fill_(number) for size in (40, 3, 70, 9, 64, 11)]
        del held[number % 3 :: 2]
        joined = tensor(large + number * PAGE).fill_(100)
        assert all(int(x.min()) == int(x.max()) == number for x in held)
        assert int(joined.min()) == 100
        del joined, held


def test_large_tensors_begin_where_a_huge_page_does(library: Any) -> None:
    held = []
    for size in (5 << 20, 9 << 20, 6 << 20):
        held.append(tensor(size))
        assert held[-1].data_ptr() % (2 << 20) == 0
    small, _ = tensor(3 * LEAST), held.pop(1)
    assert tensor(8 << 20).data_ptr() % (2 << 20) == 0
    del small


def test_small_tensors_are_left_to_torch(library: Any) -> None:
    small = tensor(LEAST - 1)
    del small
    assert library.kept_bytes() == 0


def test_memory_kept_and_in_use_is_no_more_than_was_in_use(library: Any) -> None:
    tensors = [tensor(4 * LEAST) for _ in range(4)]
    tensors = tensors[:1]
    assert library.kept_bytes() == 12 * LEAST
    tensors.append(tensor(14 * LEAST))  # 18 in use, more than ever
    assert library.kept_bytes() == 0
    tensors.pop()
    assert library.kept_bytes() == 14 * LEAST


def test_keeps_the_memory_of_two_steps_and_no_more(library: Any) -> None:
    large = tensor(40 * LEAST)
    del large
    library.start_keeping(60.0)
    small = tensor(2 * LEAST)
    del small
    assert library.kept_bytes() == 40 * LEAST
    library.start_keeping(60.0)
    assert library.kept_bytes() == 2 * LEAST
    library.start_keeping(60.0)
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
    tensor = torch.arange(LEAST, dtype=torch.float32)
    tensor.resize_(16 * LEAST)
    assert torch.equal(tensor[:LEAST], torch.arange(LEAST, dtype=torch.float32))
    shared = tensor.numpy()
    del tensor
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
    """The kept memory stays within its bound, which is counted here a second time."""
    library = allocator.load()
    if library is None or not library.start_keeping(60.0):
        pytest.skip("no compiler, or another system")
    library.end_keeping()
    library.start_keeping(60.0)
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
            library.start_keeping(60.0)
        elif what == "end":
            on = False
            library.end_keeping()
        most = max(most, in_use())
        # What others hold here was there before, and counts on both sides.
        assert library.kept_bytes() <= (max(most, last) - in_use() if on else 0)
        for value, held, _ in live:
            assert int(held.min()) == int(held.max()) == value
            del held  # or it would be in use a step longer than is counted
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
from gact_graph.ops import allocator
from gact_graph.support.peak import PeakMeter

library = allocator.load()
generator = random.Random(0)
torch.ones(1 << 23, dtype=torch.uint8)  # starts the threads, which have memory of their own
with PeakMeter(torch.device("cpu")) as meter:
    live, most = [], 0
    for number in range(600):
        if number % 100 == 0:
            library.start_keeping(60.0)
        while live and generator.random() < 0.4 or len(live) > 12:
            live.pop(generator.randrange(len(live)))
        live.append(torch.ones(generator.randrange(1 << 16, 1 << 23), dtype=torch.uint8))
        most = max(most, sum(x.nbytes for x in live))
    print(json.dumps([meter.peak_bytes, most]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_the_process_peaks_as_if_all_were_returned_at_once(library: Any) -> None:
    peak, most = run(_PEAK)
    assert most <= peak <= most + (2 << 20)


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


def test_memory_goes_back_when_no_step_begins_for_a_while(library: Any) -> None:
    held = tensor(4 * LEAST).fill_(3)
    for small in (1, LEAST):
        library.start_keeping(0.05)
        freed = tensor(8 * LEAST)
        del freed
        time.sleep(0.1)
        another = tensor(small)
        assert library.kept_bytes() == 0
        del another
        assert library.kept_bytes() == 0
    assert int(held.min()) == 3


_MODEL = """
import gc, json, os, resource, sys
import numpy, torch
import gact_graph
from torch_geometric.nn import GATConv
from gact_graph.ops import allocator
from gact_graph.support.peak import resident_bytes

library = allocator.load()

def make():
    torch.manual_seed(0)
    return torch.nn.ModuleList([GATConv(32, 32, heads=3, concat=False) for _ in range(2)])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = make()
    def forward(self, x, edges):
        for conv in self.convs:
            x = conv(x, edges).relu()
        return x

def train(model, nodes, steps):
    x, edges = torch.randn(nodes, 32), torch.randint(nodes, (2, 8 * nodes))
    for _ in range(steps):
        model(x, edges).sum().backward()

def stock_steps():
    train(Net(), 500, 30)
"""

_DEATH = (
    _MODEL
    + """
stock_steps()
wrapped = gact_graph.wrap(Net(), level="lossless", min_bytes=0, blocks=False)
train(wrapped, 500, 1)
before = resident_bytes()
gc.disable()
train(wrapped, 30_000, 2)
kept = library.kept_bytes(), resident_bytes() - before
del wrapped
print(json.dumps([*kept, library.kept_bytes(), resident_bytes() - before]))
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is kept")
def test_memory_goes_back_when_the_last_wrapped_model_dies(library: Any) -> None:
    kept, resident, after, resident_after = run(_DEATH)
    assert kept > 60 << 20 and resident > 60 << 20
    assert after == 0
    assert resident_after < 25 << 20  # glibc's heap and libraries of the first large step


_LIMIT = (
    _MODEL
    + """
stock_steps()
room = 900 << 20  # more than a step takes

def limit():
    pages = int(open("/proc/self/statm").read().split()[0])
    taken = pages * os.sysconf("SC_PAGE_SIZE") - library.kept_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (taken + room, resource.RLIM_INFINITY))

def kept_bytes():
    wrapped = gact_graph.wrap(Net(), level="lossless", min_bytes=0, blocks=False)
    train(wrapped, 40_000, 2)
    return library.kept_bytes(), wrapped

limit()
limited, _ = kept_bytes()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kept, wrapped = kept_bytes()
limit()
torch.ones(1 << 18)
numpy.empty(500 << 20, numpy.uint8)  # glibc keeps some of the room
print(json.dumps([limited, kept]))
"""
)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is kept")
def test_others_get_the_memory_that_a_limit_of_addresses_leaves(library: Any) -> None:
    limited, kept = run(_LIMIT)
    assert limited == 0 and kept > 200 << 20


_OFFERED = """
import json, torch
from gact_graph.ops import allocator

library = allocator.load()
library.start_keeping(60.0)
freed = torch.ones(64 << 20, dtype=torch.uint8)
rollup = lambda: {
    line.split(":")[0]: int(line.split()[1])
    for line in open("/proc/self/smaps_rollup") if line.endswith("kB\\n")
}
huge = rollup()["AnonHugePages"]
del freed
print(json.dumps([huge, rollup()["LazyFree"]]))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is kept")
def test_the_system_may_take_back_huge_pages(library: Any) -> None:
    """As where a container comes to its limit."""
    huge, offered = run(_OFFERED)
    if huge < 64 << 10:
        pytest.skip("no huge pages")
    assert offered >= 64 << 10


class TestSwitch:
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("0", "not kept: GACT_GRAPH_KEEP_MEMORY=0"),
            (None, "kept from the first step of a wrapped model"),
        ],
    )
    def test_turns_it_off(
        self, value: str | None, message: str, library: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GACT_GRAPH_KEEP_MEMORY", raising=False)
        if value is not None:
            monkeypatch.setenv("GACT_GRAPH_KEEP_MEMORY", value)
        library.end_keeping()
        model = gact_graph.wrap(torch.nn.Linear(64, 64), min_bytes=0)
        for _ in range(2):
            model(torch.randn(4096, 64)).sum().backward()
        assert (library.kept_bytes() == 0) == (value == "0")
        assert info.facts()["freed CPU memory"].startswith(message)

    @pytest.fixture
    def preloaded(self, tmp_path: Path) -> str:
        """An allocator in place of the C library's, which it calls."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no library for this torch")
        source, shared = tmp_path / "other.c", tmp_path / "libother_malloc.so"
        source.write_text(
            "#include <stddef.h>\nvoid* __libc_malloc(size_t);\n"
            "void* malloc(size_t size) { return __libc_malloc(size); }\n"
        )
        subprocess.run([compiler, "-shared", "-fPIC", "-o", shared, source], check=True)
        return str(shared)

    @pytest.mark.long
    def test_another_allocator_keeps_memory_itself_unless_asked(
        self, library: Any, preloaded: str
    ) -> None:
        script = """
from gact_graph.info import facts

def kept_bytes():
    wrapped = gact_graph.wrap(Net(), level="lossless", min_bytes=0, blocks=False)
    train(wrapped, 30_000, 2)
    return library.kept_bytes()

without = kept_bytes(), facts()["freed CPU memory"]
os.environ["GACT_GRAPH_KEEP_MEMORY"] = "1"
print(json.dumps([*without, kept_bytes()]))
"""
        without, message, asked = run(_MODEL + script, LD_PRELOAD=preloaded)
        assert without == 0
        assert message.startswith("not kept: libother_malloc.so serves memory")
        assert asked > 60 << 20

    def test_another_value_is_refused(self, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GACT_GRAPH_KEEP_MEMORY", "yes")
        model = gact_graph.wrap(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match=r"GACT_GRAPH_KEEP_MEMORY to be 0 or 1 \(got 'yes'\)"):
            model(torch.ones(1, 4))


_COUNTED = """
import json, random, sys
from pathlib import Path
import torch
from gact_graph.ops.kernels.compiler import commands, compile_library
from gact_graph.ops.kernels.sources import csrc

counting, folder = sys.argv[1:]
flags = ["-std=c++17", "-DGACT_LIBRARY=counted", "-include", counting]
built = compile_library(commands()[0], [csrc() / "allocator/kept_memory.cpp"], flags, Path(folder))
torch.ops.load_library(str(built))
library, generator = torch.ops.counted, random.Random(0)

def tensor():
    return torch.empty(generator.randrange(64 << 10, 80 << 10), dtype=torch.uint8)

def most_comparisons(ranges):
    library.start_keeping(600.0)
    held = [tensor() for _ in range(2 * ranges)][::2]  # between any two of them one is free
    most = 0
    for _ in range(2000):
        before = library.comparisons()
        held[generator.randrange(ranges)] = tensor()
        most = max(most, library.comparisons() - before)
    kept = library.kept_bytes()
    held.clear()
    library.end_keeping()
    return most, kept

print(json.dumps([most_comparisons(1 << 11), most_comparisons(1 << 15)]))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is kept")
def test_steps_grow_with_the_logarithm_of_the_number_of_ranges(
    library: Any, tmp_path: Path
) -> None:
    counting = Path(__file__).parents[1] / "helpers" / "comparisons.h"
    (few, _), (many, kept) = run(_COUNTED, str(counting), str(tmp_path))
    assert kept > (1 << 15) * (56 << 10)  # of so many free ranges
    # log(2^15) / log(2^11) is 1.4, and there would be 16 times as many if all were looked at.
    assert few > 0 and many < 2 * few


def test_without_kernels_nothing_happens() -> None:
    policy = MemoryPolicy()
    policy.start_step(torch.nn.Linear(1, 1))
    policy.end()

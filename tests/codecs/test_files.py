"""Contexts of a CPU that wait for backward in files."""

from __future__ import annotations

import copy
import mmap
import os
import resource
import sys
from typing import Any

import pytest
import torch
from fresh import run
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN

import gact_graph
from gact_graph.codecs.offload.files import Files
from gact_graph.codecs.offload.pinned import Pool, room_for

MB = 1 << 20
NODES = 8_000


def graph() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(NODES, 64), torch.randint(NODES, (2, 40_000))


def net(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = kind(64, 64, 3, 8, norm="batch_norm", dropout=0.5)
    return made


def gradient(model: nn.Module, steps: int = 2) -> Tensor:
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(step)
        model(*graph.inputs).square().mean().backward()  # type: ignore[attr-defined]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


graph.inputs = graph()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_files_of_its_own() -> None:
    files = Files()
    pool, ones = Pool(files.buffer), torch.ones(1000, dtype=torch.uint8)
    pool.give(pool.take(1000))
    child = os.fork()
    if not child:  # both would take the free buffer
        ending = 1
        try:
            [piece] = pool.take(1000).like([ones])
            files.copy(piece, ones, None)
            ending = int(pool.nbytes != 1024)
        finally:
            os._exit(ending)
    [piece] = pool.take(1000).like([ones])
    files.copy(piece, ones * 2, None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = files.empty_like(piece, torch.device("cpu"))
    files.copy(back, piece, None)
    assert torch.equal(back, ones * 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
@pytest.mark.parametrize("count", [1, 1000, 3 * MB + 5])
def test_what_goes_to_a_file_comes_back(dtype: torch.dtype, count: int) -> None:
    files = Files()
    tensors = [torch.randint(100, (count,)).to(dtype), torch.arange(7)]
    buffer = Pool(files.buffer).take(room_for(tensors))
    pieces = buffer.like(tensors)
    for piece, tensor in zip(pieces, tensors, strict=True):
        files.copy(piece, tensor, None)
    for piece, tensor in zip(pieces, tensors, strict=True):
        back = files.empty_like(piece, torch.device("cpu"))
        files.copy(back, piece, None)
        assert torch.equal(back, tensor)


_RESIDENT = """
import torch
from gact_graph.codecs.offload.files import Files
from gact_graph.support.peak import PeakMeter

files, x = Files(), torch.ones(50_000_000)  # 200 MB
with PeakMeter(torch.device("cpu")) as meter:
    memory = files.buffer(x.nbytes).view(torch.float32)
    files.copy(memory, x, None)
    print(meter.peak_bytes // 1_000_000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_takes_no_memory_of_the_process() -> None:
    assert int(run(_RESIDENT)) < 40


def test_a_page_holds_several_pieces() -> None:
    """Their pages leave memory with the first of them, and come back with the next."""
    files = Files()
    memory = files.buffer(2 * mmap.PAGESIZE)
    parts = memory.split(100)
    for number, part in enumerate(parts):
        files.copy(part, torch.full((len(part),), number % 251, dtype=torch.uint8), None)
    for number, part in enumerate(parts):
        read = torch.empty_like(part, memory_format=torch.contiguous_format)
        files.copy(read, part, None)
        assert (read == number % 251).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_closed_with_its_buffer() -> None:
    files, before = Files(), len(os.listdir("/proc/self/fd"))
    memory = files.buffer(4096)
    assert len(os.listdir("/proc/self/fd")) > before
    del memory
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", [GCN, GAT])
def test_gradients_are_those_of_l1_bit_by_bit(kind: Any) -> None:
    in_memory = gact_graph.wrap(net(kind), level="L1", min_bytes=0)
    in_files = gact_graph.wrap(net(kind), level="L2", min_bytes=0)
    assert torch.equal(gradient(in_memory), gradient(in_files))


def test_without_codes_exact_tensors_wait_in_files() -> None:
    exact = gact_graph.wrap(net(GCN), level="lossless", blocks="auto", min_bytes=0)
    in_files = gact_graph.wrap(net(GCN), level="L2", bits=32, min_bytes=0)
    assert torch.equal(gradient(exact), gradient(in_files))
    kept, report = gact_graph.report(exact), gact_graph.report(in_files)
    assert report.stored_bytes == kept.stored_bytes
    assert report.host_bytes > 0.7 * report.stored_bytes
    rows = [row for row in report.contexts if row.host_bytes]
    assert rows and all(row.stored_bytes >= MB for row in rows)


def test_backward_runs_twice_and_a_copy_has_files_of_its_own() -> None:
    model = gact_graph.wrap(net(GCN), level="L2", bits=32, min_bytes=0)
    loss = model(*graph()).square().mean()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    for once, parameter in zip(first, model.parameters(), strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, 2 * once)
    other = copy.deepcopy(model)
    assert torch.isfinite(gradient(other)).all()


def test_a_change_in_place_does_not_reach_the_file() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.weight = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            out: Tensor = h * self.weight
            h.zero_()
            return out

    model = gact_graph.wrap(Changes(), level="L2", bits=32, min_bytes=0)
    x = torch.randn(NODES, 64)
    expected = model.lin(x).sum(0)
    model(x).sum().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-3, atol=1e-2)


def test_a_full_disk_is_an_error_that_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, count: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"Expected a file of 4,096 bytes in .* set TMPDIR"):
        Files().buffer(4096)


def test_too_many_files_are_an_error_that_names_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files, numbers = Files(), [*map(int, os.listdir("/proc/self/fd"))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(numbers) + 50, hard))
    buffers: list[Tensor] = []
    try:
        with pytest.raises(OSError, match=r"Too many open files.* have one: raise the limit"):
            buffers.extend(files.buffer(4096) for _ in range(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(files._files) == len(os.listdir("/proc/self/fd")) - len(numbers) > 10

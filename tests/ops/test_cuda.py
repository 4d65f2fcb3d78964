"""The CUDA kernels: compiled for every architecture, and run on the CPU where there is no GPU.

That they give the reference's bytes is tested with the other backends, in test_cpu.py and
test_bit_kernels.py, and on a GPU by the tests that have a ``device``.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simt
import torch
from fake_cuda import FakeCuda, fixture  # noqa: F401
from quantizer_samples import CHANNELS, DTYPES, same_bytes

from gact_graph import info
from gact_graph.ops import cuda, cuda_edges
from gact_graph.ops.kernels import nvrtc
from gact_graph.ops.kernels.nvrtc import Kernel
from gact_graph.ops.reference import bitmask as bits_reference
from gact_graph.ops.reference import quantize as reference

WIDTHS = (*range(1, 9), 16)


def test_every_kernel_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For one architecture; ``.ci/registers.py`` compiles for all."""
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    variants = {"cuda/quantize.cu": (0, 3), "cuda/wide_sum.cu": (1, 2, 3, 4)}
    pairs = [(source, n) for source in simt.NAMES for n in variants.get(source, (0,))]
    for source, bits in pairs:
        code = nvrtc.cubin(source, bits, "sm_90")
        assert code.startswith(b"\x7fELF")
        for name in simt.NAMES[source]:
            assert f".text.{name}\0".encode() in code, (source, bits, name)
    assert len([*tmp_path.rglob("*.cubin")]) == len(pairs)


def test_a_cubin_is_compiled_once_for_each_compiler_width_and_architecture(
    fake_cuda: FakeCuda,
) -> None:
    for _ in range(2):
        assert nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90") == b"bitmask.cu 0"
    assert len(fake_cuda.compiled) == 1
    nvrtc.cubin("cuda/bitmask.cu", 0, "sm_80")
    nvrtc.cubin("cuda/bitmask.cu", 1, "sm_80")
    assert len(fake_cuda.compiled) == 3
    fake_cuda.version = (13, 1)
    fake_cuda.forget()
    nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90")
    assert len(fake_cuda.compiled) == 4


def test_an_unwritable_cache_compiles_in_memory(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"cannot keep its compiled kernels in .*file"):
        assert nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90") == b"bitmask.cu 0"


def test_code_that_does_not_compile_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(Exception, match="arch"):
        nvrtc.cubin("cuda/bitmask.cu", 0, "sm_1")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_a_tensor_that_begins_anywhere(offset: int) -> None:
    """Vectors of 16 bytes are loaded from multiples of 16 alone."""
    whole = torch.randn(1004, generator=torch.Generator().manual_seed(offset))
    for x in (whole[offset:], whole.half()[offset:], whole.double()[offset:]):
        codes, stats = simt.KERNELS.pack(x, 3, 256, 7)
        expected = reference.pack(x, 3, 256, 7)
        assert torch.equal(codes, expected[0]) and torch.equal(stats, expected[1])
        words = simt.KERNELS.pack_bits(x, 1, 0.0)
        assert torch.equal(words, bits_reference.pack_bits(x, 1, 0.0))


def test_each_call_launches_one_kernel_and_none_for_an_empty_tensor() -> None:
    launched: list[Kernel] = []

    def launch(kernel: Kernel, *args: Any) -> None:
        launched.append(kernel)
        simt.launch(kernel, *args)

    kernels = cuda.Kernels(launch)
    for n, count in ((0, 0), (300, 1)):
        x = torch.linspace(-1, 1, n)
        for call in (
            lambda x=x: kernels.pack(x, 2, 256, 0),
            lambda x=x: kernels.unpack(*reference.pack(x, 2, 256, 0), [*x.shape], 2, 256, x.dtype),
            lambda x=x: kernels.pack_bits(x, 1, 0.0),
            lambda x=x: kernels.pack_pair(x, 0.0, 1.0),
            lambda x=x: kernels.unpack_bits(
                bits_reference.pack_bits(x, 1, 0.0), [*x.shape], 0.0, 1.0, x.dtype
            ),
        ):
            launched.clear()
            call()
            assert len(launched) == count


def test_operators_of_cuda_tensors_launch_these_kernels(fake_cuda: FakeCuda) -> None:
    """CPU tensors take the path of the dispatcher for CUDA tensors."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def call(name: str, *args: Any) -> Any:
        return getattr(torch.ops.gact_graph, name).default.redispatch(key, *args)

    x = torch.linspace(-1, 1, 1000)

    def use() -> None:
        packed = call("pack", x, 2, 256, 3)
        assert torch.equal(packed[0], reference.pack(x, 2, 256, 3)[0])
        unpacked = call("unpack", *packed, [1000], 2, 256, x.dtype)
        assert torch.equal(unpacked, reference.unpack(*packed, [1000], 2, 256, x.dtype))
        words = call("pack_bits", x, 1, 0.0)
        pair = torch.where(x > 0, 1.0, 0.0)
        assert torch.equal(call("pack_pair", pair, 0.0, 1.0)[0], words)
        assert torch.equal(call("unpack_bits", words, [1000], 0.0, 1.0, x.dtype), pair)

    assert cuda.load(x.device) is not None
    fake_cuda.log.clear()
    use()
    assert fake_cuda.launches == 5
    fake_cuda.forget()
    fake_cuda.run = _refuse
    with pytest.warns(RuntimeWarning, match="works with slower pure-torch code"):
        use()


def _refuse(*args: object) -> None:
    raise ImportError("cannot import name 'LEGACY_DEFAULT_STREAM'\nand more")


def _skip(*args: object) -> None:
    pass


def test_kernels_that_do_not_start_or_give_other_bytes_are_not_used(fake_cuda: FakeCuda) -> None:
    device = torch.device("cpu")
    assert cuda.load(device) is not None and cuda_edges.load(device) is not None
    for run, cause in ((_refuse, "LEGACY_DEFAULT_STREAM"), (_skip, "Expected the bytes")):
        fake_cuda.forget()
        fake_cuda.run = run
        with pytest.warns(RuntimeWarning, match=cause):
            assert cuda.load(device) is None


def test_memory_that_is_full_once_leaves_the_kernels_in_use(fake_cuda: FakeCuda) -> None:
    def fill(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    fake_cuda.run, loads = fill, (cuda.load, cuda_edges.load)
    for load in loads:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            load(torch.device("cpu"))
    fake_cuda.run = simt.launch
    assert all(load(torch.device("cpu")) is not None for load in loads)


@pytest.mark.parametrize("run", [_refuse, _skip])
def test_kernels_for_edges_that_fail_leave_the_quantizers_in_use(
    run: Callable[..., None], fake_cuda: FakeCuda
) -> None:
    quantizers = ("cuda/quantize.cu", "cuda/bitmask.cu")
    fake_cuda.run = lambda kernel, *args: (simt.launch if kernel.source in quantizers else run)(
        kernel, *args
    )
    cause = "LEGACY_DEFAULT_STREAM|Expected the sums"
    with pytest.warns(RuntimeWarning, match=f"its CUDA kernels for edges .*({cause})"):
        assert cuda_edges.load(torch.device("cpu")) is None
    assert cuda.load(torch.device("cpu")) is not None


def test_without_cuda_core_one_warning_names_the_package(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for load in (cuda.load, cuda_edges.load):
            assert [load(torch.device("cpu")) for _ in range(3)] == [None] * 3
    (warning,) = caught
    text = str(warning.message)
    assert "could not make its CUDA kernels and works with slower pure-torch code" in text
    assert "pip install 'cuda-core[cu1" in text and "driver" in text
    assert "(ModuleNotFoundError: " in text


def test_info_names_the_architecture_and_the_compiler(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    facts = info.facts()
    assert facts["GPU"] == "a GPU"
    assert facts["CUDA kernels"].startswith("built for sm_90 at first use, by NVRTC 13.0")


def test_a_first_use_while_a_graph_is_captured_is_refused(fake_cuda: FakeCuda) -> None:
    fake_cuda.capturing = True
    with pytest.raises(RuntimeError, match="Expected a step with the same bits before"):
        cuda.load(torch.device("cpu"))
    fake_cuda.capturing = False
    kernels = cuda.load(torch.device("cpu"))
    fake_cuda.capturing = True
    x = torch.linspace(-1, 1, 256)
    kernels.pack(x, 4, 256, 1)  # compiled for the trial
    with pytest.raises(RuntimeError, match="Expected a step with the same bits before"):
        kernels.pack(x, 5, 256, 1)


def _launch(device: int, warps: int = 1, *args: int | float) -> None:
    kernel = Kernel("cuda/bitmask.cu", "above_float32")
    nvrtc.launch(kernel, torch.device("cuda", device), warps, *args)


def test_a_launch_has_a_warp_for_each_piece_of_work(fake_cuda: FakeCuda) -> None:
    fake_cuda.run = _skip
    for warps, blocks in ((1, 1), (100, 13), (10**9, 4 * 32)):
        _launch(0, warps, 7, 0.5)
        kernel = Kernel("cuda/bitmask.cu", "above_float32")
        assert fake_cuda.log.pop() == (blocks, 256, kernel, 7, 0.5)


def test_each_thread_gets_the_context_of_a_device_before_it_launches_there(
    fake_cuda: FakeCuda,
) -> None:
    """Backward runs on threads in which torch may have done nothing on the device."""
    fake_cuda.run = _skip

    def launch() -> None:
        for index in (0, 0, 1, 1, 0):
            _launch(index)

    for _ in range(2):
        fake_cuda.log.clear()
        fake_cuda.threads.clear()
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        order = ["launch" if isinstance(entry, tuple) else entry for entry in fake_cuda.log]
        assert order == [0, "launch", "launch", 1, "launch", "launch", 0, "launch"]
        assert len(fake_cuda.threads) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_graph_captures_them(bits: int, dtype: torch.dtype) -> None:
    kernels = cuda.load(torch.device("cuda", torch.cuda.current_device()))
    assert kernels is not None
    x = torch.randn(10_000, device="cuda").to(dtype)
    kernels.unpack(*kernels.pack(x, bits, 256, 5), [10_000], bits, 256, dtype)  # compiled by now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, stats = kernels.pack(x, bits, 256, 5)
        y = kernels.unpack(codes, stats, [10_000], bits, 256, dtype)
    x.copy_(torch.randn(10_000, device="cuda"))
    graph.replay()
    expected = reference.pack(x, bits, 256, 5)
    assert torch.equal(codes, expected[0]) and torch.equal(stats, expected[1])
    assert torch.equal(y, reference.unpack(*expected, [10_000], bits, 256, dtype))


def test_the_reference_divides_by_tensors_of_the_device_alone() -> None:
    """CUDA multiplies by the reciprocal of a number, which rounds twice: the steps would differ."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[object] = []

    class Divisions(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.overloadpacket is torch.ops.aten.div and args[0].is_floating_point():
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    with Divisions():
        reference.pack(torch.linspace(-1, 1, 1000), 3, 256, 0)
    assert seen and all(isinstance(divisor, torch.Tensor) for divisor in seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "channels", "inner"),
    CHANNELS,
    ids=str,
)
def test_channels_are_normalized_while_they_are_packed(
    shape: tuple[int, ...], channels: int, inner: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    statistics = torch.randn(2, channels, generator=generator)
    statistics[1].abs_().add_(0.1)
    x.view(-1)[64:128] = x.view(-1)[0]  # a group of equal elements, where it is one channel
    for bits, group in ((3, 64), (5, 256), (8, 1024)):
        codes, stats = reference.pack(x, bits, group, 7, None, 0, statistics, inner)
        found = simt.KERNELS.pack(x, bits, group, 7, None, 0, statistics, inner)
        assert same_bytes(found[0], codes) and same_bytes(found[1], stats)


@pytest.mark.parametrize("weight", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("bits", [1, 4, 9])
def test_the_mean_of_both_decodings_takes_one_pass(bits: int, weight: float) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)).exp()
    x[300:600], x[700], x[3000] = 2.5, math.inf, math.nan
    coded = reference.pack(x, bits, 256, 3)
    how = [5000], bits, 256, x.dtype, *reference.exact_groups(x, coded[1], 256), 3, None
    of_mean = torch.tensor([weight])
    found = simt.KERNELS.unpack(*coded, *how, of_mean)
    assert same_bytes(found, reference.unpack(*coded, *how, of_mean))

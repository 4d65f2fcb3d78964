"""The CUDA kernels: compiled for every architecture, and run on the CPU where there is no GPU.

That they give the reference's bytes is tested with the other backends, in test_cpu.py and
test_bit_kernels.py, and on a GPU by the tests that have a ``device``.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simt
import torch

from gact_graph import info
from gact_graph.ops import cuda, cuda_edges
from gact_graph.ops.kernels import nvrtc, sources
from gact_graph.ops.kernels.nvrtc import Kernel
from gact_graph.ops.reference import bitmask as bits_reference
from gact_graph.ops.reference import quantize as reference

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
WIDTHS = (*range(1, 9), 16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str, folder: Path) -> None:
    pytest.importorskip("cuda.core")
    others = [(source, 0) for source in simt.NAMES if source != "cuda/quantize.cu"]
    for source, bits in (*(("cuda/quantize.cu", b) for b in WIDTHS), *others):
        code = nvrtc.cubin(source, bits, architecture)
        assert code.startswith(b"\x7fELF")
        for name in simt.NAMES[source]:
            assert f".text.{name}\0".encode() in code, (source, bits, name)
    assert len([*folder.rglob("*.cubin")]) == len(WIDTHS) + len(others)


def test_a_cubin_is_compiled_once_and_anew_when_a_source_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[tuple[object, ...]] = []

    def compile_(*args: object) -> bytes:
        compiled.append(args)
        return b"code"

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    versions = ["NVRTC 13.0"]
    monkeypatch.setattr(nvrtc, "compiler", lambda: versions[-1])
    copy = tmp_path / "csrc"
    shutil.copytree(sources.csrc(), copy)
    monkeypatch.setattr(sources, "csrc", lambda: copy)
    monkeypatch.setattr(nvrtc, "csrc", lambda: copy)
    for _ in range(2):
        assert nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90") == b"code"
    assert len(compiled) == 1
    nvrtc.cubin("cuda/bitmask.cu", 0, "sm_80")
    nvrtc.cubin("cuda/bitmask.cu", 1, "sm_80")
    assert len(compiled) == 3
    versions.append("NVRTC 13.1")
    nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90")
    assert len(compiled) == 4
    options = nvrtc._options
    monkeypatch.setattr(nvrtc, "_options", lambda *how: {**options(*how), "fma": True})
    nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90")
    assert len(compiled) == 5
    for count, file in enumerate([*copy.glob("*.h"), *copy.glob("cuda/*")], start=6):
        with file.open("a") as opened:
            opened.write("// changed\n")
        nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90")
        assert len(compiled) == count, file


def test_code_that_does_not_compile_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(Exception, match="arch"):
        nvrtc.cubin("cuda/bitmask.cu", 0, "sm_1")
    assert not folder.exists()


class _Launches:
    """Takes note of what is started, and runs it on the CPU."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def __call__(self, kernel: Kernel, *args: object) -> None:
        self.kernels.append(kernel)
        simt.launch(kernel, *args)  # type: ignore[arg-type]


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


def test_one_kernel_a_call_and_none_for_nothing() -> None:
    launches = _Launches()
    kernels = cuda.Kernels(launches)
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
            launches.kernels.clear()
            call()
            assert len(launches.kernels) == count


def test_refuses_what_does_not_fit() -> None:
    words = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"Expected words of \[3\], contiguous \(got \[2\]\)"):
        simt.KERNELS.unpack_bits(words, [129], 0.0, 1.0, torch.float32)


def test_operators_of_cuda_tensors_take_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher's way for CUDA tensors, with CPU tensors sent along it."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def call(name: str, *args: Any) -> Any:
        return getattr(torch.ops.gact_graph, name).default.redispatch(key, *args)

    x = torch.linspace(-1, 1, 1000)
    for kernels in (simt.KERNELS, None):
        asked: list[torch.device] = []
        monkeypatch.setattr(
            cuda,
            "load",
            lambda device, kernels=kernels, asked=asked: asked.append(device) or kernels,
        )
        packed = call("pack", x, 2, 256, 3)
        assert torch.equal(packed[0], reference.pack(x, 2, 256, 3)[0])
        unpacked = call("unpack", *packed, [1000], 2, 256, x.dtype)
        assert torch.equal(unpacked, reference.unpack(*packed, [1000], 2, 256, x.dtype))
        words = call("pack_bits", x, 1, 0.0)
        pair = torch.where(x > 0, 1.0, 0.0)
        assert torch.equal(call("pack_pair", pair, 0.0, 1.0)[0], words)
        assert torch.equal(call("unpack_bits", words, [1000], 0.0, 1.0, x.dtype), pair)
        assert asked == [x.device] * 5


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose kernels cannot be had."""

    def verify(kernels: cuda.Kernels, device: torch.device) -> None:
        raise ModuleNotFoundError("No module named 'cuda'\nand more")

    monkeypatch.setattr(nvrtc, "architecture_of", lambda index: "sm_90")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "verify", verify)
    _forget()
    yield
    _forget()


def _forget() -> None:
    cuda.load.clear()
    cuda_edges.load.clear()


def test_without_them_one_warning_tells_what_to_install(no_kernels: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for load in (cuda.load, cuda_edges.load):
            assert [load(torch.device("cuda", 0)) for _ in range(3)] == [None] * 3
    (warning,) = caught
    text = str(warning.message)
    assert "could not make its CUDA kernels and works with slower pure-torch code" in text
    assert "pip install 'cuda-core[cu1" in text and "driver" in text
    assert text.endswith("(ModuleNotFoundError: No module named 'cuda').")


def test_info_tells_of_a_gpu(no_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert info._cuda_kernels().startswith("built for sm_90 at first use, by NVRTC")


def test_importing_loads_no_compiler() -> None:
    script = "import sys, gact_graph; print([m for m in sys.modules if 'cuda.core' in m])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


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


class _Driver:
    """Devices without a GPU: takes note of what is started on them, and on which thread."""

    def __init__(self) -> None:
        self.device = 0
        self.log: list[Any] = []
        self.threads: set[int] = set()

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def start(self, *launched: Any) -> None:
        self.note(launched)

    def note(self, what: Any) -> None:
        self.log.append(what)
        self.threads.add(threading.get_ident())

    @property
    def order(self) -> list[Any]:
        """The number of each device whose context a thread was given, and each launch."""
        return ["launch" if isinstance(what, tuple) else what for what in self.log]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    core = pytest.importorskip("cuda.core")
    stand_in, stream = _Driver(), SimpleNamespace(cuda_stream=0)
    of_cuda = {
        "LaunchConfig": core.LaunchConfig,
        "Device": lambda index: SimpleNamespace(set_current=lambda: stand_in.note(index)),
        "launch": stand_in.start,
    }
    of_torch = {
        "current_device": lambda: stand_in.device,
        "device": stand_in.on,
        "current_stream": lambda index: stream,
    }
    ours = {
        "architecture_of": lambda index: "sm_90",
        "function": lambda kernel, architecture: (kernel, architecture),
        "_multiprocessors": lambda index: 4,
        "_stream": lambda handle: handle,
        "_core": lambda: SimpleNamespace(**of_cuda),
    }
    for owner, parts in ((torch.cuda, of_torch), (nvrtc, ours)):
        for name, part in parts.items():
            monkeypatch.setattr(owner, name, part)
    return stand_in


def test_a_launch_has_a_warp_for_each_piece_of_work(driver: _Driver) -> None:
    """All but the device: what cuda.core would be handed."""
    kernel = Kernel("cuda/quantize.cu", "pack_float32", 4)
    for warps, blocks in ((1, 1), (100, 13), (10**9, 4 * 32)):
        nvrtc.launch(kernel, torch.device("cuda", 0), warps, 7, 0.5)
        _, config, function, *args = driver.log.pop()
        assert (config.grid, config.block) == ((blocks, 1, 1), (256, 1, 1))
        assert function == (kernel, "sm_90") and args == [7, 0.5]


def test_a_thread_gets_the_context_before_its_first_launch(driver: _Driver) -> None:
    """torch's backward runs on threads that may have had no work of torch's on the device yet."""

    def twice() -> None:
        for _ in range(2):
            nvrtc.launch(Kernel("cuda/bitmask.cu", "above_float32"), torch.device("cuda", 0), 1)

    for _ in range(2):
        driver.log.clear()
        driver.threads.clear()
        thread = threading.Thread(target=twice)
        thread.start()
        thread.join()
        assert driver.order == [0, "launch", "launch"]
        assert len(driver.threads) == 1


def test_a_thread_gets_the_context_of_each_device_that_it_turns_to(driver: _Driver) -> None:
    def launch() -> None:
        for index in (0, 1, 1, 0):
            nvrtc.launch(Kernel("cuda/bitmask.cu", "above_float32"), torch.device("cuda", index), 1)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert driver.order == [0, "launch", 1, "launch", "launch", 0, "launch"]


def test_a_width_is_not_compiled_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    module = SimpleNamespace(get_kernel=lambda name: name)
    monkeypatch.setattr(nvrtc, "_module", lambda source, *how: compiled.append(source) or module)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    known, other = (Kernel("cuda/quantize.cu", "pack_float32", bits) for bits in (2, 3))
    nvrtc.function.clear()
    nvrtc.function(known, "sm_90")
    capturing[0] = True
    assert nvrtc.function(known, "sm_90") == "pack_float32"
    with pytest.raises(RuntimeError, match="Expected a step with the same bits before"):
        nvrtc.function(other, "sm_90")
    assert len(compiled) == 1
    nvrtc.function.clear()


def test_kernels_are_tried_out_before_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles may yet not start, or give other bytes: the reference serves then."""
    device = torch.device("cpu")
    cuda.verify(simt.KERNELS, device)
    cuda_edges.verify(simt.EDGE_KERNELS, device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for launch, cause in ((_refuse, "LEGACY_DEFAULT_STREAM"), (_skip, "Expected the bytes")):
        monkeypatch.setattr(nvrtc, "launch", launch)
        _forget()
        with pytest.warns(RuntimeWarning, match=cause):
            assert cuda.load(device) is None
    _forget()


@pytest.mark.parametrize("launch", ["_refuse", "_skip"])
def test_kernels_for_edges_that_fail_leave_the_quantizers_in_use(
    launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, wrong = torch.device("cpu"), globals()[launch]

    def launched(kernel: Kernel, *args: Any) -> None:
        (simt.launch if kernel.source in _OF_QUANTIZER else wrong)(kernel, *args)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(nvrtc, "launch", launched)
    _forget()
    said = "could not make its CUDA kernels for edges .*(LEGACY_DEFAULT_STREAM|Expected the sums)"
    with pytest.warns(RuntimeWarning, match=said):
        assert cuda_edges.load(device) is None
    assert cuda.load(device) is not None
    _forget()


_OF_QUANTIZER = ("cuda/quantize.cu", "cuda/bitmask.cu")


def _refuse(*args: object) -> None:
    raise ImportError("cannot import name 'LEGACY_DEFAULT_STREAM'")


def _skip(*args: object) -> None:
    pass


def test_a_first_use_while_a_graph_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda.load.clear()
    with pytest.raises(RuntimeError, match="Expected a step with the same bits before"):
        cuda.load(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "verify", lambda kernels, device: None)
    assert cuda.load(torch.device("cuda", 0)) is not None
    cuda.load.clear()


def test_an_unwritable_cache_compiles_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "_compile", lambda *args: b"code")
    monkeypatch.setattr(nvrtc, "compiler", lambda: "NVRTC 13.0")
    with pytest.warns(RuntimeWarning, match=r"cannot keep its compiled kernels in .*file"):
        assert nvrtc.cubin("cuda/bitmask.cu", 0, "sm_90") == b"code"


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

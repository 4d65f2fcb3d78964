"""A stand-in for ``cuda.core`` and torch's view of devices, for machines without a GPU.

The library compiles and launches through it as on a GPU; kernels run on CPU tensors, lane by lane,
by ``simt.py``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import simt
import torch

from gact_graph.ops import cuda, cuda_edges
from gact_graph.ops.kernels import nvrtc
from gact_graph.ops.kernels.nvrtc import WARPS, Kernel

_CACHE = "TORCH_EXTENSIONS_DIR"
_library_launch = nvrtc.launch


class FakeCuda:
    """Compiles to the name of a kernel, and keeps a log.

    Attributes:
        version: The version of NVRTC.
        device: The index of torch's current device; None for CPU tensors.
        capturing: Whether a CUDA graph is being captured.
        compiled: The options of each compilation.
        log: The index of each device whose context a thread has made current, and each launch: the
            number of blocks, the threads in a block, the kernel and its arguments.
        threads: The threads of the log.
        run: Runs a kernel with a number of warps; a test replaces it to make a launch fail.
    """

    def __init__(self) -> None:
        self.version = (13, 0)
        self.device: int | None = None
        self.capturing = False
        self.compiled: list[dict[str, Any]] = []
        self.log: list[Any] = []
        self.threads: set[int] = set()
        self.run: Callable[..., None] = simt.launch
        self._cache = os.environ.get(_CACHE)
        self._arguments: tuple[Any, ...] = ()

    @property
    def launches(self) -> int:
        return sum(isinstance(entry, tuple) for entry in self.log)

    def modules(self) -> dict[str, ModuleType | None]:
        """The modules, for ``sys.modules``."""
        core = ModuleType("cuda.core")
        vars(core).update(
            __version__="1.0",
            Program=lambda text, language, options: SimpleNamespace(
                compile=lambda target: SimpleNamespace(code=self._compile(options))
            ),
            ProgramOptions=dict,
            ObjectCode=SimpleNamespace(from_cubin=self._module),
            LaunchConfig=lambda grid, block: (grid, block),
            Device=lambda index: SimpleNamespace(set_current=lambda: self._note(index)),
            Stream=SimpleNamespace(from_handle=lambda handle: handle),
            launch=self._launch,
        )
        bindings = ModuleType("cuda.bindings")
        bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, *self.version))
        package = ModuleType("cuda")
        package.core, package.bindings = core, bindings
        return {"cuda": package, "cuda.core": core, "cuda.bindings": bindings}

    def functions_of_torch(self) -> dict[str, Callable[..., Any]]:
        """Functions of ``torch.cuda``."""
        return {
            "current_device": lambda: self.device,
            "device": self._on,
            "current_stream": lambda index: SimpleNamespace(cuda_stream=0),
            "get_device_capability": lambda index: (9, 0),
            "get_device_properties": lambda index: SimpleNamespace(multi_processor_count=4),
            "is_current_stream_capturing": lambda: self.capturing,
        }

    def launch(self, kernel: Kernel, device: torch.device, warps: int, *args: Any) -> None:
        """Launch a kernel as the library does; the emulator runs it with the tensors."""
        self._arguments = args
        _library_launch(kernel, device, warps, *args)

    def forget(self) -> None:
        """Let the library compile and try its kernels anew."""
        for function in (cuda.load, cuda_edges.load, nvrtc.function, nvrtc._module, nvrtc.compiler):
            function.clear()
        for function in (nvrtc._core, nvrtc._stream, nvrtc._config, nvrtc._multiprocessors):
            function.cache_clear()
        nvrtc.architecture_of.cache_clear()

    def _compile(self, options: dict[str, Any]) -> bytes:
        self.compiled.append(options)
        return f"{options['name']} {options['define_macro'][1]}".encode()

    def _module(self, code: bytes) -> SimpleNamespace:
        name, bits = code.decode().split()
        source = (Path("cuda") / name).as_posix()
        return SimpleNamespace(get_kernel=lambda function: Kernel(source, function, int(bits)))

    def _launch(self, stream: int, config: tuple[int, int], kernel: Kernel, *args: Any) -> None:
        self._note((*config, kernel, *args))
        assert args == (*nvrtc.numbers(self._arguments),)
        with pytest.MonkeyPatch.context() as patch:
            # The emulator's builds are in the cache of the user.
            patch.delenv(_CACHE) if self._cache is None else patch.setenv(_CACHE, self._cache)
            self.run(kernel, torch.device("cpu"), config[0] * WARPS, *self._arguments)

    def _note(self, entry: Any) -> None:
        self.log.append(entry)
        self.threads.add(threading.get_ident())

    @contextlib.contextmanager
    def _on(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before


@pytest.fixture(name="fake_cuda")
def fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCuda]:
    """The stand-in, with an empty cache of kernels. A file that uses it imports this function."""
    fake = FakeCuda()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, function in fake.functions_of_torch().items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(nvrtc, "launch", fake.launch)
    monkeypatch.setenv(_CACHE, str(tmp_path / "cache"))
    fake.forget()
    yield fake
    fake.forget()

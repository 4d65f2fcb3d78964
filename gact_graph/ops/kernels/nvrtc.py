"""Compilation of ``csrc/cuda`` with NVRTC at first use, and kernel launches, through ``cuda.core``.

Neither nvcc nor a host compiler is needed: NVRTC is part of torch's CUDA build, and ``cuda.core``
is a package by NVIDIA. Compilation needs no GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gact_graph.ops.kernels import cache
from gact_graph.ops.kernels.once import once
from gact_graph.ops.kernels.sources import csrc, digest

WARPS = 8
"""Warps per block."""

# The most blocks per multiprocessor: more warps than run at once, and few enough to spread the
# setup of each over many groups.
_WAVES = 32

# The device whose context each thread has.
_thread = threading.local()


@dataclass(frozen=True)
class Kernel:
    """The name of a kernel.

    Args:
        source: The file in ``csrc``.
        name: The name of the function.
        bits: What it is compiled for: the width of codes, 0 for one of each group; or the number of
            vectors of a row that a lane holds; or 0 for neither.
    """

    source: str
    name: str
    bits: int = 0


def cubin(source: str, bits: int, architecture: str) -> bytes:
    """Return machine code for an architecture such as ``sm_90``, compiled or from the cache.

    The name of a file in the cache holds a hash of its sources, options and compiler, so a stale
    file is never used.

    Raises:
        Exception: If ``cuda.core`` is not installed, or NVRTC is not found or does not know the
            architecture; of various types.
    """
    options = _options(bits, architecture)
    mark = digest("cuda", [source, repr(options), compiler()])
    name = f"gact_graph_{architecture}_{mark}.cubin"
    path = cache.find(name)
    if path is not None:
        return path.read_bytes()
    code = _compile(csrc() / source, options)
    cache.keep(name, code)
    return code


def _options(bits: int, architecture: str) -> dict[str, Any]:
    """Return the arguments of ``cuda.core.ProgramOptions``."""
    return {
        "arch": architecture,
        "std": "c++17",
        # Contraction would round once where the other backends round twice.
        "fma": False,
        "device_as_default_execution_space": True,
        "define_macro": ("GACT_BITS", str(bits)),
    }


@once
def compiler() -> str:
    """Return the versions of NVRTC and ``cuda.core``."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"NVRTC {major}.{minor}, cuda.core {_core().__version__}"


@functools.cache
def _core() -> Any:
    """Return ``cuda.core``, which need not be installed."""
    import cuda.core

    return cuda.core


def _compile(path: Path, options: dict[str, Any]) -> bytes:
    options = {"name": path.name, "include_path": str(path.parent), **options}
    program = _core().Program(path.read_text(), "c++", _core().ProgramOptions(**options))
    code: bytes = program.compile("cubin").code
    return code


@once
def function(kernel: Kernel, architecture: str) -> Any:
    """Load a kernel, as a ``cuda.core.Kernel`` for all devices of an architecture.

    Raises:
        RuntimeError: If a CUDA graph is being captured.
    """
    check_not_capturing()
    return _module(kernel.source, kernel.bits, architecture).get_kernel(kernel.name)


@once
def _module(source: str, bits: int, architecture: str) -> Any:
    return _core().ObjectCode.from_cubin(cubin(source, bits, architecture))


def check_not_capturing() -> None:
    """Raise an error during the capture of a CUDA graph, which compilation would invalidate.

    Raises:
        RuntimeError: If a CUDA graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Expected a step with the same bits before the CUDA graph is captured: it compiles the "
            "kernels"
        )


@functools.cache
def architecture_of(index: int) -> str:
    """Return the architecture of a CUDA device, such as ``sm_90``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def launch(kernel: Kernel, device: torch.device, warps: int, *args: Any) -> None:
    """Launch a kernel on the device's current stream, without waiting.

    Args:
        kernel: The kernel.
        device: A CUDA device with an index.
        warps: The number of warps that have work.
        args: The kernel's arguments: an int for an int64, a float for a double; a tensor stands for
            its address, None for 0, a tuple for its items.
    """
    index = device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, device, warps, *args)
        return
    # torch sets a device's context only before its own first operation in a thread. Backward runs
    # on other threads, and decoding may be the first operation there, when the driver has no
    # context or that of another device.
    if getattr(_thread, "device", None) != index:
        _core().Device(index).set_current()
        _thread.device = index
    config = _config(min(-(-warps // WARPS), _WAVES * _multiprocessors(index)))
    stream = _stream(torch.cuda.current_stream(index).cuda_stream)
    _core().launch(stream, config, function(kernel, architecture_of(index)), *numbers(args))


def numbers(args: Iterable[Any]) -> Iterator[int | float]:
    """Return the arguments of :func:`launch` as a kernel takes them."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from numbers(arg)
        elif isinstance(arg, torch.Tensor):
            yield arg.data_ptr()
        else:
            yield 0 if arg is None else arg


# The driver's handle of the legacy default stream, which is 0 in torch.
_LEGACY_STREAM = 1


@functools.lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    return _core().Stream.from_handle(handle or _LEGACY_STREAM)


@functools.lru_cache(maxsize=1024)
def _config(blocks: int) -> Any:
    return _core().LaunchConfig(grid=blocks, block=WARPS * 32)


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count

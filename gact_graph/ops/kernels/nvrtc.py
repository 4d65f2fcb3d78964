"""Compiles ``csrc/cuda`` with NVRTC at first use, and starts its kernels, through ``cuda.core``.

Neither nvcc nor a host compiler is needed: NVRTC comes with torch's CUDA build, and ``cuda.core``
is NVIDIA's own package. Compiling needs no GPU.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gact_graph.ops.kernels import cache
from gact_graph.ops.kernels.once import once
from gact_graph.ops.kernels.sources import csrc, digest

WARPS = 8
"""Warps a block."""

# Blocks a multiprocessor at most: more warps than run at once, and few enough that what each
# prepares once is spread over many groups.
_WAVES = 32


@dataclass(frozen=True)
class Kernel:
    """A kernel by name.

    Args:
        source: Its file in ``csrc``.
        name: Its name there.
        bits: The width that it is compiled for; 0 where it has none.
    """

    source: str
    name: str
    bits: int = 0


def cubin(source: str, bits: int, architecture: str) -> bytes:
    """Machine code of a source for an architecture such as ``sm_90``, compiled or from the cache.

    A file's name in the cache holds a hash of all that goes into it, the compiler too, so that none
    is ever stale.

    Raises:
        Exception: ``cuda.core`` is not installed, NVRTC is not found, or it does not know the
            architecture; each of its own type.
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
    """As ``cuda.core.ProgramOptions`` takes them."""
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
    """The versions of NVRTC and of what calls it."""
    import cuda.core
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    return f"NVRTC {major}.{minor} ({int(error)}), cuda.core {cuda.core.__version__}"


def _compile(path: Path, options: dict[str, Any]) -> bytes:
    from cuda.core import Program, ProgramOptions

    given = ProgramOptions(name=path.name, include_path=str(path.parent), **options)
    code: bytes = Program(path.read_text(), "c++", given).compile("cubin").code
    return code


@once
def function(kernel: Kernel, architecture: str) -> Any:
    """The kernel, loaded: a ``cuda.core.Kernel``. It serves all devices of its architecture.

    Raises:
        RuntimeError: A CUDA graph is being captured.
    """
    check_not_capturing()
    return _module(kernel.source, kernel.bits, architecture).get_kernel(kernel.name)


@once
def _module(source: str, bits: int, architecture: str) -> Any:
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(cubin(source, bits, architecture))


def check_not_capturing() -> None:
    """Refuses to compile and load while a CUDA graph is captured, which that would break.

    Raises:
        RuntimeError: A CUDA graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Expected a step with the same bits before the CUDA graph is captured: it compiles the "
            "kernels"
        )


@functools.cache
def architecture_of(index: int) -> str:
    """The architecture of the CUDA device of this number, such as ``sm_90``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def launch(kernel: Kernel, device: torch.device, warps: int, *args: int | float) -> None:
    """Starts a kernel on the device's current stream, and does not wait.

    Args:
        kernel: Which.
        device: A CUDA device with an index.
        warps: How many warps there is work for.
        args: The kernel's arguments: an int for a pointer or an int64, a float for a double.
    """
    index = device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, device, warps, *args)
        return
    _make_current(index)
    config = _config(min(-(-warps // WARPS), _WAVES * _multiprocessors(index)))
    stream = _stream(torch.cuda.current_stream(index).cuda_stream)
    _start()(stream, config, function(kernel, architecture_of(index)), *args)


def _make_current(index: int) -> None:
    """Gives this thread the device's context, which torch does at its own first work there alone.

    torch's backward runs on threads of its own, and a decoding may be the first that one of them
    has to do: the driver, which launches our kernels, then knows of no context, or of that of the
    device before.
    """
    if getattr(_thread, "device", None) != index:
        _set_current(index)
        _thread.device = index


_thread = threading.local()


def _set_current(index: int) -> None:
    from cuda.core import Device

    Device(index).set_current()


@functools.cache
def _start() -> Any:
    from cuda.core import launch

    return launch


# What the driver calls the legacy default stream; torch calls it 0.
_LEGACY_STREAM = 1


@functools.lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle or _LEGACY_STREAM)


@functools.lru_cache(maxsize=1024)
def _config(blocks: int) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=blocks, block=WARPS * 32)


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count

"""Compiles ``csrc/cuda`` with NVRTC at first use, and starts its kernels, through ``cuda.core``.

Neither nvcc nor a host compiler is needed: NVRTC comes with torch's CUDA build, and ``cuda.core``
is NVIDIA's own package. Compiling needs no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gact_graph.kernels import cache

CSRC = Path(__file__).resolve().parent.parent / "csrc"
HEADERS = ("noise.h", "cuda/element.h", "cuda/warp.h")
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

    A file's name in the cache holds a hash of all that goes into it, so that none is ever stale.

    Raises:
        Exception: ``cuda.core`` is not installed, NVRTC is not found, or it does not know the
            architecture; each of its own type.
    """
    text = (CSRC / source).read_text()
    parts = [text, str(bits), architecture, *((CSRC / name).read_text() for name in HEADERS)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = cache.folder() / f"gact_graph_{architecture}_{digest}.cubin"
    if not path.exists():
        _write(path, _compile(source, text, bits, architecture))
    return path.read_bytes()


def _compile(source: str, text: str, bits: int, architecture: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=Path(source).name,
        arch=architecture,
        std="c++17",
        # Contraction would round once where the other backends round twice.
        fma=False,
        device_as_default_execution_space=True,
        include_path=str((CSRC / source).parent),
        define_macro=("GACT_BITS", str(bits)),
    )
    code: bytes = Program(text, "c++", options).compile("cubin").code
    return code


def _write(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Moved at the end: a process that was killed leaves no half file, and two do not meet.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="build-", delete=False) as file:
        try:
            file.write(code)
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


@functools.cache
def function(kernel: Kernel, architecture: str) -> Any:
    """The kernel, loaded: a ``cuda.core.Kernel``. It serves all devices of its architecture."""
    return _module(kernel.source, kernel.bits, architecture).get_kernel(kernel.name)


@functools.cache
def _module(source: str, bits: int, architecture: str) -> Any:
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(cubin(source, bits, architecture))


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
    config = _config(min(-(-warps // WARPS), _WAVES * _multiprocessors(index)))
    stream = _stream(torch.cuda.current_stream(index).cuda_stream)
    _start()(stream, config, function(kernel, architecture_of(index)), *args)


@functools.cache
def _start() -> Any:
    from cuda.core import launch

    return launch


@functools.lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM


@functools.lru_cache(maxsize=1024)
def _config(blocks: int) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=blocks, block=WARPS * 32)


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count

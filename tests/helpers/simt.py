"""The CUDA kernels on the CPU: the same sources, run lane by lane by ``emulator/warps.cpp``.

Each launch has a new order of warps and lanes, and each access to memory is checked.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unwritten import Fault, Watched, bytes_of, extent

from gact_graph.ops.cuda import Kernels
from gact_graph.ops.cuda_attention import EdgeKernels
from gact_graph.ops.kernels import cache, compiler
from gact_graph.ops.kernels.nvrtc import WARPS, Kernel, numbers
from gact_graph.ops.kernels.sources import csrc, files_of

_TYPES = ("float16", "bfloat16", "float32", "float64")
_WAYS = (
    "pack",
    "pack_normalized",
    "unpack",
    "unpack_rows",
    "unpack_decorrelated",
    "unpack_rows_decorrelated",
)
_ATTENTION = ("sum_scores", "softmax", "softmax_carries", "weigh", "mean", "backward", "drop")
_LEAKY = ("scores", "rows", "vector")
NAMES = {
    "cuda/quantize.cu": [*(f"{way}_{t}" for way in _WAYS for t in _TYPES), "unpack_mean_float32"],
    "cuda/bitmask.cu": [
        *(f"{test}_{t}" for test in ("nonzero", "above", "not_at_most") for t in _TYPES),
        *(f"{way}_{n}" for way in ("nonzero", "pack_pair", "unpack_bits") for n in (1, 2, 4, 8)),
    ],
    "cuda/exact_groups.cu": [f"exact_groups_{n}" for n in (2, 4, 8)],
    "cuda/weighted_sum.cu": [
        *(f"{way}_float32_{n}" for way in ("sum", "dots") for n in (1, 2, 4)),
        *(f"{way}_float64_{n}" for way in ("sum", "dots") for n in (1, 2)),
        *(f"add_carries_{t}" for t in ("float32", "float64")),
    ],
    "cuda/wide_sum.cu": [
        f"wide_{way}_{t}" for way in ("sum", "backward") for t in ("float32", "float64")
    ],
    "cuda/attention.cu": [
        *(f"{way}_{t}" for way in _ATTENTION for t in ("float32", "float64")),
        *(f"leaky_{way}_float32_{n}" for way in _LEAKY for n in (1, 2, 4)),
        *(f"leaky_{way}_float64_{n}" for way in _LEAKY for n in (1, 2)),
    ],
}
"""The kernels of each source."""

MOST_BLOCKS = 2
"""Fewer blocks than there is work for, so that warps go on to further groups."""


def launch(
    kernel: Kernel,
    device: torch.device,
    warps: int,
    *args: Any,
    most_blocks: int = MOST_BLOCKS,
    seed: int | None = None,
) -> None:
    """Run a kernel as :func:`gact_graph.ops.kernels.nvrtc.launch` does, on CPU tensors.

    Args:
        kernel: The kernel. An absolute path of a source need not be in ``csrc``.
        device: The CPU.
        warps: The number of warps that have work.
        args: The kernel's arguments.
        most_blocks: The most blocks of the grid.
        seed: The order of warps and of lanes; drawn from :mod:`random` by default, which starts
            anew in each test.

    Raises:
        Fault: If a thread reads or writes outside of all tensors of the arguments, at an address
            that is no multiple of the size of the type, or beyond an array; if it reads memory
            without a value (see :mod:`unwritten`); if two threads access a byte and one writes to
            it; if lanes of a warp do not meet; or if the kernel traps.
    """
    assert device.type == "cpu"
    seed = random.getrandbits(32) if seed is None else seed
    values = b"".join(struct.pack("d" if isinstance(n, float) else "q", n) for n in numbers(args))
    tensors = [_Tensor.of(i, x) for i, x in enumerate(_flat(args)) if isinstance(x, Tensor)]
    tensors = [tensor for tensor in tensors if tensor.bytes]
    error = _host()[1].simt_launch(
        _kernel(kernel),
        min(-(-warps // WARPS), most_blocks),
        WARPS * 32,
        seed,
        ctypes.create_string_buffer(values, len(values)),
        (_Tensor * len(tensors))(*tensors),
        len(tensors),
    )
    if error is not None:
        raise Fault(f"{kernel.name}: Expected {error.decode()}, seed {seed}")


KERNELS = Watched(Kernels(launch))
"""The kernels of :func:`gact_graph.ops.cuda.load`, on CPU tensors."""

EDGE_KERNELS = Watched(EdgeKernels(launch))
"""The kernels of :func:`gact_graph.ops.cuda_edges.load`, on CPU tensors."""


class _Tensor(ctypes.Structure):
    """``simt::Tensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("written", ctypes.c_void_p),
        ("argument", ctypes.c_int),
    )

    @classmethod
    def of(cls, argument: int, x: Tensor) -> _Tensor:
        written = bytes_of(x)
        return cls(
            x.data_ptr(),
            extent(x),
            None if written is None else written.data_ptr(),
            argument,
        )


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for arg in args:
        yield from _flat(arg) if isinstance(arg, tuple) else [arg]


_FOLDER = Path(__file__).with_name("emulator")
_HEADER = _FOLDER / "simt.h"


@functools.cache
def _host() -> tuple[Path, ctypes.CDLL]:
    """Return the library that runs warps, and its path."""
    sources = [_FOLDER / name for name in ("warps.cpp", "memory.cpp")]
    options = ["-O2", f"-I{Path(torch.__file__).parent / 'include'}"]
    path = _cached(functools.partial(_build, options, sources), ["host"], sources)
    library = ctypes.CDLL(str(path))
    library.simt_launch.restype = ctypes.c_char_p
    library.simt_launch.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    )
    return path, library


@functools.cache
def _kernel(kernel: Kernel) -> ctypes.c_void_p:
    find = _kernels(kernel.source, kernel.bits).simt_kernel
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    address = find(kernel.name.encode())
    assert address is not None, kernel
    return ctypes.c_void_p(address)


@functools.cache
def _kernels(source: str, bits: int) -> ctypes.CDLL:
    path, text = csrc() / source, _FOLDER / "kernels.cpp"
    options = [
        *("-O1", "-ffp-contract=off", "-fno-exceptions", "-fsanitize=thread,alignment,bounds"),
        f"-DGACT_BITS={bits}",
        "-DGACT_NAMES=" + " ".join(f"GACT_KERNEL({name})" for name in NAMES[source]),
    ]
    own = f'-DGACT_SOURCE="{path}"'
    build = functools.partial(_build, [*options, own], [text], _host()[0])
    if Path(source).is_absolute():
        built = path.with_suffix(f".{bits}.so")
        built.write_bytes(build())
    else:
        headers = [file for file in files_of("cuda") if file.suffix == ".h"]
        built = _cached(build, options, [text, path, *headers])
    return ctypes.CDLL(str(built))


def _cached(build: functools.partial[bytes], options: list[str], files: list[Path]) -> Path:
    """Return the library that an earlier run built with the same options of equal files."""
    (cxx, *_) = compiler.commands()
    mark = hashlib.sha256(repr([cxx, compiler.version(cxx), options]).encode())
    for path in (*files, _HEADER):
        mark.update(path.read_bytes())
    name = f"gact_graph_simt_{mark.hexdigest()[:16]}.so"
    path = cache.find(name) or cache.keep(name, build())
    assert path is not None
    return path


def _build(options: list[str], sources: list[Path], *libraries: Path) -> bytes:
    (cxx, *_) = compiler.commands()
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{source.stem}.o" for source in sources]
        for source, part in zip(sources, parts, strict=True):
            compile_ = [*cxx, "-std=c++17", "-fPIC", *options, "-c", str(source), "-o", str(part)]
            subprocess.run(compile_, check=True)
        built = Path(folder) / "simt.so"
        # Without the options, and so without the sanitizers' own libraries.
        link = [*cxx, "-shared", *map(str, (*parts, *libraries)), "-o", str(built)]
        subprocess.run(link, check=True)
        return built.read_bytes()

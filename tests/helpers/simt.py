"""The CUDA kernels on the CPU: the same sources, run lane by lane by ``simt.cpp``."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

from gact_graph.ops.cuda import Kernels
from gact_graph.ops.cuda_attention import EdgeKernels
from gact_graph.ops.kernels import cache, compiler
from gact_graph.ops.kernels.nvrtc import WARPS, Kernel
from gact_graph.ops.kernels.sources import csrc, digest

_TYPES = ("float16", "bfloat16", "float32", "float64")
_WAYS = ("pack", "unpack", "unpack_rows", "unpack_decorrelated", "unpack_rows_decorrelated")
_ATTENTION = ("sum_scores", "softmax", "softmax_carries", "weigh", "mean", "backward", "drop")
_LEAKY = ("scores", "rows", "vector")
NAMES = {
    "cuda/quantize.cu": [f"{way}_{t}" for way in _WAYS for t in _TYPES],
    "cuda/bitmask.cu": [
        *(f"{test}_{t}" for test in ("nonzero", "above", "not_at_most") for t in _TYPES),
        *(f"{way}_{n}" for way in ("nonzero", "pack_pair", "unpack_bits") for n in (1, 2, 4, 8)),
    ],
    "cuda/weighted_sum.cu": [
        *(f"{way}_float32_{n}" for way in ("sum", "dots") for n in (1, 2, 4)),
        *(f"{way}_float64_{n}" for way in ("sum", "dots") for n in (1, 2)),
        *(f"add_carries_{t}" for t in ("float32", "float64")),
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
    *args: int | float,
    most_blocks: int = MOST_BLOCKS,
) -> None:
    """Run a kernel as :func:`gact_graph.ops.kernels.nvrtc.launch` does, on CPU tensors."""
    assert device.type == "cpu"
    values = [ctypes.c_double(a) if isinstance(a, float) else ctypes.c_int64(a) for a in args]
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
    )
    blocks = min(-(-warps // WARPS), most_blocks)
    known = _library(kernel.source, kernel.bits).simt_launch(
        kernel.name.encode(), blocks, WARPS * 32, pointers
    )
    assert known, kernel


KERNELS = Kernels(launch)
"""The kernels of :func:`gact_graph.ops.cuda.load`, on CPU tensors."""

EDGE_KERNELS = EdgeKernels(launch)
"""The kernels of :func:`gact_graph.ops.cuda_edges.load`, on CPU tensors."""


@functools.cache
def _library(source: str, bits: int) -> ctypes.CDLL:
    here = Path(__file__).with_suffix(".cpp")
    (cxx, *_) = compiler.commands()
    command = [
        *cxx,
        *("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", f"-DGACT_BITS={bits}"),
        f'-DGACT_SOURCE="{csrc() / source}"',
        "-DGACT_NAMES=" + " ".join(f"GACT_KERNEL({name})" for name in NAMES[source]),
        f"-I{Path(torch.__file__).parent / 'include'}",
    ]
    mark = digest("cuda", [*command, here.read_text(), compiler.version(cxx)])
    name = f"gact_graph_simt_{mark}.so"
    path = cache.find(name)
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "simt.so"
            subprocess.run([*command, str(here), "-o", str(built)], check=True)
            path = cache.keep(name, built.read_bytes())
    assert path is not None
    return ctypes.CDLL(str(path))

"""The CUDA kernels on the CPU: the same sources, run lane by lane by ``simt.cpp``."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from gact_graph.kernels import cache
from gact_graph.kernels.cuda import Kernels
from gact_graph.kernels.nvrtc import CSRC, HEADERS, WARPS, Kernel

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
_TYPES = ("float16", "bfloat16", "float32", "float64")
NAMES = {
    "cuda/quantize.cu": [f"{way}_{t}" for way in ("pack", "unpack", "unpack_rows") for t in _TYPES],
    "cuda/bitmask.cu": [
        *(f"{test}_{t}" for test in ("nonzero", "above", "not_at_most") for t in _TYPES),
        *(f"{way}_{n}" for way in ("nonzero", "pack_pair", "unpack_bits") for n in (1, 2, 4, 8)),
    ],
}
"""The kernels of each source."""

# Fewer blocks than there is work for, so that warps go on to further groups.
_MOST_BLOCKS = 2


def launch(kernel: Kernel, device: torch.device, warps: int, *args: int | float) -> None:
    """As :func:`gact_graph.kernels.nvrtc.launch`, on CPU tensors."""
    assert device.type == "cpu"
    values = [ctypes.c_double(a) if isinstance(a, float) else ctypes.c_int64(a) for a in args]
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
    )
    blocks = min(-(-warps // WARPS), _MOST_BLOCKS)
    known = _library(kernel.source, kernel.bits).simt_launch(
        kernel.name.encode(), blocks, WARPS * 32, pointers
    )
    assert known, kernel


KERNELS = Kernels(launch)
"""What :func:`gact_graph.kernels.cuda.load` gives on a GPU."""


@functools.cache
def _library(source: str, bits: int) -> ctypes.CDLL:
    assert COMPILER is not None
    here = Path(__file__).with_suffix(".cpp")
    flags = [
        *("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", f"-DGACT_BITS={bits}"),
        f'-DGACT_SOURCE="{CSRC / source}"',
        "-DGACT_NAMES=" + " ".join(f"GACT_KERNEL({name})" for name in NAMES[source]),
        *(f"-I{path}" for path in include_paths()),
    ]
    texts = [p.read_text() for p in (here, CSRC / source, *(CSRC / name for name in HEADERS))]
    digest = hashlib.sha256("\0".join([*flags, *texts]).encode()).hexdigest()[:16]
    path = cache.folder() / f"gact_graph_simt_{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            built = Path(folder) / "simt.so"
            subprocess.run([COMPILER, *flags, str(here), "-o", str(built)], check=True)
            os.replace(built, path)
    return ctypes.CDLL(str(path))

"""The quantizer and bit masks on CUDA tensors: checks, allocations and kernel launches."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gact_graph.ops.checks import (
    TILE,
    check_coded,
    check_packed,
    check_quantization,
    check_rows,
    check_strided,
    checked_numel,
    clamp_group_size,
)
from gact_graph.ops.kernels import fallback, nvrtc
from gact_graph.ops.kernels.nvrtc import Kernel
from gact_graph.ops.kernels.once import once
from gact_graph.ops.reference import bitmask as bits_reference
from gact_graph.ops.reference import quantize as reference
from gact_graph.ops.reference.bitmask import (
    TESTS,
    check_mask_test,
    check_pair,
    check_words,
    raw_pair,
)
from gact_graph.ops.registration import implement
from gact_graph.support.progress import telling

Launch = Callable[..., None]
"""The type of :func:`gact_graph.ops.kernels.nvrtc.launch`; tests pass an emulator."""

_LANES = 32
_VECTOR = 16  # bytes that a lane loads at a time, and the alignment of addresses
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PLAIN_INTEGERS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


class Kernels:
    """The operators on CUDA tensors, as methods with the signatures of the references.

    All work is queued on the current stream; nothing waits for the device. A tensor that is not
    contiguous, or is not aligned to 16 bytes, is copied first.

    Args:
        launch: A function that launches a kernel.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def pack(self, x: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
        check_quantization(bits, group_size)
        check_strided("x", x, x.device)
        check_coded("x", x.dtype)
        x = _aligned(x)
        n, groups = x.numel(), -(-x.numel() // group_size)
        codes = x.new_empty((-(-n // TILE), bits), dtype=torch.int64)
        stats = x.new_empty((groups, 2), dtype=torch.bfloat16)
        if n:
            kernel = _quantizer("pack", bits, x.dtype)
            outputs = codes.data_ptr(), stats.data_ptr()
            size = clamp_group_size(group_size, n)
            self._launch(kernel, x.device, groups, x.data_ptr(), n, size, seed, *outputs)
        return codes, stats

    def unpack(
        self,
        codes: Tensor,
        stats: Tensor,
        shape: list[int],
        bits: int,
        group_size: int,
        dtype: torch.dtype,
        groups: Tensor | None = None,
        values: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        n = checked_numel(shape)
        check_packed(codes, stats, n, bits, group_size, dtype, groups, values)
        x = codes.new_empty(shape, dtype=dtype)
        if n:
            kernel = _quantizer(_decoder("unpack", seed), bits, dtype)
            inputs = codes.data_ptr(), stats.data_ptr(), *_exact(groups, values)
            warps = -(-n // group_size)
            size = clamp_group_size(group_size, n)
            self._launch(kernel, x.device, warps, *inputs, n, size, seed or 0, x.data_ptr())
        return x

    def unpack_rows(
        self,
        codes: Tensor,
        stats: Tensor,
        rows: Tensor,
        numel: int,
        width: int,
        bits: int,
        group_size: int,
        dtype: torch.dtype,
        groups: Tensor | None = None,
        values: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        check_rows(rows, numel, width, codes.device)
        check_packed(codes, stats, numel, bits, group_size, dtype, groups, values)
        rows = rows.contiguous()
        x = codes.new_empty((len(rows), width), dtype=dtype)
        if len(rows):
            kernel = _quantizer(_decoder("unpack_rows", seed), bits, dtype)
            inputs = codes.data_ptr(), stats.data_ptr(), *_exact(groups, values), rows.data_ptr()
            sizes = len(rows), numel, width, clamp_group_size(group_size, numel)
            self._launch(kernel, x.device, len(rows), *inputs, *sizes, seed or 0, x.data_ptr())
        return x

    def pack_bits(self, x: Tensor, test: int, threshold: float) -> Tensor:
        check_mask_test(x, test)
        kind = _name(x.dtype)
        if x.dtype in _PLAIN_INTEGERS:
            kind = str(x.element_size())
        elif x.dtype not in _FLOATS:
            x, kind = x != 0, "1"
        x = _aligned(x)
        words = _words_for(x)
        if x.numel():
            kernel = Kernel("cuda/bitmask.cu", f"{TESTS[test]}_{kind}")
            args = (threshold,) if test else ()
            self._launch(
                kernel, x.device, _warps(x), x.data_ptr(), x.numel(), *args, words.data_ptr()
            )
        return words

    def pack_pair(self, x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        check_pair(x)
        x = _aligned(x)
        words, matched = _words_for(x), x.new_ones((), dtype=torch.bool)
        if x.numel():
            kernel = Kernel("cuda/bitmask.cu", f"pack_pair_{x.element_size()}")
            outputs = words.data_ptr(), matched.data_ptr()
            pair = raw_pair(low, high, x.dtype)
            self._launch(kernel, x.device, _warps(x), x.data_ptr(), x.numel(), *pair, *outputs)
        return words, matched

    def unpack_bits(
        self, words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
    ) -> Tensor:
        check_words(words, shape, dtype)
        x = words.new_empty(shape, dtype=dtype)
        words = words.contiguous()
        if x.numel():
            kernel = Kernel("cuda/bitmask.cu", f"unpack_bits_{x.element_size()}")
            pair = raw_pair(low, high, dtype)
            self._launch(
                kernel, x.device, _warps(x), words.data_ptr(), x.numel(), *pair, x.data_ptr()
            )
        return x


def load(device: torch.device) -> Kernels | None:
    """Return the kernels for a CUDA device, or None with one warning if they cannot be used."""
    return _load(device)


implement(
    "cuda",
    lambda device: load(device),
    *(reference.pack, reference.unpack, reference.unpack_rows),
    *(bits_reference.pack_bits, bits_reference.pack_pair, bits_reference.unpack_bits),
)


@once
def _load(device: torch.device) -> Kernels | None:
    kernels = Kernels(nvrtc.launch)
    return kernels if serves(lambda: verify(kernels, device), "its CUDA kernels") else None


def serves(trial: Callable[[], None], what: str) -> bool:
    """Return whether kernels pass a trial, which compiles them; warn once if they do not.

    Args:
        trial: A function that waits for the device and raises an exception for an error.
        what: The name of the kernels in the warning.

    Raises:
        RuntimeError: If a CUDA graph is being captured.
    """
    nvrtc.check_not_capturing()
    try:
        with telling("compiling kernels for CUDA"):
            trial()
    except Exception as error:  # of any type that a toolchain or driver raises: use the reference
        remedy = f"`{_package()}` and a driver that is no older than that CUDA"
        fallback.warn(f"make {what}", remedy, error)
        return False
    return True


def verify(kernels: Kernels, device: torch.device) -> None:
    """Run kernels of each source on one group and compare with the reference.

    A kernel that compiles may still fail to start or to work. Waits for the device.

    Raises:
        RuntimeError: If the bytes differ from the reference's.
        Exception: If the driver raises it.
    """
    x = torch.linspace(-1, 1, 256, device="cpu")
    moved = x.to(device)
    packed, expected = kernels.pack(moved, 4, 256, 1), reference.pack(x, 4, 256, 1)
    unpacked = kernels.unpack(*packed, [256], 4, 256, x.dtype)
    pairs = [
        *zip(packed, expected, strict=True),
        (unpacked, reference.unpack(*expected, [256], 4, 256, x.dtype)),
        (kernels.pack_bits(moved, 1, 0.0), bits_reference.pack_bits(x, 1, 0.0)),
    ]
    if not all(torch.equal(actual.cpu(), wanted) for actual, wanted in pairs):
        raise RuntimeError(f"Expected the bytes of the reference from {device} (got others)")


def _package() -> str:
    """Return the pip command for the CUDA version that torch was built with."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"pip install 'cuda-core[cu{major}]'"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _quantizer(name: str, bits: int, dtype: torch.dtype) -> Kernel:
    return Kernel("cuda/quantize.cu", f"{name}_{_name(dtype)}", bits)


def _decoder(name: str, seed: int | None) -> str:
    return name if seed is None else f"{name}_decorrelated"


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % _VECTOR == 0 else x.clone()


def _words_for(x: Tensor) -> Tensor:
    return x.new_empty(-(-x.numel() // TILE), dtype=torch.int64)


def _warps(x: Tensor) -> int:
    return -(-x.nbytes // (_LANES * _VECTOR))


def _exact(groups: Tensor | None, values: Tensor | None) -> tuple[int, int, int]:
    """Return the addresses of the exact groups and their elements, and their number."""
    if groups is None or values is None:
        return 0, 0, 0
    return groups.data_ptr(), values.data_ptr(), len(groups)

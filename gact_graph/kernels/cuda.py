"""The operators on CUDA tensors: what is checked, allocated and handed to the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gact_graph.kernels import fallback, nvrtc
from gact_graph.kernels.nvrtc import Kernel
from gact_graph.kernels.reference import TILE

Launch = Callable[..., None]
"""As :func:`gact_graph.kernels.nvrtc.launch`; the tests hand over another."""

_MOST_BITS = 16
_LANES = 32
_VECTOR = 16  # bytes that a lane loads at a time, and what addresses must be a multiple of
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PLAIN_INTEGERS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
_TESTS = ("nonzero", "above", "not_at_most")


class Kernels:
    """The compiled kernels, with the signatures of the operators.

    Everything is queued on the current stream; nothing waits for the device. A tensor that is not
    contiguous, or does not begin at a multiple of 16 bytes, is copied first.

    Args:
        launch: Starts a kernel.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def pack(self, x: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Codes [ceil(numel / 64), bits] (int64) and stats [ceil(numel / group_size), 2]."""
        _check(bits, group_size)
        x = _aligned(x)
        n, groups = x.numel(), -(-x.numel() // group_size)
        codes = x.new_empty((-(-n // TILE), bits), dtype=torch.int64)
        stats = x.new_empty((groups, 2), dtype=torch.bfloat16)
        if n:
            kernel = _quantizer("pack", bits, x.dtype)
            ends = codes.data_ptr(), stats.data_ptr()
            self._launch(kernel, x.device, groups, x.data_ptr(), n, group_size, seed, *ends)
        return codes, stats

    def unpack(
        self,
        codes: Tensor,
        stats: Tensor,
        shape: list[int],
        bits: int,
        group_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The decoded tensor of ``shape`` and ``dtype``, contiguous."""
        _check(bits, group_size)
        n = math.prod(shape)
        groups = -(-n // group_size)
        _check_record(codes, stats, n, bits, group_size)
        x = codes.new_empty(shape, dtype=dtype)
        if n:
            kernel = _quantizer("unpack", bits, dtype)
            starts = codes.data_ptr(), stats.data_ptr()
            self._launch(kernel, x.device, groups, *starts, n, group_size, x.data_ptr())
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
    ) -> Tensor:
        """Rows [len(rows), width] of the decoded tensor seen as [numel / width, width]."""
        _check(bits, group_size)
        _check_record(codes, stats, numel, bits, group_size)
        if width < 1:
            raise ValueError(f"Expected rows of 1 element or more (got {width})")
        rows = rows.contiguous()
        x = codes.new_empty((len(rows), width), dtype=dtype)
        if len(rows):
            kernel = _quantizer("unpack_rows", bits, dtype)
            starts = codes.data_ptr(), stats.data_ptr(), rows.data_ptr()
            sizes = len(rows), numel, width, group_size
            self._launch(kernel, x.device, len(rows), *starts, *sizes, x.data_ptr())
        return x

    def pack_bits(self, x: Tensor, test: int, threshold: float) -> Tensor:
        """Words [ceil(numel / 64)] int64. Tests: 0 nonzero, 1 above, 2 not at most."""
        kind = _name(x.dtype)
        if x.dtype in _PLAIN_INTEGERS:
            kind = str(x.element_size())
        elif x.dtype not in _FLOATS:
            x, kind = x != 0, "1"
        x = _aligned(x)
        words = _words_for(x)
        if x.numel():
            kernel = Kernel("cuda/bitmask.cu", f"{_TESTS[test]}_{kind}")
            args = (threshold,) if test else ()
            self._launch(
                kernel, x.device, _warps(x), x.data_ptr(), x.numel(), *args, words.data_ptr()
            )
        return words

    def pack_pair(self, x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Words, and a bool tensor [] that tells whether all elements were one of both."""
        x = _aligned(x)
        words, matched = _words_for(x), x.new_ones((), dtype=torch.bool)
        if x.numel():
            kernel = Kernel("cuda/bitmask.cu", f"pack_pair_{x.element_size()}")
            ends = words.data_ptr(), matched.data_ptr()
            pair = _raw(low, high, x.dtype)
            self._launch(kernel, x.device, _warps(x), x.data_ptr(), x.numel(), *pair, *ends)
        return words, matched

    def unpack_bits(
        self, words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
    ) -> Tensor:
        """The tensor of ``shape`` and ``dtype``, contiguous."""
        x = words.new_empty(shape, dtype=dtype)
        words = words.contiguous()
        _check_shape("words", words, [-(-x.numel() // TILE)])
        if x.numel():
            kernel = Kernel("cuda/bitmask.cu", f"unpack_bits_{x.element_size()}")
            pair = _raw(low, high, dtype)
            self._launch(
                kernel, x.device, _warps(x), words.data_ptr(), x.numel(), *pair, x.data_ptr()
            )
        return x


def load(device: torch.device) -> Kernels | None:
    """The kernels for a CUDA device, or None with one warning where there are none for it."""
    return _load(nvrtc.architecture_of(device.index))


@functools.cache
def _load(architecture: str) -> Kernels | None:
    try:
        for kernel in (
            _quantizer("pack", 4, torch.float32),
            Kernel("cuda/bitmask.cu", "above_float32"),
        ):
            nvrtc.function(kernel, architecture)
    except Exception as error:  # whatever a toolchain or driver may raise: the reference serves
        remedy = f"`{_package()}` and a driver that is no older than that CUDA"
        fallback.warn("make its CUDA kernels", remedy, error)
        return None
    return Kernels(nvrtc.launch)


def _package() -> str:
    """What pip installs for the CUDA that torch was built with."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"pip install 'cuda-core[cu{major}]'"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _quantizer(name: str, bits: int, dtype: torch.dtype) -> Kernel:
    return Kernel("cuda/quantize.cu", f"{name}_{_name(dtype)}", bits)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % _VECTOR == 0 else x.clone()


def _words_for(x: Tensor) -> Tensor:
    return x.new_empty(-(-x.numel() // TILE), dtype=torch.int64)


def _warps(x: Tensor) -> int:
    return -(-x.nbytes // (_LANES * _VECTOR))


def _raw(low: float, high: float, dtype: torch.dtype) -> list[int]:
    """The bits of both in ``dtype``, as torch itself converts them."""
    pair = torch.tensor([low, high], dtype=torch.float64).to(dtype)
    return pair.view(_INTEGERS[dtype.itemsize]).tolist()


def _check(bits: int, group_size: int) -> None:
    if not 1 <= bits <= _MOST_BITS:
        raise ValueError(f"Expected bits from 1 to {_MOST_BITS} (got {bits})")
    if group_size <= 0 or group_size % TILE:
        raise ValueError(
            f"Expected group_size to be a positive multiple of {TILE} (got {group_size})"
        )


def _check_record(codes: Tensor, stats: Tensor, n: int, bits: int, group_size: int) -> None:
    # Words read past their end would be a silent error, or a crash.
    _check_shape("codes", codes, [-(-n // TILE), bits])
    _check_shape("stats", stats, [-(-n // group_size), 2])


def _check_shape(name: str, x: Tensor, shape: list[int]) -> None:
    if [*x.shape] != shape or not x.is_contiguous():
        raise ValueError(f"Expected {name} of {shape} for this shape (got {[*x.shape]})")

"""The quantizer and bit masks on CUDA tensors: checks, allocations and kernel launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gact_graph.ops.checks import (
    DTYPES,
    TILE,
    check_elements,
    check_packed,
    check_rows,
    check_tensor,
    check_weight,
    check_widths,
    checked_numel,
    clamp_group_size,
    name_of,
)
from gact_graph.ops.kernels import notices, nvrtc
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
from gact_graph.ops.registration import implement_cuda
from gact_graph.support.progress import progress

Launch = Callable[..., None]
"""The type of :func:`gact_graph.ops.kernels.nvrtc.launch`; tests pass an emulator."""

LANES = 32
"""Lanes per warp."""

VECTOR = 16
"""The most bytes that a lane loads at a time, and the alignment of their addresses."""

_STATISTICS = 1024
"""Groups whose statistics a warp of ``exact_groups.cu`` reads."""

_PLAIN_INTEGERS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


class Launcher:
    """The base class of kernels for CUDA.

    All work is queued on the current stream; nothing waits for the device.

    Args:
        launch: A function that launches a kernel.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch


class Kernels(Launcher):
    """The quantizer and bit masks, as methods with the signatures of the references.

    A tensor that is not contiguous, or is not aligned to 16 bytes, is copied first.
    """

    def pack(
        self,
        x: Tensor,
        bits: int,
        group_size: int,
        seed: int,
        widths: Tensor | None = None,
        words: int = 0,
        channels: Tensor | None = None,
        inner: int = 1,
    ) -> tuple[Tensor, Tensor]:
        check_elements(x, bits, group_size)
        if channels is not None:
            reference.check_channels(x, channels, inner)
        x = _aligned(x)
        n, groups = x.numel(), -(-x.numel() // group_size)
        if widths is not None:
            check_widths(widths, words, n, group_size, x.device)
        shape = (-(-n // TILE), bits) if widths is None else (words,)
        codes = x.new_empty(shape, dtype=torch.int64)
        stats = x.new_empty((groups, 2), dtype=torch.bfloat16)
        if n:
            size = clamp_group_size(group_size, n)
            name = "pack" if channels is None else "pack_normalized"
            own = () if channels is None else (channels, channels.size(1), inner)
            args = x, n, size, seed, codes, stats, _layout(widths, size), own
            self._launch(_quantizer(name, bits, x.dtype, widths), x.device, groups, *args)
        return codes, stats

    def exact_groups(self, x: Tensor, stats: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        check_elements(x, 1, group_size)
        x, n, count = x.detach().contiguous(), x.numel(), -(-x.numel() // group_size)
        check_tensor("stats", stats, torch.bfloat16, [count, 2], x.device)
        most = reference.exact_group_capacity(count)
        groups = x.new_full((most,), count, dtype=torch.int64)
        values = x.new_zeros((most, min(group_size, n)))
        if n:
            kernel = Kernel("cuda/exact_groups.cu", f"exact_groups_{x.element_size()}")
            chunks = -(-count // _STATISTICS)
            args = x, n, group_size, stats, count, most, groups, values
            self._launch(kernel, x.device, chunks, *args)
        return groups, values

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
        widths: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        n = checked_numel(shape)
        if weight is not None:
            check_weight(weight, seed, dtype, codes.device)
        check_packed(codes, stats, n, bits, group_size, dtype, groups, values, widths)
        x = codes.new_empty(shape, dtype=dtype)
        if n:
            inputs = codes, stats, groups, values, 0 if groups is None else len(groups), n
            size = clamp_group_size(group_size, n)
            name = _decoder("unpack", seed) if weight is None else "unpack_mean"
            args = inputs, size, seed, x, _layout(widths, size), () if weight is None else weight
            kernel = _quantizer(name, bits, dtype, widths)
            self._launch(kernel, x.device, -(-n // group_size), *args)
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
        widths: Tensor | None = None,
    ) -> Tensor:
        check_rows(rows, numel, width, codes.device)
        check_packed(codes, stats, numel, bits, group_size, dtype, groups, values, widths)
        rows = rows.contiguous()
        x = codes.new_empty((len(rows), width), dtype=dtype)
        if len(rows):
            inputs = codes, stats, groups, values, 0 if groups is None else len(groups), rows
            size = clamp_group_size(group_size, numel)
            sizes, layout = (len(rows), numel, width, size), _layout(widths, size)
            kernel = _quantizer(_decoder("unpack_rows", seed), bits, dtype, widths)
            self._launch(kernel, x.device, len(rows), inputs, sizes, seed, x, layout)
        return x

    def pack_bits(self, x: Tensor, test: int, threshold: float) -> Tensor:
        check_mask_test(x, test)
        kind = name_of(x.dtype)
        if x.dtype in _PLAIN_INTEGERS:
            kind = str(x.element_size())
        elif x.dtype not in DTYPES:
            x, kind = x != 0, "1"
        x = _aligned(x)
        words = _words_for(x)
        self._run_on_bits(f"{TESTS[test]}_{kind}", x, x, (threshold,) if test else (), words)
        return words

    def pack_pair(self, x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        check_pair(x)
        x = _aligned(x)
        words, matched = _words_for(x), x.new_ones((), dtype=torch.bool)
        pair = *raw_pair(low, high, x.dtype), words, matched
        self._run_on_bits(f"pack_pair_{x.element_size()}", x, x, pair)
        return words, matched

    def unpack_bits(
        self, words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
    ) -> Tensor:
        check_words(words, shape, dtype)
        x = words.new_empty(shape, dtype=dtype)
        pair = *raw_pair(low, high, dtype), x
        self._run_on_bits(f"unpack_bits_{x.element_size()}", x, words.contiguous(), pair)
        return x

    def _run_on_bits(self, name: str, x: Tensor, source: Tensor, *args: Any) -> None:
        if x.numel():
            warps = -(-x.nbytes // (LANES * VECTOR))
            self._launch(Kernel("cuda/bitmask.cu", name), x.device, warps, source, x.numel(), *args)


@once
def load(device: torch.device) -> Kernels | None:
    """Return the kernels for a CUDA device, or None with one warning if they cannot be used."""
    kernels = Kernels(nvrtc.launch)
    return kernels if passes(lambda: verify(kernels, device), "its CUDA kernels") else None


implement_cuda(lambda device: load(device), Kernels)


def passes(trial: Callable[[], None], kernels: str) -> bool:
    """Return whether kernels pass a trial, which compiles them; warn once if they do not.

    Args:
        trial: A function that waits for the device and raises an exception for an error.
        kernels: The name of the kernels in the warning.

    Raises:
        RuntimeError: If a CUDA graph is being captured.
        torch.OutOfMemoryError: If the trial raises it. A later trial may pass.
    """
    nvrtc.check_not_capturing()
    try:
        with progress("compiling kernels for CUDA"):
            trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any type that a toolchain or driver raises: use the reference
        remedy = f"`{_package()}` and a driver that is no older than that CUDA"
        notices.warn(f"make {kernels}", remedy, error)
        return False
    return True


def verify(kernels: Kernels, device: torch.device) -> None:
    """Run kernels of each source on one group and compare with the reference.

    A kernel that compiles may still fail to start or to work. Waits for the device.

    Raises:
        RuntimeError: If the bytes differ from the reference's.
        Exception: If the driver raises it.
    """
    x = torch.linspace(-1, 1, 256, dtype=torch.float32, device="cpu")
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


def _quantizer(name: str, bits: int, dtype: torch.dtype, widths: Tensor | None) -> Kernel:
    return _kernel(name, bits if widths is None else 0, dtype)


@functools.cache
def _kernel(name: str, bits: int, dtype: torch.dtype) -> Kernel:
    return Kernel("cuda/quantize.cu", f"{name}_{name_of(dtype)}", bits)


def _layout(widths: Tensor | None, group_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the widths of groups and the words before each, as arguments of a kernel."""
    return widths, None if widths is None else reference.first_words(widths, group_size)


def _decoder(name: str, seed: int | None) -> str:
    return name if seed is None else f"{name}_decorrelated"


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % VECTOR == 0 else x.clone()


def _words_for(x: Tensor) -> Tensor:
    return x.new_empty(-(-x.numel() // TILE), dtype=torch.int64)

"""Equal tensors, found by their content; on a GPU, without comparing any two of them."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from gact_graph.support.part import piece

_CHUNK = 1 << 14
"""Numbers of a row per step, on a CPU. Their factors are kept: they take little memory beside the
parts of a graph that are tried for a plan, too."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_HALF = 0xFFFFFFFF
_SEED = int.from_bytes(os.urandom(7), "big")


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def checksum(x: Tensor) -> Tensor:
    """Return a multilinear hash of a tensor, modulo 2^64, without waiting for its device.

    The factors are random and odd. So a change of one number always changes the hash, and a change
    of several numbers leaves it with probability 2^-63 times the largest power of two that divides
    all differences: negligible for graphs that are not constructed to collide.

    Args:
        x: Integers, or the bits of floating-point numbers [R, E].

    Returns:
        The hash [], int64.
    """
    chunk = piece(_CHUNK, x.device)
    factors = _factors(x.device, _power_of_two(min(chunk, x.size(1))))
    size = len(factors)
    starts = range(0, max(1, x.size(1)), size)
    # Tensors of this loop would leave gaps in the heap: small sums between freed chunks, which the
    # next chunks do not fit.
    hashes = factors.new_empty(len(starts), x.size(0))
    numbers = factors.new_empty(x.size(0), size)
    shifted = torch.empty_like(numbers)
    for first, sums in zip(starts, hashes, strict=True):
        part = x[:, first : first + size]
        count = part.size(1)
        _write_integers(numbers[:, :count], part, shifted[:, :count])
        torch.sum(numbers[:, :count].mul_(factors[:count]), 1, out=sums)
    # Each chunk of each row has its own factor: else chunks could change places unnoticed.
    hashes = hashes.view(-1)
    of_chunks = _factors(x.device, _power_of_two(len(hashes)), of_chunks=True)
    return (hashes * of_chunks[: len(hashes)]).sum()


def mark_of(tensor: Tensor) -> Tensor:
    """Return a few numbers [K] that equal tensors share, without waiting for their device.

    On a CPU these are some elements, and :func:`same` compares the others. On a GPU, a comparison
    would wait for the device, so the mark is a hash of all bits.
    """
    if on_host(tensor):
        return spread_of(tensor).reshape(-1)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return checksum(real.reshape(1, -1)).view(1)


def spread_of(tensor: Tensor, count: int = 16) -> Tensor:
    """Return up to ``count`` elements of a tensor [numel], evenly spread."""
    return tensor[:: max(1, tensor.numel() // count)][:count]


def same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape, dtype and :func:`mark_of` are equal."""
    return not on_host(tensor) or torch.equal(tensor, other)


def _write_integers(out: Tensor, x: Tensor, scratch: Tensor) -> None:
    """Write integers, or the mixed bits of floating-point numbers."""
    if not x.is_floating_point():
        out.copy_(x)
        return
    out.copy_(x.view(_INTEGERS[x.element_size()]))
    # Floating-point numbers often differ in their upper bits only, so by multiples of a large
    # power of two: mixed into the lower bits, the differences become odd.
    for shift in (32, 16):
        torch.bitwise_right_shift(out, shift, out=scratch)
        out.bitwise_xor_(scratch.bitwise_and_(_LOW_HALF))


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


@functools.lru_cache(maxsize=16)
def _factors(device: torch.device, count: int, of_chunks: bool = False) -> Tensor:
    """Return random odd numbers [count], int64, the same for each call in a process."""
    generator = torch.Generator().manual_seed(_SEED + 2 * count + of_chunks)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu") | 1
    return drawn.to(device)

"""Equal tensors are found by their content: on a GPU without comparing any two of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gact_graph.support.storage import spread_of

_CHUNK, _CUDA_CHUNK = 1 << 17, 1 << 20
"""Numbers of a row that are read at a time: on the CPU as many as its cache holds, on CUDA enough
for a launch."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_HALF = 0xFFFFFFFF


def on_host(tensor: Tensor) -> bool:
    """Whether reading the tensor waits for no device."""
    return tensor.device.type == "cpu"


def checksum(x: Tensor) -> Tensor:
    """A multilinear hash of all numbers of a tensor [R, E], modulo 2^64, on its device.

    Its factors are random and odd. So a change of one number always changes the hash; a change of
    several does not with probability 2^-63 times the power of two that divides all differences: for
    two graphs that are not made to be mistaken for each other, never.

    Nothing waits for the device, but to bring the factors there once.

    Args:
        x: Integers, or floating-point numbers, which are taken by their bits.

    Returns:
        The hash [], int64.
    """
    chunk = _CHUNK if on_host(x) else _CUDA_CHUNK
    factors = _factors(x.device, _power_of_two(min(chunk, x.size(1))))
    size, sums = len(factors), []
    for first in range(0, max(1, x.size(1)), size):
        part = _integers_of(x[:, first : first + size])
        sums.append((part * factors[: part.size(1)]).sum(1))
    # Each chunk of each row has a factor of its own, or they could change places unseen.
    found = torch.cat(sums)
    of_chunks = _factors(x.device, _power_of_two(len(found)), of_chunks=True)
    return (found * of_chunks[: len(found)]).sum()


def mark_of(tensor: Tensor) -> Tensor:
    """A few numbers [K] that equal tensors share, on their device; nothing waits for it.

    On the CPU some of the elements, and :func:`same` compares all of them. Elsewhere that would
    wait for the device again, so it is a hash of all bits.
    """
    if on_host(tensor):
        return spread_of(tensor).reshape(-1)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return checksum(real.reshape(1, -1)).view(1)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape and dtype, with the same :func:`mark_of`, are equal."""
    return not on_host(one) or torch.equal(one, other)


def _integers_of(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    bits = x.view(_INTEGERS[x.element_size()]).long()
    # Such numbers often differ in their upper bits alone, and so by multiples of a large power of
    # two: lower bits take part in what those are.
    bits = bits ^ (bits >> 32 & _LOW_HALF)
    return bits ^ (bits >> 16 & _LOW_HALF)


def _power_of_two(count: int) -> int:
    """The least one that is not below ``count``."""
    return 1 << (count - 1).bit_length()


@functools.lru_cache(maxsize=16)
def _factors(device: torch.device, count: int, of_chunks: bool = False) -> Tensor:
    """Random odd numbers [count], int64, other ones in each process."""
    generator = torch.Generator()
    generator.seed()
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu") | 1
    return drawn.to(device)

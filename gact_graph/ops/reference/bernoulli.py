"""Bernoulli draws in pure torch: see :mod:`gact_graph.ops.bernoulli`."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.checks import TILE, check_tensor
from gact_graph.ops.reference.bitmask import pack_bits
from gact_graph.ops.registration import operator

STATE_BYTES = 5056
"""The size of the state of a generator for the CPU."""


@operator(mutates=("state", "words"))
def draw_bits(state: Tensor, words: Tensor, count: int, p: float) -> None:
    """Draw bits that are 1 with a probability.

    Args:
        state: The state of a generator for the CPU [5056], uint8. It is
            replaced by the state after the draws.
        words: The bits [ceil(count / 64)], int64, as of :mod:`gact_graph.ops.bitmask`; written.
        count: The number of bits.
        p: The probability of 1.
    """
    cpu = torch.device("cpu")
    check_tensor("state", state, torch.uint8, [STATE_BYTES], cpu)
    if count < 0 or not 0 <= p <= 1:
        raise ValueError(f"Expected count from 0 on and p from 0 to 1 (got {count} and {p})")
    check_tensor("words", words, torch.int64, [-(-count // TILE)], cpu)
    generator = torch.Generator(cpu)
    generator.set_state(state)
    draws = torch.empty(count, dtype=torch.float32, device=cpu)
    words.copy_(pack_bits(draws.bernoulli_(p, generator=generator), 0, 0.0))
    state.copy_(generator.get_state())


@torch.library.register_fake("gact_graph::draw_bits")
def _draw_bits_fake(state: Tensor, words: Tensor, count: int, p: float) -> None:
    return None

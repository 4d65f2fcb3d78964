"""How many edges a block has, if the user names no number."""

from __future__ import annotations

import torch

from gact_graph.layers.blocks.arguments import Arguments

_CPU_BYTES = 12 << 20
"""Messages of a block on the CPU: they and what is made of them stay in the cache."""

_CPU_BYTES_THRIFTY = 6 << 20
"""The same where saved tensors are quantized, so that a block's memory shows beside them; a little
slower."""

_CUDA_SHARE = 1 / 256
"""Messages of a block on CUDA, as a share of the device's memory; with gradients a block takes
several times that."""

LEAST_EDGES = 4096
"""With fewer edges, the overhead of a block shows."""

_CPU_EDGES, _CUDA_EDGES = 1 << 15, 1 << 24
"""With more edges, narrow messages gain nothing, and index tensors begin to count."""


def edges_per_block(arguments: Arguments, thrifty: bool, summed: int | None = None) -> int:
    """Edges of a block, by the bytes of one message.

    Args:
        arguments: The arguments of a call.
        thrifty: Whether saved tensors are quantized.
        summed: Index of a tensor whose rows an operator adds up, so that no edge has one.
    """
    by_edge = {
        use.index for use in arguments.uses if use.level in ("source", "destination", "edge")
    }
    tensors = [arguments.tensors[index] for index in by_edge] or [*arguments.tensors]
    width = max(t.nbytes / max(1, t.size(0)) for t in tensors)
    if summed is not None and by_edge == {summed} and arguments.levels_of(summed) == {"source"}:
        width = 1.0  # no edge has anything else
    device = tensors[0].device
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory * _CUDA_SHARE
        most = _CUDA_EDGES
    else:
        room = float(_CPU_BYTES_THRIFTY if thrifty else _CPU_BYTES)
        most = _CPU_EDGES
    return min(max(LEAST_EDGES, int(room / max(1.0, width))), most)

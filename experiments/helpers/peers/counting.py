"""Bytes that stock autograd saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.support.storage import parts_of


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module, inputs: Iterable[Tensor]) -> int:
    """Count what one forward saves: each storage once, without parameters, buffers and inputs.

    The forward runs in training mode; nothing is computed backward.
    """
    own = [*model.parameters(), *model.buffers(), *inputs]
    known = {part.untyped_storage().data_ptr() for tensor in own for part in parts_of(tensor)}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # an address is given again once its tensor is gone

    def pack(tensor: Tensor) -> Tensor:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
                kept.append(part.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        output = forward()
    del output
    return sum(sizes.values())

"""Which tensors backward never reads: they need not be saved to compute a block again.

The gradient of ``edge_weight * x_j`` reads the weights, and ``x_j`` only if the weights learn; that
of a sum reads nothing. Told on one block: where all that autograd saves stays the same, to the last
bit, with other values in a tensor, backward does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn import MessagePassing

from gact_graph.blocks.arguments import Arguments
from gact_graph.blocks.order import Block, Order
from gact_graph.blocks.work import Work
from gact_graph.stand_ins import attributes_restored, stand_ins
from gact_graph.surroundings import Surroundings


def unread(
    module: MessagePassing, work: Work, arguments: Arguments, order: Order, block: Block
) -> frozenset[int]:
    """The places of these tensors in ``arguments.tensors``.

    Args:
        module: The layer.
        work: What is computed again in backward.
        arguments: Those of one call; which of them learn decides what is read.
        order: Of the arcs.
        block: On which to find out.
    """
    tensors = arguments.tensors
    surroundings = Surroundings({t.device.type for t in tensors})
    learn = [t.requires_grad for t in tensors]

    def saved(values: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            found.append(tensor.detach())
            # What an operation saves of its own result would hold its graph, and that the result.
            return tensor.detach()

        with stand_ins(module), surroundings.again():
            given, _ = arguments.part(values, order, block, learn)
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                out = work(module, given)
        del out
        return found

    found = set()
    with attributes_restored(module):
        true = saved(tensors)
        for place, tensor in enumerate(tensors):
            if tensor.is_floating_point() and tensor.dim():
                with surroundings.again():
                    other = torch.rand_like(tensor[:1]).expand_as(tensor)
                values = [*tensors[:place], other, *tensors[place + 1 :]]
                if _same(true, saved(values)):
                    found.add(place)
    return frozenset(found)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )

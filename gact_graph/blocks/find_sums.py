"""Whether a layer adds up weights times rows of one tensor: found out on one block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gact_graph.blocks.arguments import Arguments
from gact_graph.blocks.order import Block, Order
from gact_graph.blocks.product import Products
from gact_graph.blocks.sums import Summed, can_sum, stand_in, weights_of
from gact_graph.blocks.work import is_sum, messages
from gact_graph.stand_ins import attributes_restored, stand_ins
from gact_graph.surroundings import Surroundings


def find_summed(
    module: MessagePassing,
    arguments: Arguments,
    order: Order,
    block: Block,
    kept: Sequence[str],
) -> Summed | None:
    """What the layer adds up; None if it does something else.

    Args:
        module: The layer.
        arguments: Those of one call.
        order: Of the arcs.
        block: On which to find out.
        kept: Attributes in which the layer leaves a tensor of arcs.
    """
    if not is_sum(module):
        return None
    surroundings = Surroundings({t.device.type for t in arguments.tensors})
    with stand_ins(module), attributes_restored(module), torch.no_grad():

        def left() -> list[Tensor]:
            return [getattr(module, name) for name in kept]

        for use in arguments.uses:
            x = arguments.tensors[use.place]
            if use.level != "source" or not can_sum(x):
                continue
            given, _ = arguments.part(arguments.tensors, order, block)
            with surroundings.again(), Products() as products:
                out = messages(module, given)
            weight = weights_of(products, out, given[use.parameter])
            if weight is None:
                continue
            summed, known = Summed(use.parameter, use.place, products.count - 1), left()
            # Whatever else reads the row gets NaN, and passes it on.
            given[use.parameter] = stand_in(x, block.arc_end - block.arc, math.nan)
            with surroundings.again():
                again = summed.weigh(module, given)
            if again is None or not torch.equal(again, weight):
                continue
            if all(map(torch.equal, known, left())):
                return summed
    return None

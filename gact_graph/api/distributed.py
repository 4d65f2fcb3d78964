"""Training on one graph with several processes of ``torch.distributed``.

```python
part = gact_graph.distributed.partition(data, parts=world)[rank]
model = gact_graph.wrap(model, bits=4, partition=part)
out = model(part.x, part.edge_index)  # the rows of this part's nodes
loss = F.cross_entropy(out[part.train_mask], part.y[part.train_mask], reduction="sum") / total
loss.backward()
gact_graph.distributed.sum_gradients(model)
```
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from gact_graph.layers.halo.parts import partition
from gact_graph.support.collective import collective

__all__ = ["partition", "sum_gradients"]


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients of the parameters over all processes, after backward.

    All processes call this function. A parameter without a gradient in this process counts as zero.
    Without a process group, nothing changes.

    Raises:
        RuntimeError: A process has failed, or does not call within the timeout of the group.
    """
    if not dist.is_initialized():
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with collective("sum gradients"):
                dist.all_reduce(parameter.grad)

"""Ways to train one model in less memory, side by side."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing

import gact_graph
from experiments.helpers.options import EXACT_LEVELS
from experiments.helpers.values import FP32_BITS


@dataclass(frozen=True)
class Variant:
    """One way.

    Attributes:
        level: gact_graph's level; None leaves the model as it is.
        blocks: As :func:`gact_graph.wrap` takes it.
        checkpoint: Whether each conv is computed again in backward by torch's own checkpoint.
    """

    level: str | None = None
    blocks: str | bool | None = False
    checkpoint: bool = False


VARIANTS = {
    "stock": Variant(),
    "checkpoint": Variant(checkpoint=True),
    "lossless": Variant("lossless"),
    "L1": Variant("L1"),
    "L2": Variant("L2"),
    "lossless+blocks": Variant("lossless", "auto"),
    "L1+blocks": Variant("L1", "auto"),
    "CB1": Variant("CB1"),
    "CB2": Variant("CB2", "auto"),
}


def apply(
    model: nn.Module,
    variant: Variant,
    bits: int,
    adaptive: bool,
    pin: Mapping[str, int] | None = None,
) -> nn.Module:
    """Change the model in place; ``bits``, ``adaptive`` and ``pin`` are for the levels that
    quantize."""
    if variant.checkpoint:
        for module in model.modules():
            if isinstance(module, MessagePassing):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    if variant.level is not None:
        exact = variant.level in EXACT_LEVELS
        gact_graph.wrap(
            model,
            bits=FP32_BITS if exact else bits,
            level=variant.level,
            adaptive=adaptive and not exact,
            pin=pin,
            blocks=variant.blocks,
            min_bytes=0,
        )
    return model

"""Parameters that are sharded over processes."""

from __future__ import annotations

from torch import nn

_CLASSES = frozenset({"FSDPModule", "FullyShardedDataParallel"})


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP shards parameters of a model, in either of its versions."""
    kinds = (kind for module in model.modules() for kind in type(module).__mro__)
    return any(kind.__name__ in _CLASSES for kind in kinds)

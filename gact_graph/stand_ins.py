"""Others in place of a module's parameters and buffers, for a forward that is run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def learning(module: nn.Module) -> list[Tensor]:
    """The parameters that need a gradient, each once."""
    return [p for p in module.parameters() if p.requires_grad]


@contextmanager
def stand_ins(module: nn.Module, values: Sequence[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Puts others in place of parameters and buffers: so hooks on them, and statistics, rest.

    The stand-ins of parameters share their memory; those of buffers have their own.

    Args:
        module: The module.
        values: What the parameters of :func:`learning` were, in that order, if not what they are.

    Yields:
        The stand-ins of these parameters.
    """
    made: dict[int, Tensor] = {}
    leaves: list[Tensor] = []
    if values is not None:
        for parameter, value in zip(learning(module), values, strict=True):
            made[id(parameter)] = nn.Parameter(value.detach())
            leaves.append(made[id(parameter)])
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    try:
        for part, parameters, buffers in before:
            for name, own in parameters.items():
                if own is not None:
                    if id(own) not in made:
                        alias = nn.Parameter(own.detach(), own.requires_grad)
                        made[id(own)] = alias
                        leaves += [alias] if own.requires_grad else []
                    part._parameters[name] = made[id(own)]  # type: ignore[assignment]
            for name, buffer in buffers.items():
                if buffer is not None:
                    part._buffers[name] = made.setdefault(id(buffer), buffer.clone())
        yield leaves
    finally:
        for part, parameters, buffers in before:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


@contextmanager
def attributes_restored(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Takes back what is set on the module inside; yields its attributes from before."""
    before = dict(vars(module))
    try:
        yield before
    finally:
        for name in [name for name in vars(module) if name not in before]:
            delattr(module, name)
        vars(module).update(before)

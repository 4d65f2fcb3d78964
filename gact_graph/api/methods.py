"""Which methods of a model are followed: ``forward``, and others that training loops call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch_geometric.nn import GAE

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def methods_of(model: nn.Module, named: Sequence[str]) -> Iterator[tuple[nn.Module, str, str]]:
    """Finds the methods to follow: for each its module, that module's name and its own name.

    These are ``forward`` and the ``named`` methods of the model. Where none is named, they are also
    ``encode`` of PyG's autoencoders and ``forward`` of each part of a ``LightningModule``, whose
    ``training_step`` calls its parts one by one.

    Raises:
        TypeError: ``named`` is no sequence of names.
        ValueError: The model has no such method.
    """
    yield model, "", "forward"
    if isinstance(named, str) or not all(isinstance(name, str) for name in named):
        raise TypeError(f"Expected methods to be a sequence of names (got {named!r})")
    for name in dict.fromkeys(named):
        if not callable(getattr(type(model), name, None)):
            raise ValueError(
                f"Expected methods to name methods of {type(model).__name__} (got {name!r})"
            )
        if name != "forward":
            yield model, "", name
    if named:
        return
    if isinstance(model, GAE):
        yield model, "", "encode"
    # By name: neither of the two packages that have this class needs to be installed.
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        yield from _parts(model, "")


def _parts(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, _CONTAINERS):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield child, f"{prefix}{name}", "forward"

"""The elements that a saved tensor shows: two views of the same elements are encoded once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from gact_graph.support.storage import Layout, span_of, storage_id, version_of, whole_of


class Elements(NamedTuple):
    """The elements that a tensor shows, each once.

    Args:
        flat: The elements [numel]; a view if they are consecutive in memory, else a copy.
        layout: The layout of the tensor over them.
        offset: Their first index in the storage.
        identity: A key that is equal for two tensors that show the same elements at the same
            version, while the :func:`gact_graph.support.storage.key_of` of their storage is held.
    """

    flat: Tensor
    layout: Layout
    offset: int
    identity: Hashable


def elements_of(tensor: Tensor, whole_storage: bool) -> Elements | None:
    """Return the elements of a tensor, or None if they overlap in a way that has no flat form.

    Args:
        tensor: The tensor.
        whole_storage: Whether to take all elements of its storage, shown or not.
    """
    span = whole_of(tensor) if whole_storage else span_of(tensor)
    if span is None:
        return None
    flat, layout = span
    offset = int((flat if layout.dense else tensor).storage_offset())
    # A copy without holes has the elements of its tensor in the order of its dimensions.
    order = None if layout.dense else (layout.shape, layout.stride)
    where = storage_id(tensor), offset, flat.numel(), order
    return Elements(flat, layout, offset, (where, version_of(tensor), tensor.dtype))

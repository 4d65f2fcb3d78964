"""Which elements a saved tensor shows, so that two views of the same elements are encoded once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from gact_graph.support.storage import Layout, place_of, span_of, version_of, whole_of


class Elements(NamedTuple):
    """The elements of a tensor, each once.

    Args:
        flat: The elements [numel]; a view where they are consecutive in memory, else a copy.
        layout: How the tensor lies over them.
        offset: Where they start in the storage, in elements.
        identity: Equal for two tensors that show the same elements at the same version, for as
            long as somebody holds the :func:`gact_graph.support.storage.key_of` of their storage.
    """

    flat: Tensor
    layout: Layout
    offset: int
    identity: Hashable


def elements_of(tensor: Tensor, whole_storage: bool) -> Elements | None:
    """The elements of a tensor, or None where they overlap in a way that has no flat form.

    Args:
        tensor: The tensor.
        whole_storage: Take all elements of its storage, whichever it shows.
    """
    span = whole_of(tensor) if whole_storage else span_of(tensor)
    if span is None:
        return None
    flat, layout = span
    offset = int((flat if layout.dense else tensor).storage_offset())
    # A copy without holes has the elements of its tensor in the order of its dimensions.
    order = None if layout.dense else (layout.shape, layout.stride)
    where = place_of(tensor), offset, flat.numel(), order
    return Elements(flat, layout, offset, (where, version_of(tensor), tensor.dtype))

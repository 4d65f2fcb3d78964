"""The bytes of one forward: for each context, those of stock autograd and those that are held."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gact_graph.capture.moments import Moments
from gact_graph.capture.trace import Save
from gact_graph.codecs import Context, Kept
from gact_graph.support.rows import RECOMPUTED, Row
from gact_graph.support.storage import Elements, key_of, physical_of, version_of


class Sizes:
    """The numbers of nodes and edges in the message passing of one forward."""

    def __init__(self) -> None:
        self._nodes: set[int] = set()
        self._edges: set[int] = set()

    def add(self, edge_index: Any, size: Any) -> None:
        """Add the sizes of one call of ``propagate``.

        Args:
            edge_index: The edges in any format.
            size: The numbers of source and destination nodes; None for an unknown one.
        """
        self._nodes |= {int(n) for n in size if n is not None}
        if not isinstance(edge_index, Tensor):
            self._edges.add(int(edge_index.nnz()))  # torch_sparse.SparseTensor
        elif edge_index.layout == torch.strided:
            self._edges.add(int(edge_index.size(1)))
        else:
            self._edges.add(int(edge_index._nnz()))

    def role_of(self, shape: tuple[int, ...], of_edges: bool) -> str:
        """Return ``node``, ``edge`` or ``other``.

        Args:
            shape: The shape of a tensor. On static graphs a batch dimension precedes the nodes.
            of_edges: Whether the tensor was saved while messages were computed, which decides
                where a graph has as many nodes as edges.
        """
        kinds = [(self._nodes, "node"), (self._edges, "edge")]
        for size in (*shape[:1], *shape[-2:-1]):
            for sizes, role in reversed(kinds) if of_edges else kinds:
                if size in sizes:
                    return role
        return "other"


class Key(Protocol):
    """A key of :func:`gact_graph.support.storage.key_of`, whose class has no annotations."""

    cdata: int


@dataclass
class Entry:
    """One context, or one tensor that only stock autograd would save.

    Attributes:
        row: The row of the report, not counting that other entries may have the same storage.
        key: The storage of the tensor, if there is one. Its ``cdata`` belongs to no other storage
            while the entry lives.
        context: A weak reference, since only autograd keeps the context alive; None for a tensor
            that only stock autograd would save. The attributes below are those of contexts.
        version: The tensor's version.
        dtype: The tensor's dtype.
        offset: The index of the first encoded element in the storage.
        numel: The number of encoded elements, including those that follow from other tensors.
        dense: Whether the encoded elements are consecutive in memory.
        of_edges: Whether the tensor was saved while messages were computed.
        storage_bytes: The bytes of the whole storage.
        is_owned: Whether the model or its inputs turned out to own the storage.
        name: The name in the record of moments, if there is one.
    """

    row: Row
    key: Key | None
    context: weakref.ref[Context] | None = None
    version: int | None = None
    dtype: torch.dtype | None = None
    offset: int = 0
    numel: int = 0
    dense: bool = False
    of_edges: bool = False
    storage_bytes: int = 0
    is_owned: bool = False
    name: str = ""

    def count_as_saved(self) -> None:
        """Count the tensor as saved by stock autograd, not only by another context."""
        self.row.raw_bytes = self.storage_bytes

    def refer_to(self, tensor: Tensor) -> bool:
        """Replace the encoded form by a reference into the storage of ``tensor``, if possible."""
        context = None if self.context is None else self.context()
        if context is None:
            return False
        if isinstance(context.sample, Kept):
            return True
        # A storage may be viewed in two dtypes, as the real view of a complex tensor is.
        matches = tensor.dtype == self.dtype and version_of(tensor) == self.version
        if not (self.dense and matches):
            return False
        flat = physical_of(tensor.detach()).as_strided((self.numel,), (1,), self.offset)
        context.encoded = Kept(flat, self.row.slot)
        return True


class Ledger:
    """Collects the contexts of one forward.

    Args:
        moments: Records when contexts are saved and released; None to record nothing.
    """

    def __init__(self, moments: Moments | None) -> None:
        self._entries: list[Entry] = []
        self._moments = moments

    def add(
        self,
        save: Save,
        context: Context,
        elements: Elements | None = None,
        *,
        is_shared: bool = False,
    ) -> Entry:
        """Add a context.

        Args:
            save: The dense tensor that it was made from.
            context: The context.
            elements: The elements that were encoded; None for a reference to the tensor.
            is_shared: Whether the context was made before, from an equal tensor.
        """
        tensor, form = save.tensor, context.form
        storage = tensor.untyped_storage().nbytes()
        stored = storage if form.codec == Kept.codec else form.nbytes
        numel = tensor.numel() if elements is None else elements.flat.numel()
        row = Row(
            slot=save.slot,
            role=_role_of(tensor, form.codec),
            codec=form.codec,
            shape=tuple(tensor.shape),
            numel=numel if form.coded is None else form.coded,
            bits=form.bits,
            raw_bytes=storage if save.by_autograd else 0,
            stored_bytes=0 if is_shared else stored,
            host_bytes=0 if is_shared else form.host_bytes,
        )
        entry = Entry(
            row,
            key_of(tensor),
            weakref.ref(context),
            version_of(tensor),
            tensor.dtype,
            offset=0 if elements is None else elements.offset,
            numel=numel,
            dense=elements is not None and elements.layout.dense,
            of_edges=save.of_edges,
            storage_bytes=storage,
        )
        self._entries.append(entry)
        if self._moments is not None:
            entry.name = self._moments.saved(row.slot, context)
        return entry

    def add_baseline(self, slot: str, nbytes: int, tensor: Tensor | None = None) -> None:
        """Add bytes that stock autograd would save and that are recomputed instead.

        Args:
            slot: The name of the row.
            nbytes: The number of bytes.
            tensor: The tensor, if there is one. Another entry may have its storage.
        """
        role = "edge" if tensor is None or tensor.is_floating_point() else "index"
        shape = () if tensor is None else tuple(tensor.shape)
        numel = 0 if tensor is None else tensor.numel()
        row = Row(slot, role, RECOMPUTED, shape, numel, None, nbytes, 0)
        self._entries.append(Entry(row, None if tensor is None else key_of(tensor)))

    def refer_to(self, owned: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Replace encoded forms of tensors that live elsewhere by references to these tensors.

        Args:
            owned: The tensors of the model and its inputs, by
                :func:`gact_graph.support.storage.storage_id`. They take no memory in stock
                autograd either.
            outputs: The outputs of the model, which the caller and the loss keep alive.
        """
        for entry in self._entries:
            if entry.key is None or entry.context is None:
                continue
            row, place = entry.row, entry.key.cdata
            if row.bits is not None and not row.raw_bytes:
                continue  # of a source, which stock does not hold, and which may change
            if place in owned:
                entry.is_owned = entry.refer_to(owned[place])
            elif place in outputs and row.bits is not None and entry.refer_to(outputs[place]):
                row.codec, row.bits, row.host_bytes = Kept.codec, None, 0
                row.stored_bytes = entry.storage_bytes

    def rows(self, owned: Container[int], sizes: Sizes, count_dead: bool = False) -> list[Row]:
        """Return the rows of the report, without changes to the ledger.

        Args:
            owned: Places of storages that the model and its inputs own, which are not counted.
            sizes: The numbers of nodes and edges.
            count_dead: Whether to count contexts that were released.
        """
        rows: list[Row] = []
        raw: set[int] = set()
        kept: set[int] = set()
        for entry in self._entries:
            row = dataclasses.replace(entry.row)
            place = None if entry.key is None else entry.key.cdata
            if entry.context is not None and place is not None:
                context = entry.context()
                if entry.is_owned or (context is None and not count_dead):
                    continue
                if row.codec == "mask" and context is not None:
                    # Joined with the mask of another tensor since.
                    row.stored_bytes = min(row.stored_bytes, context.form.nbytes)
                # References to one storage hold it once, as in stock autograd.
                if row.codec == Kept.codec:
                    row.stored_bytes *= place not in kept
                    kept.add(place)
                if row.role == "other":
                    row.role = sizes.role_of(row.shape, entry.of_edges)
            if row.raw_bytes and place is not None:
                row.raw_bytes *= place not in raw and place not in owned
                raw.add(place)
            if row.raw_bytes or row.stored_bytes:
                rows.append(row)
                if self._moments is not None and entry.name:
                    self._moments.rows[entry.name] = row
        return rows

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()


def _role_of(tensor: Tensor, codec: str) -> str:
    if codec == "mask":
        return "mask"
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return "index"
    return "other"

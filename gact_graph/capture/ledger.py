"""The bytes of one forward: for each context what stock autograd would hold and what is held."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.capture.elements import Elements
from gact_graph.capture.roles import Sizes
from gact_graph.capture.trace import Saver
from gact_graph.codecs import Context, Kept
from gact_graph.support.rows import RECOMPUTED, Row
from gact_graph.support.storage import key_of, physical_of, version_of


@dataclass
class Entry:
    """Where a context comes from, and what is known of it while forward runs.

    Attributes:
        context: A weak reference: autograd alone keeps the context alive.
        key: The storage of the tensor that it was made from; its ``cdata`` is no other storage's
            for as long as the entry lives.
        version: That tensor's version.
        dtype: Its type.
        offset: The first encoded element in the storage.
        dense: Whether the encoded elements are consecutive in memory.
        of_edges: Whether the tensor was saved while messages were made.
        storage_bytes: Bytes of the whole storage.
        row: Its row in the report, as if no other tensor showed the same storage.
        is_held: Whether it turned out to be a reference to what others hold anyway.
    """

    context: weakref.ref[Context]
    key: StorageWeakRef
    version: int | None
    dtype: torch.dtype
    offset: int
    dense: bool
    of_edges: bool
    storage_bytes: int
    row: Row
    is_held: bool = False

    def count_as_saved(self) -> None:
        """Autograd saves the tensor, too, and not only another context refers to it."""
        self.row.raw_bytes = self.storage_bytes

    def refer_to(self, tensor: Tensor) -> bool:
        """Replaces the encoded form by a reference into the storage of ``tensor``, if it can."""
        context = self.context()
        if context is None:
            return False
        if isinstance(context.encoded, Kept):
            return True
        # One storage may be seen in two types, as the real view of a complex tensor is.
        alike = tensor.dtype == self.dtype and version_of(tensor) == self.version
        if not (self.dense and alike):
            return False
        flat = physical_of(tensor.detach()).as_strided((self.row.numel,), (1,), self.offset)
        context.encoded = Kept(flat, self.row.slot)
        return True


@dataclass(frozen=True)
class OfStock:
    """What stock autograd would save where layers run in blocks, and is not saved.

    Attributes:
        row: Its row in the report.
        key: The storage of the tensor, if there is one.
    """

    row: Row
    key: StorageWeakRef | None


class Ledger:
    """Collects the contexts of one forward."""

    def __init__(self) -> None:
        self._entries: list[Entry | OfStock] = []

    def add(
        self,
        tensor: Tensor,
        saver: Saver,
        context: Context,
        elements: Elements | None = None,
        *,
        by_autograd: bool = True,
        is_shared: bool = False,
    ) -> Entry:
        """Enters a context.

        Args:
            tensor: The plain tensor that it was made from.
            saver: Who saves that.
            context: What is held.
            elements: Those that were encoded; None for a reference to the tensor.
            by_autograd: Whether autograd saves the tensor, or only another context refers to it.
            is_shared: Whether the context was there already, made from an equal tensor.
        """
        storage = tensor.untyped_storage().nbytes()
        form = context.form
        stored = storage if form.codec == Kept.codec else form.nbytes
        row = Row(
            slot=saver.slot,
            role=_role_of(tensor, form.codec),
            codec=form.codec,
            shape=tuple(tensor.shape),
            numel=tensor.numel() if elements is None else elements.flat.numel(),
            bits=form.bits,
            raw_bytes=storage if by_autograd else 0,
            stored_bytes=0 if is_shared else stored,
            host_bytes=0 if is_shared else form.host_bytes,
        )
        entry = Entry(
            context=weakref.ref(context),
            key=key_of(tensor),
            version=version_of(tensor),
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()) if elements is None else elements.offset,
            dense=elements is not None and elements.layout.dense,
            of_edges=saver.of_edges,
            storage_bytes=storage,
            row=row,
        )
        self._entries.append(entry)
        return entry

    def add_of_stock(self, slot: str, nbytes: int, tensor: Tensor | None = None) -> None:
        """Enters what stock autograd would save, and nothing is saved for.

        Args:
            slot: Its name.
            nbytes: How much it is.
            tensor: The tensor, if there is one. Another entry may have its storage.
        """
        role = "edge" if tensor is None or tensor.is_floating_point() else "index"
        shape = () if tensor is None else tuple(tensor.shape)
        numel = 0 if tensor is None else tensor.numel()
        row = Row(slot, role, RECOMPUTED, shape, numel, None, nbytes, 0)
        self._entries.append(OfStock(row, None if tensor is None else key_of(tensor)))

    def refer_to(self, held: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Replaces encoded forms of tensors that others hold now by references to these tensors.

        Args:
            held: What the model and its inputs hold, by the places of the storages. Stock autograd
                holds it at no cost, too.
            outputs: The model's outputs, which live on in the caller's hands and in the loss.
        """
        for entry in self._entries:
            if isinstance(entry, OfStock):
                continue
            row, place = entry.row, entry.key.cdata
            if place in held:
                entry.is_held = entry.refer_to(held[place])
                continue
            is_output = place in outputs and row.bits is not None
            if is_output and entry.refer_to(outputs[place]):
                row.codec, row.bits, row.host_bytes = Kept.codec, None, 0
                row.stored_bytes = entry.storage_bytes

    def rows(self, held: Container[int], sizes: Sizes, count_dead: bool = False) -> list[Row]:
        """The rows of the report. Nothing is changed.

        Args:
            held: Places of storages that the model and its inputs hold: they are not counted.
            sizes: Tells nodes from edges.
            count_dead: Whether contexts count that are gone already.
        """
        found: list[Row] = []
        raw: set[int] = set()
        kept: set[int] = set()
        for entry in self._entries:
            row = Row(**vars(entry.row))
            place = None if entry.key is None else entry.key.cdata
            if isinstance(entry, Entry):
                if entry.is_held or (entry.context() is None and not count_dead):
                    continue
                # A storage is held once, by a reference as by stock autograd.
                if row.codec == Kept.codec:
                    row.stored_bytes *= place not in kept
                    kept.add(entry.key.cdata)
                if row.role == "other":
                    row.role = sizes.role_of(row.shape, entry.of_edges)
            if row.raw_bytes and place is not None:
                row.raw_bytes *= place not in raw and place not in held
                raw.add(place)
            if row.raw_bytes or row.stored_bytes:
                found.append(row)
        return found

    def clear(self) -> None:
        """Forgets all entries."""
        self._entries.clear()


def _role_of(tensor: Tensor, codec: str) -> str:
    if codec == "mask":
        return "mask"
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return "index"
    return "other"

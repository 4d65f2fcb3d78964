"""The account of one forward: for each context what stock autograd would hold, and what is held."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.codecs import Context, Kept
from gact_graph.report import Row
from gact_graph.sizes import Sizes
from gact_graph.storage import key_of, version_of


@dataclass(frozen=True)
class Entry:
    """Where a context comes from.

    Its row starts with the bytes of the whole storage as ``raw_bytes``.
    """

    key: StorageWeakRef
    version: int | None
    offset: int
    numel: int
    dense: bool
    of_edges: bool
    context: weakref.ref[Context]
    row: Row

    def adopt(self, context: Context, tensor: Tensor) -> bool:
        """Drops the encoded form for a reference into the storage of ``tensor``, if it can."""
        if isinstance(context.encoded, Kept):
            return True
        if not self.dense or version_of(tensor) != self.version:
            return False
        flat = tensor.detach().as_strided((self.numel,), (1,), self.offset)
        context.encoded = Kept(flat, self.row.slot)
        return True


class Account:
    """Collects the contexts of one forward."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(
        self,
        tensor: Tensor,
        slot: str,
        context: Context,
        *,
        numel: int,
        saved: bool,
        twin: bool = False,
        dense: bool = False,
        offset: int | None = None,
        of_edges: bool = False,
    ) -> Row:
        """Enters a context.

        Args:
            tensor: The plain tensor that it was made from.
            slot: Its name.
            context: What is held; only a weak reference is taken.
            numel: How many elements are encoded.
            saved: Whether autograd saves the tensor, or only another context refers to it.
            twin: Whether the context was there already, made from another tensor.
            dense: Whether the encoded elements are consecutive in memory,
            offset: from which element of the storage on; the tensor's own by default.
            of_edges: Whether it was saved while messages were made.

        Returns:
            Its row, as it stands now.
        """
        storage = tensor.untyped_storage().nbytes()
        encoded = context.encoded
        stored = storage if isinstance(encoded, Kept) else encoded.nbytes
        row = Row(
            slot=slot,
            role=_role_of(tensor, encoded.codec),
            codec=encoded.codec,
            shape=tuple(tensor.shape),
            numel=numel,
            bits=encoded.bits,
            raw_bytes=storage if saved else 0,
            stored_bytes=0 if twin else stored,
            host_bytes=0 if twin else encoded.host_bytes,
        )
        self._entries.append(
            Entry(
                key=key_of(tensor),
                version=version_of(tensor),
                offset=int(tensor.storage_offset() if offset is None else offset),
                numel=numel,
                dense=dense,
                of_edges=of_edges,
                context=weakref.ref(context),
                row=row,
            )
        )
        return row

    def settle(
        self,
        held: Mapping[StorageWeakRef, Tensor],
        given: Mapping[StorageWeakRef, Tensor],
        sizes: Sizes,
        count_dead: bool,
    ) -> Iterator[Row]:
        """The rows, at the end of forward. What others now hold is kept by reference.

        Args:
            held: What the model and its inputs hold: not counted at all.
            given: The model's outputs, which live on in the caller's hands and in the loss.
            sizes: Tells nodes from edges.
            count_dead: Whether contexts count that are gone already.
        """
        raw, kept = set(held), set()
        for entry in self._entries:
            key, row, context = entry.key, entry.row, entry.context()
            if context is None:
                if not count_dead:
                    continue
            elif key in held:
                if entry.adopt(context, held[key]):
                    continue
            elif key in given and row.bits is not None and entry.adopt(context, given[key]):
                row.codec, row.bits, row.stored_bytes = Kept.codec, None, row.raw_bytes
                row.host_bytes = 0
            # Stock autograd holds a storage once, and so does a reference.
            if row.codec == Kept.codec:
                row.stored_bytes *= key not in kept
                kept.add(key)
            if row.raw_bytes:
                row.raw_bytes *= key not in raw
                raw.add(key)
            if row.role == "other":
                row.role = sizes.role_of(row.shape, entry.of_edges)
            if row.raw_bytes or row.stored_bytes:
                yield row

    def clear(self) -> None:
        """Forgets all entries."""
        self._entries.clear()


def _role_of(tensor: Tensor, codec: str) -> str:
    if codec == "mask":
        return "mask"
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return "index"
    return "other"

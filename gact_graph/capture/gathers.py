"""Tensors that were gathered from another tensor, by ``index_select`` and similar operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.capture.trace import Call
from gact_graph.codecs.base import Gathered, Saved
from gact_graph.support.storage import is_plain, key_of, plain_of, storage_id, version_of


class Gather(NamedTuple):
    """A gathering operation, as a function of the source and the index."""

    gather: Callable[[Tensor, Tensor], Tensor]


class Gathers:
    """Records each gathered tensor for as long as its memory lives.

    A record holds the source, which may be a temporary tensor such as the sum in PyG's softmax. The
    source is no larger than the gathered tensor, and is released with it.

    Args:
        keep: A function that saves the index of an operation.
    """

    def __init__(self, keep: Callable[[Call, Tensor], Saved]) -> None:
        self._keep = keep
        # By the places of the gathered tensors; an expired key shows that a tensor is gone.
        self._records: dict[int, tuple[StorageWeakRef, Gathered]] = {}

    def see(self, call: Call, result: Any) -> None:
        """Record the operation if it gathered."""
        form = _FORMS.get(call.name)
        if form is None or not isinstance(result, Tensor) or not is_plain(result):
            return
        source, index, operation = form(call, result)
        if operation is None or not isinstance(source, Tensor) or not isinstance(index, Tensor):
            return
        source, index = plain_of(source), plain_of(index)
        whole = result.untyped_storage().nbytes() == result.nbytes and result.is_contiguous()
        lazy = result.is_conj() or result.is_neg()
        if not (is_plain(source) and is_plain(index)) or not whole or lazy:
            return
        key = key_of(result)
        if storage_id(source) == key.cdata or source.numel() > result.numel():
            return
        self._forget()
        gathered = Gathered(
            source=source.detach(),
            source_version=version_of(source),
            source_is_leaf=source.grad_fn is None,
            index=self._keep(call, index),
            operation=operation,
            version=version_of(result),
            dtype=result.dtype,
            numel=result.numel(),
        )
        self._records[key.cdata] = key, gathered

    def find(self, tensor: Tensor) -> Gathered | None:
        """Return the record of a tensor if neither the tensor nor its source has changed since."""
        if not self._records:
            return None
        self._forget()
        _, record = self._records.get(storage_id(tensor), (None, None))
        if record is None or record.dtype != tensor.dtype or record.version != version_of(tensor):
            return None
        return record if version_of(record.source) == record.source_version else None

    def _forget(self) -> None:
        for place in [place for place, (key, _) in self._records.items() if key.expired()]:
            del self._records[place]

    def clear(self) -> None:
        """Remove all records."""
        self._records.clear()


_Form = tuple[Any, Any, Gather | None]
"""The source, the index, and the operation; None if it does not gather."""


def _select(call: Call, result: Tensor) -> _Form:
    dim = call.argument(1, "dim")
    operation = Gather(lambda x, i: x.index_select(dim, i)) if isinstance(dim, int) else None
    return call.argument(0, "input", "self"), call.argument(2, "index"), operation


def _item(call: Call, result: Tensor) -> _Form:
    """``source[..., index, ...]``: one tensor among slices that take all elements."""
    source, key = call.args
    key = key if isinstance(key, tuple) else (key,)
    tensors = [i for i, part in enumerate(key) if isinstance(part, Tensor)]
    if len(tensors) != 1:
        return source, None, None
    [at] = tensors
    before, after = key[:at], key[at + 1 :]
    if any(part is not Ellipsis and part != slice(None) for part in (*before, *after)):
        return source, None, None
    return source, key[at], Gather(lambda x, i: x.__getitem__((*before, i, *after)))


def _repeat(call: Call, result: Tensor) -> _Form:
    """As in PyG's softmax over sorted edges."""
    source, repeats = call.argument(0, "input", "self"), call.argument(1, "repeats")
    dim = call.argument(2, "dim")
    if not isinstance(dim, int):
        return source, repeats, None
    size = result.size(dim)
    operation = Gather(lambda x, i: x.repeat_interleave(i, dim, output_size=size))
    return source, repeats, operation


_FORMS: dict[str, Callable[[Call, Tensor], _Form]] = {
    "index_select": _select,
    "getitem": _item,
    "repeat_interleave": _repeat,
}

GATHERING = frozenset(_FORMS)
"""The names of the operations that may gather."""

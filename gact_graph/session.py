"""One forward under compression: each context that autograd saves, encoded once."""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.capture import Owner, Trace
from gact_graph.codecs import Encoded, Keep, Kept, Request, codec_for
from gact_graph.config import Config
from gact_graph.report import Row
from gact_graph.storage import (
    Layout,
    is_plain,
    key_of,
    parts_of,
    span_of,
    tensors_held_by,
    tensors_in,
    version_of,
)

# A storage below this size is kept: its codes, statistics and bookkeeping would save nothing.
_SMALL = 8192  # bytes

# What a loss saves is small beside the model, and its error goes into every gradient.
_LOSSES = ("loss", "cross_entropy")


class Context:
    """One encoded context, shared by all saved tensors that show the same elements."""

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded


class Saved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("context", "layout")

    def __init__(self, context: Context, layout: Layout | None = None) -> None:
        self.context = context
        self.layout = layout

    def tensor(self) -> Tensor:
        """The tensor that was saved, with its values, dtype, shape and strides."""
        decoded = self.context.encoded.decode()
        return decoded if self.layout is None else self.layout.restore(decoded)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a context comes from: for the account that is made when forward has ended.

    Its row starts with the bytes of the whole storage as ``raw_bytes``.
    """

    key: StorageWeakRef
    version: int | None
    offset: int
    numel: int
    dense: bool
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


class Session:
    """Packs and unpacks for one forward of one model, and keeps account of the bytes.

    Args:
        config: The model's settings.
        owner: What the hooks on the model's submodules carry.
        number: How many forwards were compressed before this one: part of the noise's seed.
        model: Its parameters, buffers and cached tensors are kept by reference.
        inputs: The arguments of forward, nested as they come; kept by reference.
        adopt_inputs: Whether leaf tensors that are handed to a submodule from outside any count as
            inputs too: for :func:`gact_graph.compress`, which sees no arguments.
    """

    def __init__(
        self,
        config: Config,
        owner: Owner,
        number: int,
        model: nn.Module,
        inputs: Any,
        adopt_inputs: bool,
    ) -> None:
        self.owner = owner
        self.rows: list[Row] = []
        self.trace = Trace()
        self._config = config
        self._number = number
        self._adopt_inputs = adopt_inputs
        self._owned = {key_of(p) for t in tensors_held_by(model) for p in parts_of(t)}
        self._owned |= {key_of(t) for t in tensors_in(inputs)}
        self._contexts: weakref.WeakValueDictionary[Any, Context] = weakref.WeakValueDictionary()
        self._sources: list[Source] = []

    def enter(self, module: str, inputs: Any) -> None:
        """A submodule starts."""
        if not self.trace.inside_module:
            self.own_leaves(inputs)
        self.trace.enter(module)

    def leave(self, module: str) -> None:
        """A submodule has ended."""
        self.trace.leave(module)

    def own_leaves(self, inputs: Any) -> None:
        """Takes tensors that no operation of the graph made for inputs of the model."""
        if self._adopt_inputs:
            self._owned |= {key_of(t) for t in tensors_in(inputs) if t.grad_fn is None}

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook: what autograd shall hold in place of ``tensor``."""
        slot, operation = self.trace.name(tensor)
        tensor = tensor.detach()
        if not is_plain(tensor):
            whole = Context(Kept(tensor, slot))
            for part in parts_of(tensor):
                if key_of(part) not in self._owned:
                    self._account(part, slot, whole, part.numel())
            return Saved(whole)
        key = key_of(tensor)
        if key in self._owned:
            return Saved(Context(Kept(tensor, slot)))
        request = Request(
            tensor=tensor,
            slot=slot,
            bits=self._config.bits if self._config.quantize else 32,
            group_size=self._config.group_size,
            seed=self._seed_of(slot),
        )
        small = tensor.untyped_storage().nbytes() < _SMALL
        codec = codec_for(request)
        span = None
        if not (small or isinstance(codec, Keep) or any(loss in operation for loss in _LOSSES)):
            span = span_of(tensor)
        if span is None:
            whole = Context(Kept(tensor, slot))
            self._account(tensor, slot, whole, tensor.numel())
            return Saved(whole)
        flat, layout = span
        geometry = None if layout.dense else (layout.shape, layout.stride)
        place = (tensor.storage_offset(), flat.numel(), geometry)
        identity = (key, version_of(tensor), tensor.dtype, tensor.is_neg(), place)
        context = self._contexts.get(identity)
        if context is None:
            context = Context(codec.encode(dataclasses.replace(request, tensor=flat)))
            self._contexts[identity] = context
            self._account(tensor, slot, context, flat.numel(), layout.dense)
        return Saved(context, layout)

    @staticmethod
    def unpack(saved: Saved) -> Tensor:
        """The unpack hook. Static, so that a graph does not hold the session."""
        return saved.tensor()

    def settle(self, model: nn.Module, output: Any) -> None:
        """Ends the account after forward: what others now hold is kept by reference.

        The model's outputs live on in the caller's hands and in the loss, and a layer may have
        cached a tensor for the next step: a compressed copy beside them would only add memory.
        """
        held = {key_of(p): p for t in tensors_held_by(model) for p in parts_of(t)}
        given = {key_of(t): t for t in tensors_in(output)}
        raw, kept = set(held), set()
        for source in self._sources:
            key, row, context = source.key, source.row, source.context()
            if context is None:
                # Its graph is gone already: a branch that led nowhere. Inside gact_graph.compress
                # it may as well be that backward has run.
                if not self._adopt_inputs:
                    continue
            elif key in held:
                if source.adopt(context, held[key]):
                    continue
            elif key in given and source.adopt(context, given[key]):
                row.codec, row.bits, row.stored_bytes = Kept.codec, None, row.raw_bytes
            # Stock autograd holds a storage once, and so does a reference.
            if row.codec == Kept.codec:
                row.stored_bytes *= key not in kept
                kept.add(key)
            row.raw_bytes *= key not in raw
            raw.add(key)
            if row.raw_bytes or row.stored_bytes:
                self.rows.append(row)

    def close(self) -> None:
        """Lets go of everything but what autograd holds."""
        self._owned.clear()
        self._sources.clear()

    def _account(
        self, tensor: Tensor, slot: str, context: Context, numel: int, dense: bool = False
    ) -> None:
        storage = tensor.untyped_storage().nbytes()
        encoded = context.encoded
        row = Row(
            slot=slot,
            role=_role_of(tensor),
            codec=encoded.codec,
            shape=tuple(tensor.shape),
            numel=numel,
            bits=encoded.bits,
            raw_bytes=storage,
            stored_bytes=storage if isinstance(encoded, Kept) else encoded.nbytes,
        )
        self._sources.append(
            Source(
                key=key_of(tensor),
                version=version_of(tensor),
                offset=int(tensor.storage_offset()),
                numel=numel,
                dense=dense,
                context=weakref.ref(context),
                row=row,
            )
        )

    def _seed_of(self, slot: str) -> int:
        text = f"{self._config.seed}\0{self._number}\0{slot}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _role_of(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "mask"
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return "index"
    return "other"

"""One forward under compression: each context that autograd saves, encoded once."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from gact_graph.account import Account
from gact_graph.codecs import Context, Kept, Request, Saved, encode
from gact_graph.config import Config
from gact_graph.gathers import Gathers
from gact_graph.heap import give_back_now_and_then
from gact_graph.hooks import Owner
from gact_graph.inner import BITS, Coding
from gact_graph.operations import VALUES, Reads, reads_of
from gact_graph.report import Row
from gact_graph.scheme import Scheme
from gact_graph.sizes import Sizes
from gact_graph.storage import (
    is_plain,
    key_of,
    parts_of,
    plain_of,
    span_of,
    tensors_held_by,
    tensors_in,
    version_of,
    whole_of,
)
from gact_graph.swap import Swap
from gact_graph.trace import Call, Saver, Trace

# A storage below this size is kept: its codes, statistics and bookkeeping would save nothing.
_SMALL = 8192  # bytes

# What a loss saves is small beside the model, and its error goes into every gradient.
_LOSSES = ("loss", "cross_entropy")


class Session:
    """Packs and unpacks for one forward of one model, and keeps account of the bytes.

    Args:
        config: The model's settings.
        scheme: Bits by slot.
        owner: What the hooks on the model's submodules carry.
        number: How many forwards were compressed before this one: part of the noise's seed.
        model: Its parameters, buffers and cached tensors are kept by reference.
        inputs: The arguments of forward, nested as they come; kept by reference.
        adopt_inputs: Whether leaf tensors that are handed to a submodule from outside any count as
            inputs too: for :func:`gact_graph.compress`, which sees no arguments.
        reseed: The slot whose noise gets another seed: for measuring what its noise does.
        swap: Where encoded contexts go, if they leave their device.
    """

    def __init__(
        self,
        config: Config,
        scheme: Scheme,
        owner: Owner,
        number: int,
        model: nn.Module,
        inputs: Any,
        adopt_inputs: bool = False,
        reseed: str | None = None,
        swap: Swap | None = None,
    ) -> None:
        self.owner = owner
        self.rows: list[Row] = []
        self.sizes = Sizes()
        self.trace = Trace(self._after)
        self._config = config
        self._scheme = scheme
        self._reseed = reseed
        self._swap = swap
        self._number = number
        self._adopt_inputs = adopt_inputs
        self._owned = {key_of(p) for t in tensors_held_by(model) for p in parts_of(t)}
        self._owned |= {key_of(t) for t in tensors_in(inputs)}
        self._contexts: dict[Hashable, tuple[weakref.ref[Context], Row]] = {}
        self._twins: dict[Hashable, list[weakref.ref[Context]]] = {}
        self._gathers = Gathers(self._keep_index)
        self._account = Account()

    def enter(self, module: str, inputs: Any) -> None:
        """A submodule starts."""
        if not self.trace.inside_module:
            self.own_leaves(inputs)
        self.trace.enter(module)

    def own_leaves(self, inputs: Any) -> None:
        """Takes tensors that no operation of the graph made for inputs of the model."""
        if self._adopt_inputs:
            self._owned |= {key_of(t) for t in tensors_in(inputs) if t.grad_fn is None}

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook: what autograd shall hold in place of ``tensor``.

        :func:`gact_graph.hooks.unpack` is the other one: so a graph does not hold the session.
        """
        tensor = plain_of(tensor)
        saver = self.trace.saver(tensor)
        if is_plain(tensor):
            return self._save(tensor, saver, reads_of(saver.call, saver.position))
        whole = Context(Kept(tensor, saver.slot))
        for part in parts_of(tensor):
            if key_of(part) not in self._owned:
                self._account.add(part, saver.slot, whole, numel=part.numel(), saved=True)
        return Saved(whole)

    def settle(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Ends the account after forward: what others now hold is kept by reference.

        The model's outputs live on in the caller's hands and in the loss, and a layer may have
        cached a tensor for the next step, in itself or in its adjacency: a compressed copy beside
        them would only add memory.
        """
        held = {key_of(p): p for t in tensors_held_by(model) for p in parts_of(t)}
        held |= {key_of(t): t for t in tensors_in(inputs)}
        given = {key_of(t): t for t in tensors_in(output)}
        # A context that is gone belonged to a branch that led nowhere. Inside gact_graph.compress
        # it may as well be that backward has run.
        self.rows = [*self._account.settle(held, given, self.sizes, self._adopt_inputs)]

    def close(self) -> None:
        """Lets go of everything but what autograd holds."""
        self._owned.clear()
        self._gathers.clear()
        self._account.clear()
        if self._swap is not None:
            self._swap.close()

    def _after(self, call: Call, result: Any) -> None:
        if self._config.exact and torch.is_grad_enabled():
            self._gathers.see(call, result)

    def _keep_index(self, call: Call, index: Tensor) -> Saved:
        return self._save(index, self.trace.saver(index, call), VALUES, saved=False)

    def _save(self, tensor: Tensor, saver: Saver, reads: Reads, saved: bool = True) -> Saved:
        """What stands for a plain tensor.

        Args:
            tensor: The tensor.
            saver: Who saves it.
            reads: What backward reads of it.
            saved: Whether autograd saves it, or only another context refers to it.
        """
        constant = not tensor.requires_grad
        tensor = tensor.detach()
        key = key_of(tensor)
        if key in self._owned:
            return Saved(Context(Kept(tensor, saver.slot)))
        gathered = self._gathers.find(tensor)
        span = span_of(tensor) if gathered is None else whole_of(tensor)
        if span is None or _is_not_worth_it(tensor, saver.call.name):
            return self._keep_whole(tensor, saver, saved)
        flat, layout = span
        geometry = None if layout.dense else (layout.shape, layout.stride)
        offset = int((flat if layout.dense else tensor).storage_offset())
        place = (offset, flat.numel(), geometry)
        identity = (key, version_of(tensor), tensor.dtype, tensor.is_neg(), place)
        known = self._find(identity, reads)
        if known is not None:
            context, row = known
            if saved and not row.raw_bytes:
                row.raw_bytes = tensor.untyped_storage().nbytes()
            return Saved(context, layout)
        give_back_now_and_then(flat)
        request = Request(
            tensor=flat,
            slot=saver.slot,
            operation=saver.call.name,
            reads=reads,
            constant=constant,
            gathered=gathered,
            keep=lambda source: self._save(source, _source_of(saver), reads, saved=False),
            bits=self._scheme.bits_of(saver.slot) if self._config.quantize else 32,
            group_size=self._config.group_size,
            seed=self._seed_of(saver.slot),
        )
        encoded = encode(request, self._config.exact, self._config.quantize)
        if isinstance(encoded, Kept) and not layout.dense:
            return self._keep_whole(tensor, saver, saved)  # flat is a copy
        context = Context(encoded)
        twin = self._twin_of(context) if constant and self._config.exact else None
        if twin is not None:
            context = twin
        elif self._swap is not None:
            context.encoded = self._swap.leave(encoded)
        row = self._account.add(
            tensor,
            saver.slot,
            context,
            numel=flat.numel(),
            saved=saved,
            twin=twin is not None,
            dense=layout.dense,
            offset=offset,
            of_edges=saver.of_edges,
        )
        self._contexts[identity, None if encoded.exact else reads] = weakref.ref(context), row
        return Saved(context, layout)

    def _keep_whole(self, tensor: Tensor, saver: Saver, saved: bool) -> Saved:
        whole = Context(Kept(tensor, saver.slot))
        self._account.add(tensor, saver.slot, whole, numel=tensor.numel(), saved=saved)
        return Saved(whole)

    def _find(self, identity: Hashable, reads: Reads) -> tuple[Context, Row] | None:
        """The context of these elements, if one lives that will do for what backward reads."""
        for key in ((identity, None), (identity, reads)):
            if key in self._contexts:
                reference, row = self._contexts[key]
                context = reference()
                if context is not None:
                    return context, row
        return None

    def _twin_of(self, context: Context) -> Context | None:
        """An earlier context with the same values, made from another tensor.

        Layers make some constants anew that are equal in all of them: edges with self-loops, the
        normalised weights of a GCN.
        """
        mark = context.encoded.fingerprint()
        if mark is None:
            return None
        others = self._twins.setdefault(mark, [])
        for other in filter(None, (reference() for reference in others)):
            if context.encoded.equals(other.encoded):
                return other
        others.append(weakref.ref(context))
        return None

    def coding_of_inner(self, module: str) -> Coding | None:
        """Of what a layer saves while it is computed again; None where nothing is quantized."""
        if not self._config.quantize:
            return None
        bits = max(BITS, math.ceil(self._config.bits))
        return Coding(bits, self._config.group_size, self._seed_of(f"{module}/again"))

    def _seed_of(self, slot: str) -> int:
        again = "\0again" if slot == self._reseed else ""
        text = f"{self._config.seed}\0{self._number}\0{slot}{again}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _is_not_worth_it(tensor: Tensor, operation: str) -> bool:
    small = tensor.untyped_storage().nbytes() < _SMALL
    return small or any(loss in operation for loss in _LOSSES)


def _source_of(saver: Saver) -> Saver:
    return dataclasses.replace(saver, slot=f"{saver.slot}.source")

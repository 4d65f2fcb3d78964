"""One forward under compression: each tensor that autograd saves is encoded once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.capture.allowance import Allowance
from gact_graph.capture.config import Config
from gact_graph.capture.deferred import Deferred
from gact_graph.capture.elements import Elements, elements_of
from gact_graph.capture.encoder import Bits, Encoder
from gact_graph.capture.gathers import GATHERING, Gathers
from gact_graph.capture.held import Held, storages_held_by, storages_in
from gact_graph.capture.known import KnownContexts
from gact_graph.capture.ledger import Ledger
from gact_graph.capture.nodes import Attribute, attributes_of
from gact_graph.capture.noise import Noise
from gact_graph.capture.operations import reads_of, reads_of_source
from gact_graph.capture.replacements import Replacements
from gact_graph.capture.roles import Sizes
from gact_graph.capture.trace import Call, Saver, Trace
from gact_graph.codecs import Context, Kept, Saved
from gact_graph.codecs.base import Gathered
from gact_graph.codecs.compared import Widths
from gact_graph.codecs.offload.swap import Swap
from gact_graph.codecs.reads import EXACT, VALUES, Reads, Side
from gact_graph.support import current
from gact_graph.support.advising import Advise
from gact_graph.support.exact import Exactly, Reading, Start, needs_a_gradient
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.rows import LayerRow, Row
from gact_graph.support.storage import is_plain, parts_of, plain_of, tensors_in

# A storage below this size is kept: its codes, statistics and bookkeeping would save nothing.
_SMALL = 8192  # bytes

# What a loss saves is small beside the model, and its error goes into every gradient.
_LOSSES = ("loss", "cross_entropy", "kl_div")


class _Save(NamedTuple):
    """One tensor to be saved.

    Args:
        tensor: It, plain and detached.
        saver: Who saves it.
        reads: What backward reads of it.
        constant: Whether it needs no gradient.
        by_autograd: Whether stock autograd saves it, too.
    """

    tensor: Tensor
    saver: Saver
    reads: Reads
    constant: bool
    by_autograd: bool = True


class Session:
    """Packs what autograd saves in one forward of one model, and keeps account of the bytes.

    Args:
        config: The model's settings.
        scheme: Bits by slot.
        owner: What the hooks on the model's submodules carry.
        noise: Seeds by slot.
        model: Its parameters, buffers and cached tensors are kept by reference.
        inputs: The arguments of forward, nested as they come; kept by reference. None where they
            are not known, as inside :func:`gact_graph.compress`: leaf tensors that are handed to a
            submodule from outside any then count as inputs, and backward may run before the end.
        swap: Moves encoded contexts to host memory, if they are to leave their device.
        widths: Has each quantized context in a finer width, too: for measurements.
        spare: Bytes that are kept as they are before anything is encoded.
        exactly: The slots that are kept exactly; gets to know of others.
        all_exactly: Whether nothing loses precision.
        start: What forward began with, where it can run once more.
        layers: Gets a row for edge work that is no method of a layer.
        advise: Tells what to do where backward runs out of memory.

    Attributes:
        rows: The rows of the report, once forward has ended.
        not_made: Bytes that layers of stock would hold, and that are not made: messages, about, and
            what layers would save that run again in backward.
    """

    def __init__(
        self,
        config: Config,
        scheme: Bits,
        owner: current.Owner,
        noise: Noise,
        model: nn.Module,
        inputs: Any,
        *,
        swap: Swap | None = None,
        widths: Widths | None = None,
        spare: int = 0,
        exactly: Exactly | None = None,
        all_exactly: bool = False,
        start: Start | None = None,
        layers: dict[str, LayerRow] | None = None,
        advise: Advise | None = None,
    ) -> None:
        self.owner = owner
        self.rows: list[Row] = []
        self.not_made = 0
        self.sizes = Sizes()
        self.trace = Trace(self._after, self._instead)
        self._config = config
        self._model: nn.Module | None = model
        self._inputs = inputs
        self._output: Any = None
        self._held = Held(model, inputs)
        self._allowance = Allowance(spare)
        self._gathers = Gathers(self._keep_index)
        self._replacements = Replacements(
            self._gets_noise,
            lambda slot: scheme.keeps(slot) or self.keeps_exactly(slot.rpartition(".")[0]),
        )
        self._exactly = exactly or Exactly()
        self._all_exactly = all_exactly
        self._undecided = not self._exactly.decided
        self._start = start
        self._asks = False
        self._calls_of_root = 0
        self._encoder = Encoder(config, scheme, noise, swap, widths)
        self._deferred: list[Deferred] = []
        self._known = KnownContexts()
        self._ledger = Ledger()
        self._calls: Counter[str] = Counter()
        self._layers = layers
        self._advise = advise

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Compresses what autograd saves meanwhile; :attr:`rows` tell of it afterwards.

        A forward that runs inside goes through :meth:`run`, so that its output is known.
        """
        outer = current.current()
        with ExitStack() as closing:
            closing.callback(self._close)
            with ExitStack() as stack:
                stack.callback(current.set_current, outer)
                current.set_current(self)
                stack.enter_context(saved_tensors_hooks(self.pack, current.unpack))
                stack.enter_context(self.trace)
                yield
            self._settle()

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the forward that is captured. What it returns is kept by reference."""
        self._output = forward(*args, **kwargs)
        return self._output

    def _settle(self) -> None:
        """At the end of forward: what others hold by now is kept by reference, and counted.

        The model's outputs live on in the caller's hands and in the loss, and a layer may have
        cached a tensor for the next step, in itself or in its adjacency: a compressed copy beside
        them would only add memory.
        """
        assert self._model is not None
        held = storages_held_by(self._model, self._inputs)
        self._ledger.refer_to(held, storages_in(self._output))
        # A context that is gone belonged to a branch that led nowhere, or backward has run.
        self.rows = self._ledger.rows(held, self.sizes, count_dead=self._inputs is None)

    def _close(self) -> None:
        """Lets go of everything but what autograd holds."""
        self._model = self._inputs = self._output = None
        self._held.clear()
        self._deferred.clear()
        self._replacements.clear()
        self._allowance.clear()
        self._gathers.clear()
        self._ledger.clear()
        self._encoder.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The forward of the model runs, called from within, or in a loop that is captured."""
        self._calls_of_root += 1
        try:
            yield
        finally:
            self._calls_of_root -= 1

    @property
    def forward_runs(self) -> bool:
        """Whether what a backward gives now is for forward."""
        return bool(self._inputs is not None or self._calls_of_root or self.trace.inside_module)

    # What hooks and layers tell.

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A submodule starts."""
        if not self.trace.inside_module:
            self.own_leaves((args, kwargs))
        self.trace.enter(name)
        self._replacements.enter(name, module, args, kwargs)

    def own_leaves(self, inputs: Any) -> None:
        """Takes tensors that no operation of the graph made for inputs of the model."""
        if self._inputs is None:
            self._held.add(t for t in tensors_in(inputs) if t.grad_fn is None)

    def leaves_alone(self, nbytes: int) -> bool:
        """Whether a layer that would save so much is small beside what may be kept."""
        return self._allowance.covers(nbytes)

    def stock_makes(self, nbytes: int) -> None:
        """Counts what a layer of stock would hold at a time, and is not made."""
        self.not_made += nbytes

    @property
    def may_run_backward_twice(self) -> bool:
        """Whether the gradient may be differentiated once more, as one for forces often is."""
        return self._asked and (self._undecided or bool(self._exactly.slots[True]))

    @property
    def _asked(self) -> bool:
        """Whether a leaf that is no parameter needs a gradient by now."""
        self._asks = self._asks or self._held.an_input_needs_a_gradient
        return self._asks

    @property
    def _keeps_all_exactly(self) -> bool:
        return self._all_exactly or (self._undecided and self._asked)

    def keeps_exactly(self, name: str) -> bool:
        """Whether what an operation with this label, or a layer with this name, saves is exact."""
        return self._keeps_all_exactly or self._exactly.has(self._asked, name)

    def stock_saves(self, operation: Call, nbytes: int, tensors: dict[str, Tensor]) -> None:
        """Notes what stock autograd would save in edge work that runs in blocks.

        Args:
            operation: What stands for the edge work.
            nbytes: Of what is made in it.
            tensors: What it would save besides, by names.
        """
        label = self.trace.label(operation)
        self._ledger.add_of_stock(f"{label}.messages", nbytes)
        for name, tensor in tensors.items():
            self._ledger.add_of_stock(f"{label}.{name}", tensor.untyped_storage().nbytes(), tensor)

    def layer_ran(
        self, name: str, way: str, blocks: int | None, reason: str | None, counted: bool = True
    ) -> None:
        """Notes what became of edge work that is no method of a layer.

        Args:
            name: Its name. The report has it under the module that runs, with a number if that
                does it several times.
            way: As in :class:`LayerRow`, as the next two.
            blocks: How many.
            reason: Why it ran as stock.
            counted: Whether what stock autograd would save in it was noted.
        """
        full = f"{self.trace.module}/{name}" if self.trace.module else name
        self._calls[full] += 1
        slot = full if self._calls[full] == 1 else f"{full}#{self._calls[full]}"
        if self._layers is not None:
            self._layers[slot] = LayerRow(slot, way, blocks, reason, counted)

    def coding_of(self, module: str) -> current.Coding | None:
        """How a layer that runs again in backward quantizes what its blocks read."""
        return None if self.keeps_exactly(module) else self._encoder.coding_of(module)

    def _instead(self, call: Call) -> Callable[[], Any] | None:
        self._look_for_a_leaf(call.args)
        if self._start is not None and self._model is not None and call.name == "backward":
            self._start.backward_begins(self._model)
        return self._replacements.of(call, self.trace) if self._config.quantize else None

    def _gets_noise(self, call: Call, x: Tensor) -> bool:
        """Whether a tensor that this operation saves would be quantized."""
        kept = x in self._held or self._allowance.would_take(x) or _is_not_worth_it(x, call.name)
        gathered = not kept and self._gathers.find(x) is not None
        # The replacements have no second derivative.
        return not (kept or gathered or self._keeps_all_exactly)

    def _look_for_a_leaf(self, tensors: Iterable[Any]) -> None:
        if not self._asks and self._config.quantize:
            self._asks = any(map(needs_a_gradient, tensors))

    def _after(self, call: Call, result: Any) -> None:
        self._look_for_a_leaf((result, *call.args[:1]))
        if self._deferred:
            self._finish(call, result)
        if call.name in GATHERING and self._config.exact and torch.is_grad_enabled():
            self._gathers.see(call, result)

    # The way of a saved tensor.

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook: what autograd shall hold in place of ``tensor``.

        :func:`gact_graph.support.current.unpack` is the other one: so a graph holds no session.
        """
        saved = self._packed(plain_of(tensor))
        saved.advise = self._advise
        return saved

    def _packed(self, tensor: Tensor) -> Saved:
        call, constant = self.trace.call, not tensor.requires_grad
        if is_plain(tensor):
            tensor = tensor.detach()
            if tensor in self._held:
                return Saved(Context(Kept(tensor, call.label)))
        if call.running:
            deferred = Deferred.of(tensor, constant, call)
            self._deferred.append(deferred)
            return deferred.saved
        saver = self.trace.saver(call, call.position_of(tensor, None))
        return self._named(tensor, saver, constant, None)

    def _finish(self, call: Call, result: Any) -> None:
        """Saves what waited for the end of its operation."""
        waited, self._deferred = self._deferred, []
        attributes = attributes_of(result, call.since)
        for deferred in waited:
            if deferred.call is call:
                attribute = attributes.get(id(deferred.saved))
                saver = self.trace.saver(call, call.position_of(deferred.tensor, attribute))
                if deferred.changed:
                    self._count(deferred.tensor, saver, deferred.saved.context)
                else:
                    constant = deferred.constant
                    deferred.finish(self._named(deferred.tensor, saver, constant, attribute))
            elif deferred.call.running:  # a backward, of which this operation was a part
                self._deferred.append(deferred)
            # Else it raised, and nobody holds its graph.

    def _named(
        self, tensor: Tensor, saver: Saver, constant: bool, attribute: Attribute | None
    ) -> Saved:
        """Saves a tensor of which is known who saves it."""
        if not is_plain(tensor):
            context = Context(Kept(tensor, saver.slot))
            self._count(tensor, saver, context)
            return Saved(context)
        reads = reads_of(saver.call, saver.position, tensor, attribute)
        by_autograd = saver.position not in saver.call.only_here
        return self._save(_Save(tensor, saver, reads, constant, by_autograd))

    def _keep_index(self, call: Call, index: Tensor) -> Saved:
        """Saves the index of an operation that gathers."""
        self.trace.label(call)
        saver, constant = self.trace.saver(call, "index"), not index.requires_grad
        return self._save(_Save(index.detach(), saver, VALUES, constant, by_autograd=False))

    def _save(self, save: _Save) -> Saved:
        """What stands for a plain tensor: the context of its elements, known or new."""
        tensor = save.tensor
        if tensor in self._held:
            return Saved(Context(Kept(tensor, save.saver.slot)))
        if tensor.is_neg() and isinstance(save.reads, Side):
            # What lies in memory has the other sign, and is on another side of the bounds.
            save = save._replace(reads=EXACT)
        if self._allowance.takes(tensor):
            return self._keep(save)
        gathered = self._gathers.find(tensor)
        elements = elements_of(tensor, whole_storage=gathered is not None)
        if elements is None or _is_not_worth_it(tensor, save.saver.call.name):
            return self._keep(save)
        exactly = self._keeps_all_exactly or save.saver.slot in self._exactly.slots[self._asked]
        known = self._known.find(elements, save.reads)
        if known is None or (exactly and _is_lossy(known[0])):
            return self._encode(save, elements, gathered, exactly)
        context, entry = known
        if save.by_autograd:
            entry.count_as_saved()
        return Saved(context, elements.layout, save.saver.slot)

    def _encode(
        self, save: _Save, elements: Elements, gathered: Gathered | None, exactly: bool
    ) -> Saved:
        """Makes a context of elements that were not saved before."""
        memory_policy.coded(elements.flat)
        request = self._encoder.request(
            save.saver,
            save.reads,
            elements,
            gathered,
            lambda source: self._keep_source(source, save),
            exactly,
        )
        encoded = self._encoder.encode(request)
        if isinstance(encoded, Kept) and not elements.layout.dense:
            return self._keep(save)  # the elements are a copy
        context = self._encoder.context(request, encoded)
        self._watch(context, save.saver.slot, encoded.lossy)
        shared = self._shared(context, save)
        if shared is None:
            self._encoder.offload(context)
        else:
            context = shared
        entry = self._ledger.add(
            save.tensor,
            save.saver,
            context,
            elements,
            by_autograd=save.by_autograd,
            is_shared=shared is not None,
        )
        self._known.add(elements, save.reads, context, entry)
        return Saved(context, elements.layout, save.saver.slot)

    def _shared(self, context: Context, save: _Save) -> Context | None:
        """A context that is there already with the same content, for what needs no gradient."""
        return self._known.equal_to(context) if save.constant and self._config.exact else None

    def _keep_source(self, source: Tensor, save: _Save) -> Saved:
        """Saves the tensor that another one was gathered from."""
        saver = save.saver._replace(slot=f"{save.saver.slot}.source")
        constant = not source.requires_grad
        reads = reads_of_source(save.reads, source)
        return self._save(_Save(source.detach(), saver, reads, constant, by_autograd=False))

    def _keep(self, save: _Save) -> Saved:
        """A reference to the tensor, which counts with its whole storage."""
        context = Context(Kept(save.tensor, save.saver.slot))
        # In a larger batch it might be compressed.
        self._watch(context, save.saver.slot, lossy=False)
        self._ledger.add(save.tensor, save.saver, context, by_autograd=save.by_autograd)
        return Saved(context)

    def _watch(self, context: Context, slot: str, lossy: bool) -> None:
        """Has it known who reads a context."""
        if self._config.quantize:
            context.reading = Reading(self._exactly, slot, self._asked, lossy)

    def _count(self, tensor: Tensor, saver: Saver, context: Context) -> None:
        """Counts a reference to a tensor of any kind, which counts with its parts."""
        for part in parts_of(tensor):
            if part not in self._held:
                self._ledger.add(part, saver, context)


def _is_lossy(context: Context) -> bool:
    return context.reading is not None and context.reading.lossy


def _is_not_worth_it(tensor: Tensor, operation: str) -> bool:
    return tensor.untyped_storage().nbytes() < _SMALL or _is_loss(operation)


@functools.lru_cache(maxsize=4096)  # a library may make functions as it goes
def _is_loss(operation: str) -> bool:
    return any(loss in operation for loss in _LOSSES)

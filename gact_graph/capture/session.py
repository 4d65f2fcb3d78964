"""One forward under compression: each tensor that autograd saves is encoded once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn import MessagePassing

from gact_graph.capture import recipes
from gact_graph.capture.batch_norm import INPUT, batch_norm
from gact_graph.capture.cache import ContextCache
from gact_graph.capture.config import Config
from gact_graph.capture.derivatives import pointwise
from gact_graph.capture.dropout import dropout
from gact_graph.capture.in_place import backward_in_place
from gact_graph.capture.ledger import Ledger, Sizes
from gact_graph.capture.masks import JointMasks, mask_of
from gact_graph.capture.moments import Moments
from gact_graph.capture.nodes import Attribute, attributes_of
from gact_graph.capture.noise import Noise
from gact_graph.capture.operations import reads_of, reads_of_source
from gact_graph.capture.owned import Allowance, ExternallyOwned, owned_storages, storages_in
from gact_graph.capture.places import Places
from gact_graph.capture.postponed import PostponedProducts
from gact_graph.capture.recipes import EXPOSING, WRITERS, Recipes
from gact_graph.capture.running import RunningModules
from gact_graph.capture.shared_sums import SharedSums
from gact_graph.capture.sides import find_tests
from gact_graph.capture.trace import Call, Save, Trace
from gact_graph.capture.variance import POSITION as VARIANCE_POSITION
from gact_graph.capture.variance import Variance, variance_of
from gact_graph.codecs import Context, Encoded, Kept, Request, Saved, encode, nonzero
from gact_graph.codecs.compared import MeasuredWidths, in_two_widths
from gact_graph.codecs.mask import Mask, Masked
from gact_graph.codecs.offload.swap import Swap
from gact_graph.codecs.reads import EXACT, VALUES, Side
from gact_graph.codecs.rebuild import Rebuilt
from gact_graph.codecs.recipe import Recipe
from gact_graph.codecs.registry import asks_first
from gact_graph.layers.recompute.contexts import BITS
from gact_graph.ops.bernoulli import DropoutNoise
from gact_graph.support import current
from gact_graph.support.exact import ExactSlots, Reading, RestorePoint, needs_a_gradient
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.messages import Advise
from gact_graph.support.modes import has_outer_mode
from gact_graph.support.part import in_proportion
from gact_graph.support.rows import LayerRow, Row, numbered
from gact_graph.support.storage import (
    Elements,
    elements_of,
    is_plain,
    parts_of,
    plain_of,
    tensors_in,
    version_of,
)

# The tensors of a loss are small beside the model, and their error affects every gradient.
_LOSSES = ("loss", "cross_entropy", "kl_div")


class Bits(Protocol):
    """Bits by slot; :class:`gact_graph.adaptive.scheme.Scheme` decides them."""

    def bits_of(self, slot: str) -> float: ...

    def pinned(self, slot: str) -> int | None: ...


class RowWeights(Protocol):
    """Weights of rows by slot; :class:`gact_graph.adaptive.row_weights.RowWeights` finds them."""

    def of(self, slot: str, device: torch.device) -> Tensor | None: ...


class SparseProduct(Protocol):
    """See :class:`gact_graph.layers.blocks.sparse_product.SparseProduct`."""

    @property
    def x(self) -> Tensor: ...

    def run(self, product: current.Product | None) -> Tensor: ...


SparseProducts = Callable[
    [Callable[..., Any], Sequence[Any], Mapping[str, Any], Callable[[int], bool]],
    "SparseProduct | None",
]
"""Returns the product with a sparse matrix that an operation computes, if it is one, and if the
last argument, a function of the bytes of the dense matrix, accepts it."""


class Session:
    """Packs the tensors that autograd saves in one forward of one model, and counts their bytes.

    Args:
        config: The settings of the model.
        scheme: Bits by slot.
        owner: The owner that the hooks on the model's submodules carry.
        noise: Seeds by slot.
        model: The model. Its parameters, buffers and cached tensors are kept by reference.
        inputs: The arguments of forward, nested; they are kept by reference. None if they are
            unknown, as inside :func:`gact_graph.compress`: leaf tensors that are passed to an
            outermost submodule then count as inputs, and backward may run before the end.
        swap: Moves encoded contexts to host memory; None to leave them on their device.
        row_weights: The weights of the rows of each slot; None for equal ones.
        widths: Selects the decoded width of contexts that also have a finer one; None outside
            measurements.
        spare: The number of bytes to keep by reference before anything is encoded.
        exact_slots: The slots to keep exactly, which backward adds to.
        all_exact: Whether to keep all slots exactly.
        restore_point: The state to restore if forward runs again.
        places: The operations whose results need no memory of their own; None to give each result
            memory.
        sparse_products: Finds products with sparse matrices to run as sums over sorted edges; None
            to run them as PyTorch does.
        layers: The report's rows of layers, to which edge work outside of layers is added.
        advise: The advice for backward that runs out of memory.
        moments: Records the memory of the step; None to record nothing.

    Attributes:
        rows: The rows of the report, once forward has ended.
        unallocated: The bytes that layers of stock PyG would hold and that are never allocated: an
            estimate of messages, and the saved tensors of layers that run again in backward.
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
        swap: Swap | None,
        row_weights: RowWeights | None,
        widths: MeasuredWidths | None,
        spare: int,
        exact_slots: ExactSlots,
        all_exact: bool,
        restore_point: RestorePoint | None,
        places: Places | None,
        sparse_products: SparseProducts | None,
        layers: dict[str, LayerRow],
        advise: Advise | None,
        moments: Moments | None,
    ) -> None:
        self.owner = owner
        self.rows: list[Row] = []
        self.unallocated: int = 0
        self._sizes = Sizes()
        self.trace: Final = Trace(self._after, self._instead)
        self._config = config
        # Not a method of the session: contexts in two widths hold it.
        self._encoded = functools.partial(_encoded, config.exact, config.quantize)
        self._quantize = config.quantize
        self._may_reorder = config.quantize or places is not None  # numbers that backward adds up
        self._scheme = scheme
        self._noise = noise
        self._model: nn.Module | None = model
        self._inputs = inputs
        self._output: Any = None
        self._swap = swap
        self._row_weights = row_weights
        self._widths = widths
        self._owned = ExternallyOwned(model, inputs)
        self._allowance = Allowance(spare)
        self._recipes = Recipes(
            self._saved_already,
            self._owned.is_input,
            config.bits if config.quantize else 32,
            products=not config.keep_results,
        )
        self._joint_masks = JointMasks()
        self._running = RunningModules(owner)
        self._products = PostponedProducts(places, self._running, self._recipes.see)
        self._sums = SharedSums(places, self._running)
        self._sparse_products = sparse_products
        # The variance that the submodule that started last computes, if any, and its name.
        self._variance: Variance | None = None
        self._variance_module = ""
        self._exact_slots = exact_slots
        self._all_exact = all_exact
        self._undecided = not self._exact_slots.decided
        self._restore_point = restore_point
        self._leaf_seen = False
        self._calls_of_root = 0
        self._pending: list[Save] = []
        self._cache = ContextCache()
        self._ledger = Ledger(moments)
        self._calls: Counter[str] = Counter()
        self._layers = layers
        self._advise = advise

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Compress the tensors that autograd saves inside. :attr:`rows` is set afterwards.

        A forward inside runs through :meth:`run`, which records its output.
        """
        find_tests()
        # The trace is closed once more after its end, which a signal may interrupt.
        hooks = saved_tensors_hooks(self.pack, current.unpack)
        with closing(self), closing(self.trace):
            with current.captured_by(self), hooks, self.trace:
                yield
            self.settle()
            self._recipes.clear()
            # The caller and the loss hold the outputs, and a layer may have cached a tensor in
            # itself or its adjacency: a compressed copy beside them would only add memory.
            assert self._model is not None
            owned = owned_storages(self._model, self._inputs)
            self._ledger.refer_to(owned, storages_in(self._output))
            # A released context belonged to a branch that led nowhere, or backward has run.
            self.rows = self._ledger.rows(owned, self._sizes, count_dead=self._inputs is None)

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the captured forward. Its output is kept by reference."""
        self._output = forward(*args, **kwargs)
        return self._output

    def close(self) -> None:
        """Release everything except the tensors that autograd holds."""
        self.settle()
        self._running.clear()
        self._model = self._inputs = self._output = self._restore_point = None
        self._owned.clear()
        self._pending.clear()
        self._variance = None
        self._allowance.clear()
        self._recipes.clear()
        self._ledger.clear()
        if self._swap is not None:
            self._swap.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark that the model's forward runs, nested or in a captured loop."""
        self._calls_of_root += 1
        try:
            yield
        finally:
            self._calls_of_root -= 1

    @property
    def forward_runs(self) -> bool:
        """Whether the result of a backward that runs now is used by forward."""
        return bool(self._inputs is not None or self._calls_of_root or self.trace.inside_module)

    # Reports of hooks and layers.

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Enter a submodule."""
        if not self.trace.inside_module:
            self.add_inputs((args, kwargs))
        self._joint_masks.settle()  # before the module makes nodes that the session does not see
        self.trace.enter(name)
        self._running.enter(module)
        self._variance = variance_of(module, args, kwargs) if self._quantize else None
        self._variance_module = name

    def leave(self, name: str, module: nn.Module) -> None:
        """Leave a submodule. What a layer returns has values: all code may read it."""
        self.trace.leave(name)
        self._running.leave(module)
        if name == self._variance_module:
            self._variance = None
        if isinstance(module, MessagePassing):
            self._sums.settle()
            self._products.settle()

    def add_sizes(self, edge_index: Any, size: Any) -> None:
        """Record the numbers of nodes and edges of a message passing layer."""
        self._sizes.add(edge_index, size)

    def add_inputs(self, inputs: Any) -> None:
        """Add tensors without a graph to the model's inputs, if these are unknown."""
        if self._inputs is None:
            self._owned.add(t for t in tensors_in(inputs) if t.grad_fn is None)

    def is_input(self, tensor: Tensor) -> bool:
        """Return whether a tensor belongs to the caller alone."""
        return self._owned.is_input(tensor)

    def add_owned(self, tensor: Tensor) -> None:
        """Add a tensor to which references take no memory."""
        self._owned.add([tensor])

    def is_too_small(self, nbytes: int) -> bool:
        """Return whether a layer that would save this number of bytes is too small to compress."""
        return self._allowance.covers(nbytes)

    def count_unallocated(self, nbytes: int) -> None:
        """Count bytes that a layer of stock PyG would hold and that are not allocated here."""
        self.unallocated += nbytes

    @property
    def expects_double_backward(self) -> bool:
        """Whether the gradient may be differentiated again, as it often is for forces."""
        return self._has_leaf and (self._undecided or bool(self._exact_slots.slots[True]))

    @property
    def _has_leaf(self) -> bool:
        """Whether a leaf other than a parameter requires a gradient so far."""
        self._leaf_seen = self._leaf_seen or self._owned.input_requires_grad
        return self._leaf_seen

    @property
    def keeps_all_exact(self) -> bool:
        """Whether all tensors are kept exactly."""
        return self._all_exact or (self._undecided and self._has_leaf)

    def keeps_exactly(self, name: str) -> bool:
        """Return whether the operation or the layer with this name is kept exactly."""
        return self.keeps_all_exact or self._exact_slots.has(self._has_leaf, name)

    def settle(self, call: Call | None = None) -> None:
        """Compute the values that an operation may read, or without one any code, and join masks.

        Args:
            call: The operation.
        """
        self._sums.settle(call)
        self._products.settle(call, may_wait=self._sums.is_open)
        self._joint_masks.settle(call)

    def product_of(self, tensor: Tensor) -> current.Product | None:
        """Return the product that a tensor without memory stands for; None for another tensor."""
        return self._products.product_of(tensor)

    def has_summed(self, label: str, result: Tensor, again: Callable[[], Tensor]) -> None:
        """Report the result of edge work, and a function that computes the same again."""
        self._sums.has_summed(label, result, again)

    def count_baseline(self, operation: Call, nbytes: int, tensors: dict[str, Tensor]) -> None:
        """Count the tensors that stock autograd would save in edge work that runs in blocks.

        Args:
            operation: The call that stands for the edge work.
            nbytes: The bytes of the messages and other tensors that it would compute.
            tensors: The other tensors that it would save, by name.
        """
        label = self.trace.label(operation)
        self._ledger.add_baseline(f"{label}.messages", nbytes)
        for name, tensor in tensors.items():
            self._ledger.add_baseline(f"{label}.{name}", tensor.untyped_storage().nbytes(), tensor)

    def add_layer_row(
        self, name: str, way: str, blocks: int | None, reason: str | None, counted: bool = True
    ) -> None:
        """Add a row to the report for edge work outside of message passing layers.

        Args:
            name: The name of the edge work. The row has the path of the module that runs, and a
                number if the module does the work several times.
            way: See :class:`LayerRow`, also for the arguments below.
            blocks: The number of blocks.
            reason: The reason for running as stock.
            counted: Whether the tensors that stock autograd would save were counted.
        """
        full = f"{self.trace.module}/{name}" if self.trace.module else name
        slot = numbered(self._calls, full)
        self._layers[slot] = LayerRow(slot, way, blocks, reason, counted)

    def coding_of(self, module: str) -> current.Coding | None:
        """Return the coding of node tensors for a layer that runs again in backward, if any."""
        if not self._quantize or self.keeps_exactly(module):
            return None
        bits = max(BITS, math.ceil(self._config.bits))
        seed = self._noise.seed_of(f"{module}/again")
        return current.Coding(bits, self._config.group_size, seed)

    # Callbacks of the trace.

    def _instead(self, call: Call) -> Callable[[], Any] | None:
        if current.is_transformed():
            # An argument may be a tensor around one that has no memory.
            self._sums.settle()
            self._products.settle(call)
            return None
        followed = has_outer_mode()  # which would not see an operation in place of this one
        sums = None if followed else self._sums_of_rows(call)
        if sums is not None:
            return sums
        self.settle(call)
        self._look_for_leaf(call.args)
        if self._restore_point is not None and self._model is not None and call.name == "backward":
            self._restore_point.add_gradients(self._model)
        if followed or not current.packs_with(self.pack):
            return None  # in a checkpoint, which runs the same operations again without a session
        replacement = self._replacement(call) if self._quantize else None
        if replacement is not None or not self._config.exact:
            return replacement
        replacement = self._products.instead(call, self.trace.label) or self._sums.instead(call)
        if replacement is not None:
            return replacement
        return self._in_place(call) or dropout(call, self._saves_noise)

    def _in_place(self, call: Call) -> Callable[[], Tensor] | None:
        """Return a function to run in place of an operation whose backward needs less memory."""
        norm = None if self._quantize or not self._may_reorder else batch_norm(call)
        if norm is not None:
            return functools.partial(norm.run, self.trace.label(call))
        return backward_in_place(call, self._may_reorder)

    def _sums_of_rows(self, call: Call) -> Callable[[], Tensor] | None:
        """Return a function to run in place of a product with a sparse matrix."""
        if self._sparse_products is None:
            return None
        found = self._sparse_products(call.func, call.args, call.kwargs, self._encodes)
        if found is None:
            return None
        product = self._products.product_of(found.x)
        if product is None:
            self.settle(call)
        label = self.trace.label(call)
        self._layers[label] = LayerRow(label, "blocks", 1, None)

        def run() -> Tensor:
            with self.trace.paused():
                return found.run(product)

        return run

    def _encodes(self, nbytes: int) -> bool:
        """Return whether a tensor of this size would be encoded if it were saved now."""
        # Inside a checkpoint, other hooks pack.
        return current.packs_with(self.pack) and not self._allowance.covers(nbytes)

    def _saves_noise(self, nbytes: int) -> bool:
        """Return whether the session saves the noise of a dropout, of this size, as bits."""
        return asks_first(Mask) and self._encodes(nbytes)

    def _replacement(self, call: Call) -> Callable[[], Any] | None:
        """Return a function to run in place of an operation whose argument is harmed by noise."""
        variance = self._variance
        if variance is not None and self._variance_module == self.trace.module:
            square_of_mean = variance.square_of_mean(call)
            if square_of_mean is not None:
                return square_of_mean
            replacement = variance.square(call)
        else:
            replacement = pointwise(call) or batch_norm(call)
        if replacement is None:
            return None
        x, position, run = replacement
        kept = x in self._owned or self._allowance.would_take(x) or _is_kept(x, call.name)
        recipe = self._recipes.find(x)
        # The mean that a variance subtracts gets noise where its messages get none.
        exact = recipe is not None and recipe.exact and position != VARIANCE_POSITION
        gathered = recipe is not None and recipe.gathers
        # Replacements have no second derivative.
        if kept or gathered or self.keeps_all_exact:
            return None
        label = self.trace.label(call)
        pinned = self._scheme.pinned(f"{label}.{position}")
        if call.of_loss or self.keeps_exactly(label) or pinned == 32 or (exact and pinned is None):
            return None
        if position == INPUT and self._scheme.bits_of(f"{label}.{position}") == 32:
            return None  # it saves no other tensor, so stock's own backward serves
        return functools.partial(run, label)

    def _look_for_leaf(self, tensors: Iterable[Any]) -> None:
        if not self._leaf_seen and self._quantize:
            self._leaf_seen = any(map(needs_a_gradient, tensors))

    def _after(self, call: Call, result: Any) -> None:
        if current.is_transformed():  # its tensors stay as they are, by reference
            self._pending = [save for save in self._pending if save.call is not call]
            return
        self._look_for_leaf((result, *call.args[:1]))
        self._sums.after(call, result)
        if self._pending:
            self._finish(call, result)
        if call.name in WRITERS and self._config.exact and torch.is_grad_enabled():
            self._recipes.see(call, result)
            self._joint_masks.see(call, result)
        elif call.func in EXPOSING:
            self._recipes.expose(call.args[0])

    # The path of a saved tensor.

    def pack(self, tensor: Tensor) -> Saved:
        """Return the object that autograd holds in place of ``tensor``: the pack hook.

        The unpack hook is :func:`gact_graph.support.current.unpack`, so that no graph holds a
        session.
        """
        saved = self._pack(plain_of(tensor))
        saved.advise = self._advise
        return saved

    def _pack(self, tensor: Tensor) -> Saved:
        save = Save(tensor, self.trace.call, tensor.requires_grad)
        if is_plain(tensor):
            if tensor.numel() >= in_proportion(nonzero.LEAST) and _is_older(tensor, save.call):
                save.mask = mask_of(tensor)
            is_owned = tensor in self._owned
            save.tensor = tensor = tensor.detach()
            if is_owned:
                return Saved(Context(Kept(tensor, save.call.label)))
        if not save.call.running:
            return self._name_and_save(save, None)
        # An operation may yet write to the tensor, as ``rrelu`` does to its noise; and only at its
        # end is there a node that names the tensor. Until then it is kept by reference.
        save.pending = Saved(Context(Kept(tensor, save.call.label)))
        save.version = version_of(tensor)
        self._pending.append(save)
        return save.pending

    def _finish(self, call: Call, result: Any) -> None:
        """Save the tensors that waited for the end of this operation."""
        pending, self._pending = self._pending, []
        attributes = attributes_of(result, call.since)
        for save in pending:
            if save.call is call:
                self._finish_save(save, attributes.get(id(save.pending)))
            elif save.call.running:  # a backward, of which this operation was a part
                self._pending.append(save)
            # Otherwise the operation raised, and its graph is gone.

    def _finish_save(self, save: Save, attribute: Attribute | None) -> None:
        pending = save.pending
        assert pending is not None
        if version_of(save.tensor) != save.version:
            # It was changed in place since: backward raises, as in stock autograd.
            self.trace.name(save, save.call.position_of(save.tensor, attribute))
            self._count(save, pending.context)
            return
        saved = self._name_and_save(save, attribute)
        pending.context, pending.layout, pending.slot = saved.context, saved.layout, saved.slot

    def _name_and_save(self, save: Save, attribute: Attribute | None) -> Saved:
        position = save.call.position_of(save.tensor, attribute)
        self.trace.name(save, position)
        if not is_plain(save.tensor):
            context = Context(Kept(save.tensor, save.slot))
            self._count(save, context)
            return Saved(context)
        save.reads = reads_of(save.call, position, save.tensor, attribute)
        save.by_autograd = position not in save.call.extra_saved
        noise = save.call.noise
        return self._save(save) if noise is None else self._save_noise(save, noise)

    def _save(self, save: Save, exactly: bool = False) -> Saved:
        """Save a dense tensor with a name: in a cached context of its elements, or a new one.

        Args:
            save: The tensor.
            exactly: Whether to keep it exactly, whatever its slot.
        """
        tensor = save.tensor
        if tensor in self._owned:
            return Saved(Context(Kept(tensor, save.slot)))
        if tensor.is_neg() and isinstance(save.reads, Side):
            # Elements in memory have the opposite sign, and lie on another side of the bounds.
            save.reads = EXACT
        if self._allowance.takes(tensor):
            return self._keep(save)
        recipe = self._recipes.find(tensor)
        elements = elements_of(tensor, whole_storage=recipe is not None)
        if elements is None or _is_kept(tensor, save.call.name):
            return self._keep(save)
        exactly |= self.keeps_all_exact or save.slot in self._exact_slots.slots[self._has_leaf]
        # A form from before memory was handed out may hold other values.
        exposed = self._recipes.is_exposed(tensor)
        cached = None if exposed else self._cache.find(elements, save.reads)
        if cached is None or (exactly and _is_lossy(cached[0])):
            return self._encode(save, elements, recipe, exactly)
        context, entry = cached
        if isinstance(context.sample, Rebuilt):
            context.sample.readers += 1
        if save.position in save.call.gathered:
            context.gather()
        if save.by_autograd:
            entry.count_as_saved()
        return Saved(context, elements.layout, save.slot)

    def _encode(
        self, save: Save, elements: Elements, recipe: Recipe | None, exactly: bool
    ) -> Saved:
        """Save elements in a new context."""
        memory_policy.coded(elements.flat)
        config = self._config
        # Losses of the user are exact, like those of PyTorch.
        quantize = self._quantize and not save.call.of_loss and not exactly
        bits = self._scheme.bits_of(save.slot) if quantize else 32
        if recipe is not None and not recipe.gathers:
            # Pinned bits are those of the tensor itself. A layer in blocks decodes rows of codes.
            by_rows = save.call.of_layer and bits < 32
            pinned = self._scheme.pinned(save.slot) is not None and not recipe.exact
            # A slot that is kept exactly is read twice, by the backward that keeps a graph and by
            # that of the graph: each would compute a product again.
            multiplied = exactly and recipe.products > 0
            recipe = None if by_rows or pinned or multiplied else recipe
        request = Request(
            tensor=elements.flat,
            slot=save.slot,
            operation=save.call.name,
            reads=save.reads,
            recipe=recipe,
            keep=self._sources_of(save, exactly),
            bits=bits,
            group_size=config.group_size,
            seed=self._noise.seed_of(save.slot),
            row_weights=self._row_weights_of(save),
            mask=save.mask,
        )
        encoded = self._encoded(request)
        if isinstance(encoded, Kept) and not elements.layout.dense:
            return self._keep(save)  # the elements are a copy
        context = None
        if self._widths is not None:
            context = in_two_widths(request, encoded, self._encoded, self._widths)
        if context is None:
            context = Context(encoded)
        self._watch(context, save.slot, encoded.lossy)
        constant = not save.requires_grad and config.exact
        shared = self._cache.equal_to(context) if constant else None
        if shared is not None:
            context = shared
        else:
            self._offload(context, save.slot)
        if save.position in save.call.gathered:
            context.gather()
        entry = self._ledger.add(save, context, elements, is_shared=shared is not None)
        self._cache.add(elements, save.reads, context, entry)
        return Saved(context, elements.layout, save.slot)

    def _save_noise(self, save: Save, noise: DropoutNoise) -> Saved:
        """Save the bits of a dropout's noise, for which the tensor is a placeholder."""
        elements = elements_of(save.tensor, whole_storage=False)
        assert elements is not None
        like = elements.flat.numel(), elements.flat.dtype
        context = Context(Masked(noise.words, *like, 0.0, noise.scale, exact=True))
        self._watch(context, save.slot, lossy=False)
        self._offload(context, save.slot)
        self._ledger.add(save, context, elements)
        return Saved(context, elements.layout, save.slot)

    def _offload(self, context: Context, slot: str) -> None:
        if self._swap is not None and self._config.swaps(slot):
            context.move(self._swap.leave)

    def _row_weights_of(self, save: Save) -> Tensor | None:
        """Return the weights of a tensor's rows, if the rows in memory are those of its slot."""
        tensor = save.tensor
        if self._row_weights is None or not tensor.dim():
            return None
        weights = self._row_weights.of(save.slot, tensor.device)
        fits = weights is not None and tensor.is_contiguous() and tensor.shape[:1] == weights.shape
        return weights if fits else None

    def _sources_of(self, save: Save, exactly: bool) -> Callable[[Tensor], Saved]:
        """Return a function that saves the sources and indices of a tensor that was gathered.

        Args:
            save: The tensor.
            exactly: Whether the tensor, and so its sources, are kept exactly. The slots of sources
                may be new: in an earlier call, the tensor itself may have been saved.
        """
        numbers = Counter[str]()

        def keep(source: Tensor) -> Saved:
            is_source = source.is_floating_point() or source.is_complex()
            name = "source" if is_source else "index"
            # As a copy if the model may update the tensor before backward, as a memory of nodes.
            values = source.clone() if self._owned.is_state(source) else source.detach()
            return self._save(
                Save(
                    values,
                    save.call,
                    source.requires_grad,
                    save.position,
                    f"{save.slot}.{numbered(numbers, name, '.')}",
                    save.of_edges,
                    reads_of_source(save.reads, source) if is_source else VALUES,
                    by_autograd=False,
                ),
                exactly,
            )

        return keep

    def _saved_already(self, tensor: Tensor) -> Saved | None:
        """Return an input of forward, or a tensor that an operation saved with its values."""
        if tensor in self._owned:
            # The model or its optimizer may change its own tensors before backward.
            is_input = self._owned.is_input(tensor)
            return Saved(Context(Kept(tensor, "an operand"))) if is_input else None
        if self._recipes.is_exposed(tensor):
            return None
        elements = elements_of(tensor, whole_storage=False)
        if elements is None:
            return None
        cached = self._cache.find(elements, VALUES)
        return None if cached is None else Saved(cached[0], elements.layout)

    def _keep(self, save: Save) -> Saved:
        """Save a reference to the tensor, which counts with its whole storage."""
        context = Context(Kept(save.tensor, save.slot))
        # In a larger batch it might be compressed.
        self._watch(context, save.slot, lossy=False)
        self._ledger.add(save, context)
        return Saved(context)

    def _watch(self, context: Context, slot: str, lossy: bool) -> None:
        """Record each decoding of a context, to find the slots that must be exact, or are read by
        two backwards."""
        context.reading = Reading(self._exact_slots, slot, self._has_leaf, lossy)

    def _count(self, save: Save, context: Context) -> None:
        """Count a reference to a tensor of any layout, by the dense tensors in it."""
        for part in parts_of(save.tensor):
            if part not in self._owned:
                self._ledger.add(dataclasses.replace(save, tensor=part), context)


def session_of(owner: current.Owner) -> Session | None:
    """Return the session that captures this owner's model on this thread, or None."""
    return cast("Session | None", current.session_of(owner))


def _encoded(exact: bool, quantize: bool, request: Request) -> Encoded:
    return encode(request, exact, quantize and request.bits < 32)


def _is_older(tensor: Tensor, call: Call) -> bool:
    """Return whether an operation before this one made the tensor."""
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() < call.since


def _is_lossy(context: Context) -> bool:
    return context.reading is not None and context.reading.lossy


def _is_kept(tensor: Tensor, operation: str) -> bool:
    """Return whether encoding is not worth it: the storage is small, or belongs to a loss."""
    return tensor.untyped_storage().nbytes() < recipes.SMALL or _is_loss(operation)


@functools.lru_cache(maxsize=4096)  # libraries may create functions at run time
def _is_loss(operation: str) -> bool:
    return any(loss in operation for loss in _LOSSES)

"""Forwards of compiled models: codes inside the compiled graphs.

AOTAutograd inlines saved-tensor hooks that are ``GraphModule``: it traces the pack hook into the
end of the forward graph and the unpack hook into the beginning of the backward graph, once for each
intermediate tensor that the partitioner saves. The hooks here decide by the backward graph what is
stored: one bit for an element of a mask, 32 for an index, and codes where
:mod:`gact_graph.capture.backward_graph` proves that noise is harmless.

Encoding and decoding run as operators, which a compiler does not look into. The former counts bytes
and takes the seed of its noise when it runs, so that each step has its own.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.capture.backward_graph import has_factor_by_column, is_index_in, reads_in
from gact_graph.capture.config import Config
from gact_graph.capture.noise import Noise
from gact_graph.capture.operations import NARROW
from gact_graph.capture.partition import partitioning
from gact_graph.capture.recipes import SMALL
from gact_graph.capture.uncompressed import Counted
from gact_graph.codecs import Context, Kept, Saved
from gact_graph.codecs.group_widths import widths_of_groups
from gact_graph.codecs.reads import Values
from gact_graph.codecs.slices import narrowed, statistics_of
from gact_graph.ops.batch_norm import restore_columns
from gact_graph.ops.bitmask import pack_bits, unpack_bits
from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import (
    DTYPES,
    Channels,
    Packed,
    Widths,
    decorrelated_weight,
    pack,
    pack_channels,
)
from gact_graph.support.graph import nodes_of
from gact_graph.support.rows import Row, numbered
from gact_graph.support.scopes import Scopes
from gact_graph.support.storage import tensors_in
from gact_graph.support.symbols import expected_bytes
from gact_graph.support.torch_private import FUNCTORCH, OptimizedModule, compiled_graphs

_LEAST_OF_NARROW = 16
"""Bits of rows of fewer than 16 elements: weights of edges, scores and shares of attention heads.
Backward subtracts large numbers that are computed from scores, and noise does not cancel with the
numbers."""

_SPARED = 1 / 256
"""The share of a graph's saved bytes up to which the smallest tensors are kept exactly: a mean over
all places, before the last layer of a transformer, added more noise than all other tensors."""

_BITS, _INDEX, _CODES, _TRANSPOSED, _CONSTANT = range(5)
"""The first item of a packed tensor."""

_running: Scopes[Running | None] = Scopes(None)


class Running:
    """One forward of a compiled model.

    Args:
        config: The settings.
        noise: Seeds by slot.

    Attributes:
        group_size: Elements of a group of codes.
        rows: Rows of the report, by slot.
        times: The number of times that each slot was stored.
    """

    def __init__(self, config: Config, noise: Noise) -> None:
        self.group_size: int = config.group_size
        self._config = config
        self.noise = noise
        self.rows: dict[str, Row] = {}
        self._exact: dict[fx.Graph, set[str]] = {}
        self.times: Counter[str] = Counter()

    def bits_of(self, x: Tensor, graph: fx.Graph, name: str) -> int:
        """Return the bits for an element of a saved tensor; 32 if it is kept.

        Args:
            x: The tensor.
            graph: The graph of the backward.
            name: The name of the tensor there.
        """
        if not self._config.quantize or x.dtype not in DTYPES:
            return 32
        reads = reads_in(graph, name)
        if not isinstance(reads, Values) or reads.relative:
            return 32
        least = _LEAST_OF_NARROW if _is_narrow(x) else 1
        return max(int(self._config.bits), reads.least_bits, least)

    def exact_in(self, backward: fx.Graph, forward: fx.Graph) -> set[str]:
        """Return the names of the tensors that are kept exactly, whatever backward reads of them.

        They are all that a graph saves if these take less than ``min_bytes``.
        """
        if backward not in self._exact:  # the graphs change while the hooks are inlined
            sizes = _sizes_of(forward, backward)
            total = sum(sizes.values())  # infinite if a size depends on values
            if total >= self._config.min_bytes:
                total = _SPARED * sum(filter(math.isfinite, sizes.values()))
            ascending = sorted(sizes, key=lambda name: sizes[name])
            ends = itertools.accumulate(sizes[name] for name in ascending)
            found = {name for name, end in zip(ascending, ends, strict=True) if end <= total}
            self._exact[backward] = found
        return self._exact[backward]

    def count(self, slot: str, codec: str, x: Tensor, stored: int, bits: int) -> None:
        """Count a tensor that is stored now."""
        role = {"mask": "mask", "index": "index"}.get(codec, "node")
        own = float(bits) if codec == "quantize" else None
        shape = tuple(x.shape)
        self.rows[slot] = Row(slot, role, codec, shape, x.numel(), own, x.nbytes, stored)


class CompiledForward:
    """The hooks of one compiled model.

    Args:
        config: The settings.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        # A compiled graph belongs to these two objects: others would compile again.
        self._hooks = _traced(_pack), _traced(_unpack)
        self._kept: dict[tuple[str, ...], int] = {}

    @contextlib.contextmanager
    def running(self, noise: Noise) -> Iterator[Running]:
        """Store the tensors that compiled graphs save inside in their small forms."""
        running = Running(self._config, noise)
        with _running.entered(running), partitioning(), saved_tensors_hooks(*self._hooks):
            yield running

    def end(
        self, running: Running, inputs: Any, repeated: bool, output: Any, model: nn.Module
    ) -> list[Row]:
        """Return the rows of a forward, with the bytes that its graphs keep exactly.

        Args:
            running: The forward.
            inputs: The arguments of forward, nested; they do not count.
            repeated: Whether the inputs were those of the last forward.
            output: The result of forward, nested.
            model: The model, whose tensors do not count.
        """
        rows, coded = [*running.rows.values()], (*running.rows,)
        if not repeated or coded not in self._kept:  # finding the tensors takes time
            stored = sum(row.stored_bytes for row in rows)
            held = _held_by_graphs(output, inputs).raw_bytes(model, 0)
            self._kept[coded] = max(0, held - stored)
        kept = self._kept[coded]
        return [*rows, Row("graphs", "other", "keep", (), 0, None, kept, kept)] if kept else rows


def _held_by_graphs(output: Any, inputs: Any) -> Counted:
    """Return the tensors that the compiled graphs of an output save for backward."""
    held = Counted(inputs)
    node: Any
    for node in nodes_of(tensors_in(output)):
        kind = getattr(node, "_forward_cls", None)
        if kind is not None and kind.__module__.startswith(FUNCTORCH):
            for tensor in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())):
                held.pack(tensor)
    return held


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of ``torch.compile``."""
    return isinstance(module, OptimizedModule)


def is_running() -> bool:
    """Return whether this thread runs the forward of a compiled model."""
    return _running.value is not None


def _traced(function: Any) -> fx.GraphModule:
    """Return a module that calls a function of one argument, as hooks must have it."""
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("saved"),)))
    return fx.GraphModule(nn.Module(), graph)


def _pack(saved: Tensor) -> Any:
    """Return the outputs of the forward graph for a saved tensor, which the backward graph reads.

    The tensor itself, or a tuple: a form, the bits, tensors, and the shape.
    """
    context, running = compiled_graphs(), _running.value
    if context is None and type(saved) in (Tensor, nn.Parameter):
        return Saved(Context(Kept(saved, "an operation between compiled graphs")))
    if context is None or running is None or expected_bytes(saved) <= SMALL:
        return saved
    node, graph = context["_node"], context["_bw_graph"]
    if node.name in running.exact_in(graph, context["_fw_graph"]):
        return saved
    if node.target is torch.ops.aten.full.default and isinstance(node.args[1], float | int):
        return _CONSTANT, float(node.args[1]), *saved.shape
    slot = _slot_of(node)
    if saved.dtype == torch.bool:
        return _BITS, 1, _save_bits(saved, slot), *saved.shape
    if saved.dtype == torch.int64 and is_index_in(graph, node.name):
        return _INDEX, 32, _save_index(saved, slot), *saved.shape
    bits = running.bits_of(saved, graph, node.name)
    if bits >= min(32, 8 * saved.element_size()):
        return saved
    form = _CODES
    if saved.dim() == 2 and not saved.is_contiguous() and saved.t().is_contiguous():
        # For a product. In memory, elements of a group belong to few rows.
        form, saved = _TRANSPOSED, saved.t()
    by_column = form == _CODES and saved.dim() == 2 and not _is_narrow(saved)
    by_column = by_column and has_factor_by_column(graph, node.name)
    codes = _save_codes(saved, bits, running.group_size, by_column, slot)
    return form, bits, *codes, *saved.shape


def _unpack(packed: Any) -> Tensor:
    """Return the saved tensor of a form that :func:`_pack` has returned."""
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, Saved):
        return packed.tensor()
    context, running = compiled_graphs(), _running.value
    assert context is not None and running is not None
    like = context["_node"].meta["val"]
    form, number, *rest = packed
    if form == _CONSTANT:
        return torch.full(rest, number, dtype=like.dtype, device=like.device)
    first, *rest = rest
    if form == _BITS:
        return unpack_bits(first, rest, 0.0, 1.0, torch.bool)
    if form == _INDEX:
        return first.long()
    x = _load_codes(first, *rest[:5], rest[5:], number, running.group_size, like.dtype)
    return x.t() if form == _TRANSPOSED else x


def _is_narrow(x: Tensor) -> bool:
    """Return whether a tensor has short rows, or is a vector, as of the weights of edges."""
    width = math.prod(x.shape[1:])
    return isinstance(width, int) and width < NARROW


def _sizes_of(forward: fx.Graph, backward: fx.Graph) -> dict[str, float]:
    """Return the bytes of the intermediate tensors that a forward graph saves for backward."""
    read = {node.name for node in backward.find_nodes(op="placeholder")}
    made = (node for node in forward.nodes if node.op == "call_function" and node.name in read)
    values = {node.name: node.meta.get("val") for node in made}
    return {name: expected_bytes(x) for name, x in values.items() if isinstance(x, Tensor)}


def _slot_of(node: fx.Node) -> str:
    """Return the name of a saved tensor: the module that made it, and its name in the graph."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([name for name, _ in stack.values()]), "")
    path = re.sub(r"^L\['\w+'\]\.?", "", path)  # dynamo's name of the model
    return f"{path}/{node.name}" if path else node.name


_library = torch.library.Library("gact_graph_compiled", "DEF")


def _operator(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that replaces a function by an operator, opaque to compilers.

    A :func:`torch.library.custom_op` is the same, and takes 75 us a call for its autograd rule.
    """

    def define(function: Callable[..., Any]) -> Any:
        name = _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.gact_graph_compiled, name)

    return define


@_operator("save_bits(Tensor x, str slot) -> Tensor")
def _save_bits(x: Tensor, slot: str) -> Tensor:
    words = pack_bits(x)
    _count(_named(slot), "mask", x, 1, words)
    return words


@torch.library.register_fake("gact_graph_compiled::save_bits")
def _(x: Tensor, slot: str) -> Tensor:
    return pack_bits(x)


@_operator("save_index(Tensor x, str slot) -> Tensor")
def _save_index(x: Tensor, slot: str) -> Tensor:
    index = x.to(torch.int32)
    _count(_named(slot), "index", x, 32, index)
    return index


@torch.library.register_fake("gact_graph_compiled::save_index")
def _(x: Tensor, slot: str) -> Tensor:
    return torch.empty_like(x, dtype=torch.int32)


@_operator(
    "save_codes(Tensor x, SymInt bits, SymInt group_size, bool by_column, str slot)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _save_codes(
    x: Tensor, bits: int, group_size: int, by_column: bool, slot: str
) -> tuple[Tensor, ...]:
    """Return codes, stats, widths of groups, the seed, a weight, and statistics of columns.

    The weight is that of the decorrelated decoding. The statistics are the mean and the deviation
    of each column, [2, C], if the codes are those of normalized columns; else [2, 0].

    Groups with NaN or Inf decode to NaN: the number of such groups is unknown to a compiler. So is
    the number of words, and the codes take the most that it may be.
    """
    x, slot = x.contiguous(), _named(slot)
    seed = 0 if _running.value is None else _running.value.noise.seed_of(slot)
    channels, columns = None, x.new_empty((2, 0), dtype=torch.float32)
    if by_column:
        mean, deviation, channels = statistics_of(x, (0,))
        columns = torch.cat([mean, deviation.float()])
    packed = _packed(x, bits, group_size, seed, channels)
    if packed is None:  # a column has NaN or Inf, and so have its statistics
        channels = None
        packed = _packed(x, bits, group_size, seed, None)
    assert packed is not None and packed.widths is not None and packed.stats is not None
    weight = decorrelated_weight(x, packed, channels)
    codes, widths = packed.codes, packed.widths.widths
    codes = F.pad(codes, (0, bits * -(-x.numel() // TILE) - len(codes)))
    _count(slot, "quantize", x, bits, codes, packed.stats, widths, columns)
    of_noise = x.new_full((1,), packed.seed or 0, dtype=torch.int64)
    return codes, packed.stats, widths, of_noise, weight, columns


def _packed(
    x: Tensor, bits: int, group_size: int, seed: int, channels: Channels | None
) -> Packed | None:
    widths = widths_of_groups(x, bits, group_size, channels=channels)
    if widths is None:
        count = -(-x.numel() // group_size)
        own = torch.full((count,), bits, dtype=torch.uint8, device=x.device)
        widths = Widths(own, bits * -(-x.numel() // TILE))
    if channels is None:
        return pack(x, bits, group_size=group_size, seed=seed, widths=widths)
    return pack_channels(x, channels, bits, group_size=group_size, seed=seed, widths=widths)


@torch.library.register_fake("gact_graph_compiled::save_codes")
def _(x: Tensor, bits: int, group_size: int, by_column: bool, slot: str) -> tuple[Tensor, ...]:
    codes, stats = torch.ops.gact_graph.pack(x, bits, group_size, 0)
    return (
        codes.flatten(),
        stats,
        x.new_empty(stats.size(0), dtype=torch.uint8),
        x.new_empty(1, dtype=torch.int64),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty((2, x.size(1) if by_column else 0), dtype=torch.float32),
    )


_PARTS = "Tensor codes, Tensor stats, Tensor widths, Tensor seed, Tensor weight, Tensor columns"


@_operator(
    f"load_codes({_PARTS}, SymInt[] shape, SymInt bits, SymInt group_size, ScalarType dtype)"
    " -> Tensor"
)
def _load_codes(
    codes: Tensor,
    stats: Tensor,
    widths: Tensor,
    seed: Tensor,
    weight: Tensor,
    columns: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the minimum-variance decoding."""
    size, of_codes = torch.Size(shape), torch.float32 if columns.numel() else dtype
    of_groups = Widths(widths, len(codes))
    if codes.device.type == "cpu":  # where the number of words is known
        of_groups = Widths.of(widths, size.numel(), group_size)
        codes = codes[: of_groups.words]
    packed = Packed(
        codes, stats, size, of_codes, bits, group_size, seed=int(seed), widths=of_groups
    )
    x = packed.unpack_min_variance(weight)
    if columns.numel():
        restore_columns(x, columns)
    return narrowed(x, dtype)


@torch.library.register_fake("gact_graph_compiled::load_codes")
def _(
    codes: Tensor,
    stats: Tensor,
    widths: Tensor,
    seed: Tensor,
    weight: Tensor,
    columns: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


def _named(slot: str) -> str:
    """Return the name of a slot in the forward that runs: graphs around a break may share it."""
    return slot if _running.value is None else numbered(_running.value.times, slot)


def _count(slot: str, codec: str, x: Tensor, bits: int, *stored: Tensor) -> None:
    if _running.value is not None:
        _running.value.count(slot, codec, x, sum(tensor.nbytes for tensor in stored), bits)

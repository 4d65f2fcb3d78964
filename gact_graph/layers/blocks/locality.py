"""The proof that edge work can be cut into blocks of destination nodes.

Each operation of a traced graph needs a rule under which a row of its result, at an edge or at a
destination, depends only on the same row of its arguments, on the edges of the same destination, or
on tensors that all blocks share. An operation without a rule is refused, and so is any use of the
number of edges or nodes other than in a shape.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx

from gact_graph.layers.blocks.arguments import CannotBlock
from gact_graph.layers.blocks.trace import NO_ROWS, Trace
from gact_graph.support.storage import storage_id
from gact_graph.support.torch_private import OpOverload, set_grad_enabled, tree_leaves

aten: Final = torch.ops.aten

Kind = Literal["edge", "node", "shared"]


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor.

    Attributes:
        kind: Whether the tensor has a row for each edge or for each destination, or is shared by
            all blocks.
        axis: The dimension of the rows; -1 for a shared tensor.
        index: Whether its values are the numbers of the destinations of edges, or repeat them.
        each: The number of rows for each edge or destination: a view may have several.
    """

    kind: Kind
    axis: int = -1
    index: bool = False
    each: int = 1


SHARED = Rows("shared")


def prove(trace: Trace, of_edges: bool) -> None:
    """Prove that blocks of destinations give the rows of the whole graph.

    Args:
        trace: The trace of the edge work.
        of_edges: Whether the result has a row for each edge, or for each destination.

    Raises:
        CannotBlock: There is no proof. The message names the operation.
    """
    if trace.guarded:
        raise CannotBlock("reads the number of edges or nodes in Python")
    proof = _Proof(trace)
    for node in trace.graph.nodes:
        proof.visit(node)
    result, *kept = proof.outputs
    if result != Rows("edge" if of_edges else "node", 0):
        raise CannotBlock(NO_ROWS)
    for name, rows in zip(trace.kept, kept, strict=True):
        if rows != Rows("edge", 0):
            raise CannotBlock(
                f"leaves something other than one row per edge in its attribute {name}"
            )


class _Proof:
    """The rows of each node's tensor, in the order of the graph."""

    def __init__(self, trace: Trace) -> None:
        self._rows: dict[fx.Node, Rows] = {}
        self._index = trace.placeholders["index"]
        self._edges, self._destinations = trace.symbol("num_edges"), trace.symbol("dim_size")
        self._inputs: set[int] = set()  # storages
        self.outputs: list[Rows] = []

    def visit(self, node: fx.Node) -> None:
        """Find the rows of one node's tensor."""
        value = node.meta.get("val")
        if node.op == "output":
            results: Any = node.args[0]
            self.outputs = [self._rows.get(result, SHARED) for result in results]
        elif isinstance(node.target, OpOverload):
            self._visit_operation(_Call(node, self._rows), value)
        elif node.op != "call_function" or node.target is operator.getitem:
            if isinstance(value, Tensor):
                self._rows[node] = self._by_shape(value, node is self._index)
                if node.op != "call_function":
                    self._inputs.add(storage_id(value))
        elif node.target is not set_grad_enabled and _tensors_in(value):
            raise CannotBlock(f"has no rule for {getattr(node.target, '__name__', node.target)}")

    def _visit_operation(self, call: _Call, value: Any) -> None:
        packet, name = call.packet, call.name
        if packet in (aten.sym_size, aten.sym_numel, aten.sym_stride):
            return
        if call.function._schema.is_mutable and packet is not aten.lift_fresh:
            target = call.tensors[0].meta["val"]
            # Dependencies take the first argument for the changed one.
            _, *others = call.function._schema.arguments
            if any(o.alias_info is not None and o.alias_info.is_write for o in others):
                raise CannotBlock(f"writes into another tensor than its first argument ({name})")
            if storage_id(target) in self._inputs:
                raise CannotBlock(f"changes a tensor that it was given ({name})")
        rows = [self._by_shape(result) for result in _tensors_in(value)]
        makes_rows = any(result.kind != "shared" for result in rows)
        takes_rows = any(argument.kind != "shared" for argument in call.rows)
        drawn = torch.Tag.nondeterministic_seeded in call.function.tags
        if drawn and any(result.kind == "shared" for result in rows):
            raise CannotBlock(f"draws random numbers that all edges share ({name})")
        if packet in _POSITIONS and (takes_rows or makes_rows):
            raise CannotBlock(f"reads the position of an edge ({name})")
        as_values = any(isinstance(call.argument(name), fx.Node) for name in ("fill_value", "s"))
        takes_sizes = packet in _TAKES_SIZES and not (packet in _FILLS and as_values)
        if call.numbers and not takes_sizes:
            raise CannotBlock(f"computes with the number of edges or nodes ({name})")
        if packet in _POSITIONS:
            pass
        elif takes_rows and packet not in _FILLS:
            self._check(call, rows)
        elif makes_rows and packet not in _FILLS | _SPREADS:
            raise CannotBlock(f"has no rule for {name}")
        if isinstance(value, Tensor):
            repeats = packet in _REPEATS and any(argument.index for argument in call.rows)
            self._rows[call.node] = replace(rows[0], index=True) if repeats else rows[0]

    def _check(self, call: _Call, results: list[Rows]) -> None:
        """Apply the rule of an operation of which at least one argument has rows."""
        packet, numbered = call.packet, any(argument.index for argument in call.rows)
        if numbered and packet not in _INDEXED and not _repeats(call):
            raise CannotBlock(f"computes with the numbers of destinations ({call.name})")
        kinds = {argument.kind for argument in call.rows} - {"shared"}
        if packet in _SCATTERS:
            holds = _scatters(call, results[0])
        elif packet in _INDEXED:
            holds = _indexes(call, results[0])
        elif len(kinds) > 1:
            holds = False
        elif packet in _MATMULS:
            holds = _multiplies(call, results[0])
        elif packet in _VIEWS:
            holds = _views(call, results[0])
        elif packet in _ALONG:
            holds = _works_along(call)
        elif packet in _BATCHED:
            holds = call.rows[0].axis == 0 and all(r.kind == "shared" for r in call.rows[1:])
            if packet in BATCH_NORMS and call.argument("training", call.argument("train", False)):
                holds = False
        elif torch.Tag.pointwise in call.function.tags or packet in _POINTWISE:
            holds = _is_pointwise(call, results)
        else:
            raise CannotBlock(f"has no rule for {call.name}")
        same_kind = packet not in _SAME_KIND or all(result.kind in kinds for result in results)
        if not holds or not same_kind:
            raise CannotBlock(_reason(call))

    def _by_shape(self, tensor: Tensor, index: bool = False) -> Rows:
        """Return the rows of a shape: a dimension is the number of edges, or a multiple of it."""
        rows = SHARED
        for axis, size in enumerate(tensor.shape):
            kind, each = self._kind_of(size)
            if kind is None:
                continue
            if rows is not SHARED:
                raise CannotBlock("makes a tensor with several dimensions of edges or nodes")
            rows = Rows(kind, axis, index, each)
        return rows

    def _kind_of(self, size: Any) -> tuple[Kind | None, int]:
        """Return what has a row of a dimension of this size, and the number of its rows."""
        if isinstance(size, int):
            return None, 1
        kinds: dict[Any, Kind] = {self._edges: "edge", self._destinations: "node"}
        for symbol, kind in kinds.items():
            each = size.node.expr / symbol
            if each.is_Integer:
                return kind, int(each)
        raise CannotBlock("makes a tensor with a row for each source, or of several kinds of rows")


class _Call:
    """The arguments of an operation.

    Attributes:
        node: The node.
        function: The operation.
        packet: The operation without its overload.
        name: Its name.
        tensors: The nodes of its tensor arguments.
        rows: The rows of its tensor arguments.
        numbers: The nodes of its arguments that are numbers of edges or nodes.
    """

    def __init__(self, node: fx.Node, rows: dict[fx.Node, Rows]) -> None:
        function: Any = node.target
        self.node, self.function, self.packet = node, function, function.overloadpacket
        self.name: str = self.packet.__name__
        self.tensors, self.rows, self.numbers = [], [], []
        for leaf in tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, fx.Node):
                if leaf in rows:
                    self.tensors.append(leaf)
                    self.rows.append(rows[leaf])
                elif not isinstance(leaf.meta.get("val"), (tuple, list)):
                    self.numbers.append(leaf)
        self._all_rows = rows

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operation's schema."""
        schema: Any = self.function._schema
        for position, declared in enumerate(schema.arguments):
            if declared.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                if name in self.node.kwargs:
                    return self.node.kwargs[name]
                return declared.default_value if declared.has_default_value() else default
        return default

    def rows_of(self, name: str) -> Rows:
        """Return the rows of a tensor argument."""
        return self.rows_at(self.argument(name))

    def rows_at(self, node: Any) -> Rows:
        """Return the rows of a node's tensor."""
        return self._all_rows.get(node, SHARED) if isinstance(node, fx.Node) else SHARED

    def value_of(self, name: str) -> Any:
        """Return the fake tensor of an argument."""
        node = self.argument(name)
        return node.meta["val"] if isinstance(node, fx.Node) else None

    def dims(self, dim: int, *names: str) -> set[int] | None:
        """Return the dimensions along which the operation works, of ``dim``; None for all."""
        for name in names:
            value = self.argument(name)
            if value is not None and value != []:
                listed = value if isinstance(value, (list, tuple)) else [value]
                return {d % dim if dim else 0 for d in listed}
        return None


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_pointwise(call: _Call, results: list[Rows]) -> bool:
    """Return whether rows are broadcast against rows: the same dimension from the last."""
    places = {
        call.tensors[i].meta["val"].dim() - rows.axis
        for i, rows in enumerate(call.rows)
        if rows.kind != "shared"
    }
    outputs = zip(_tensors_in(call.node.meta["val"]), results, strict=True)
    places |= {output.dim() - rows.axis for output, rows in outputs}
    return len(places) == 1


def _repeats(call: _Call) -> bool:
    """Return whether the result repeats the numbers of destinations, which are integers."""
    return (
        call.packet in _REPEATS
        and call.function is not aten.view.dtype  # reads their bytes as other numbers
        and call.node.meta["val"].dtype in (torch.int32, torch.int64)
    )


def _scatters(call: _Call, result: Rows) -> bool:
    """Return whether rows of edges are reduced at destinations, or rows change along others."""
    into, index = call.rows_of("self"), call.rows_of("index")
    source = call.rows_of("src" if call.argument("src") is not None else "source")
    dim = call.argument("dim") % call.value_of("self").dim()
    if dim != into.axis:
        if call.packet in _INDEX_ROWS or index.index:
            return False
        # Fewer rows of the index, or of the source, would be those of the first edges.
        is_number = not isinstance(call.argument("src"), fx.Node)
        return into.kind != "shared" and index == into and (is_number or source == into)
    return (
        into.kind == "node"
        and into.each == index.each == 1
        and index.index
        and source == Rows("edge", dim) == Rows("edge", result.axis)
    )


def _indexes(call: _Call, result: Rows) -> bool:
    """Return whether rows of nodes are read at destinations of edges, and shared rows anywhere."""
    packet = call.packet
    if any(rows.each > 1 for rows in call.rows):
        return False
    if packet is aten.index:
        indices = call.argument("indices")
        tables, positions = call.rows_of("self"), [i for i in indices if i is not None]
        dim = next(d for d, i in enumerate(indices) if i is not None)
        kinds = [call.rows_at(position) for position in positions]
        if tables.kind == "shared":
            return all(not rows.index for rows in kinds)
        if dim == tables.axis and len(positions) == 1:
            index = kinds[0]
            return tables.kind == "node" and index.index and result == Rows("edge", dim)
        # Positions along other dimensions, the same for all rows.
        return all(r.kind == "shared" for r in kinds) and tables.axis < dim and result == tables
    if packet is aten.embedding:
        if call.argument("scale_grad_by_freq", False) or call.argument("sparse", False):
            return False  # a block has other frequencies; and its gradient is a dense one
        return call.rows_of("weight").kind == "shared" and not call.rows_of("indices").index
    table, index = call.rows_of("self"), call.rows_of("index")
    dim = call.argument("dim") % max(1, call.value_of("self").dim())
    if table.kind == "shared":
        return packet is aten.index_select and not index.index and result.axis == dim
    if dim == table.axis:
        return table.kind == "node" and index.index and result == Rows("edge", dim)
    if packet is aten.gather:
        return not index.index and index == table and result == table
    return index.kind == "shared" and result == table


def _multiplies(call: _Call, result: Rows) -> bool:
    """Return whether no sum runs over rows."""
    if call.packet is aten.dot:
        return False
    name, other = _MATMULS[call.packet]
    left, right = call.rows_of(name), call.rows_of(other)
    bias = call.rows_of("self") if name != "self" else SHARED
    batched = call.packet in (aten.bmm, aten.baddbmm)
    contracted = (2, 1) if batched else (1, 0)
    if left.axis == contracted[0] or right.axis == contracted[1]:
        return False
    if left.kind != "shared" and right.kind != "shared":
        holds = batched and left.axis == right.axis == 0
    else:
        holds = not (batched and (left.axis == 0 or right.axis == 0))
    outputs = call.node.meta["val"].dim()
    if bias.kind != "shared":
        holds = holds and call.value_of("self").dim() - bias.axis == outputs - result.axis
    return holds and result.kind != "shared"


def _views(call: _Call, result: Rows) -> bool:
    """Return whether the rows of a view are those of its base."""
    base, tensor, value = call.rows[0], call.tensors[0].meta["val"], call.node.meta["val"]
    if call.packet in (aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias):
        return (
            result.kind == base.kind
            and _product(tensor.shape[: base.axis]) == _product(value.shape[: result.axis])
            and _product(tensor.shape[base.axis :]) == _product(value.shape[result.axis :])
        )
    if call.packet is aten.expand:
        return bool(value.dim() - result.axis == tensor.dim() - base.axis)
    if call.packet is aten.squeeze:
        # A block may have one row.
        dims = call.dims(tensor.dim(), "dim")
        return dims is not None and base.axis not in dims
    return True


def _product(sizes: Iterable[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * (size if isinstance(size, int) else size.node.expr)
    return product


def _works_along(call: _Call) -> bool:
    """Return whether the operation works along other dimensions than the rows."""
    pairs = zip(call.tensors, call.rows, strict=True)
    with_rows = [(node.meta["val"], rows) for node, rows in pairs if rows.kind != "shared"]
    (tensor, first), packet = with_rows[0], call.packet
    axis = first.axis
    if any(rows.axis != axis for _, rows in with_rows):
        return False
    if packet is aten.cat and len(with_rows) != len(call.rows):
        return False
    if packet is aten.slice and call.dims(tensor.dim(), "dim") == {axis}:
        # All rows, as in x[:, 0].
        value = call.node.meta["val"]
        return bool(_product([value.shape[axis]]) == _product([tensor.shape[axis]]))
    if packet is aten.constant_pad_nd:
        pads = call.argument("pad")
        return tensor.dim() - 1 - axis >= len(pads) // 2
    if packet in (aten.native_layer_norm, aten._fused_rms_norm):
        return axis < tensor.dim() - len(call.argument("normalized_shape"))
    if packet is aten.repeat:
        times = call.argument("repeats")
        return len(times) - tensor.dim() + axis >= 0 and (
            times[len(times) - tensor.dim() + axis] == 1
            and not any(rows.index for _, rows in with_rows)
        )
    if packet is aten.stack:
        return True
    along = call.dims(tensor.dim(), "dim", "dims", "dimension")
    return along is not None and axis not in along


def _reason(call: _Call) -> str:
    packet, name = call.packet, call.name
    if packet in _SCATTERS or packet in _INDEXED:
        return f"reads or writes rows of other nodes than the destination of an edge ({name})"
    if packet in _ALONG or packet in _MATMULS or packet in _BATCHED:
        return f"takes a statistic over all edges ({name})"
    return f"mixes rows of edges and nodes ({name})"


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))


_FILLS = _packets(
    "zeros ones full empty empty_strided scalar_tensor new_zeros new_ones new_full new_empty "
    "new_empty_strided rand randn zeros_like ones_like full_like empty_like rand_like randn_like"
)
"""Operations that read shapes alone: all rows are equal, or drawn at random."""

_SPREADS = _packets("expand repeat")
"""Operations that may make rows of a shared tensor."""

_POSITIONS = _packets("arange range linspace randperm nonzero eye tril triu")
"""Operations that number rows."""

_TAKES_SIZES = _FILLS | _SPREADS | _packets("view _unsafe_view reshape _reshape_alias slice")
"""Operations in which the number of edges or nodes is a part of a shape."""

_REPEATS = _packets(
    "view _unsafe_view reshape unsqueeze squeeze expand clone detach alias _to_copy contiguous "
    "slice _reshape_alias"
)
"""Operations whose result may repeat the numbers of destinations."""

_INDEX_ROWS = _packets("index_add index_add_ index_reduce index_reduce_")
_SCATTERS = _INDEX_ROWS | _packets("scatter_add scatter_add_ scatter_reduce scatter_reduce_")
_SCATTERS |= _packets("scatter scatter_")
_INDEXED = _SCATTERS | _packets("index_select index gather embedding")

_MATMULS = {
    aten.mm: ("self", "mat2"),
    aten.bmm: ("self", "mat2"),
    aten.mv: ("self", "vec"),
    aten.dot: ("self", "tensor"),
    aten.addmm: ("mat1", "mat2"),
    aten.baddbmm: ("batch1", "batch2"),
    aten.addmv: ("mat", "vec"),
}

_VIEWS = _packets(
    "view _unsafe_view reshape _reshape_alias expand permute transpose t unsqueeze squeeze alias "
    "detach view_as_real view_as_complex"
)

_ALONG = _packets(
    "sum mean amax amin max min any all prod var std var_mean std_mean norm linalg_vector_norm "
    "logsumexp argmax argmin nansum median nanmedian count_nonzero flip roll aminmax "
    "_softmax _log_softmax cumsum cumprod cummax cummin sort topk mode kthvalue select slice "
    "narrow split split_with_sizes unbind chunk cat stack glu constant_pad_nd native_layer_norm "
    "_fused_rms_norm repeat unfold select_scatter slice_scatter linalg_cross cross"
)

BATCH_NORMS = _packets(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm"
)
_BATCHED = BATCH_NORMS | _packets(
    "convolution _adaptive_avg_pool2d avg_pool2d max_pool2d_with_indices native_group_norm"
)
"""Operations whose first dimension is a batch of independent entries."""

_POINTWISE = _packets(
    "clone _to_copy copy_ copy fill_ fill zero_ lift_fresh_copy native_dropout bernoulli "
    "bernoulli_ uniform_ normal_ exponential_ rrelu_with_noise where masked_fill masked_fill_ "
    "_prelu_kernel contiguous log_sigmoid_forward complex real "
    # Tagged as pointwise since torch 2.12.
    "leaky_relu leaky_relu_ elu_ celu_ selu_ hardtanh_ hardsigmoid_"
)

_SAME_KIND = _ALONG | _VIEWS | _POINTWISE

"""Recipes of results: the operation and its operands, where backward can have these again.

An operand is again a result with a recipe, or a tensor that is owned, small or saved already. For
gathers it is the source, which is no larger than the rows; it and the index are saved when the
recipe is used.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.capture.derivatives import BOUNDED, UNBOUNDED
from gact_graph.capture.dropout import noise_of
from gact_graph.capture.nodes import saved_as
from gact_graph.capture.trace import Call
from gact_graph.codecs.base import Saved
from gact_graph.codecs.mask import Joint
from gact_graph.codecs.recipe import Constant, Leaf, Operand, Recipe, Source, View
from gact_graph.support.current import is_transformed
from gact_graph.support.modes import has_other_modes
from gact_graph.support.storage import (
    ALIGNMENT,
    copy_of,
    is_plain,
    key_of,
    plain_of,
    storage_id,
    version_of,
    whole_of,
)

SMALL = 8192
"""The bytes up to which a tensor is kept, and an operand copied: codes, statistics and bookkeeping
would save nothing."""

_OPERATIONS = 12
"""The most operations of a recipe: a residual network would compute all earlier layers again."""

_MULTIPLICATIONS = 1280
"""The most multiplications of a matrix product for each byte that is saved: 320 for an element of
2 bits. On two cores of a CPU, a product with 256 takes as long as to encode the result and to
decode it."""


EXPOSING: frozenset[Callable[..., Any]] = frozenset(
    {
        *(Tensor.data.__get__, Tensor.__cuda_array_interface__.__get__),  # type: ignore[attr-defined]
        *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
        *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),
    }
)
"""Functions through whose results a tensor can change without a new version."""


class _Record(NamedTuple):
    """The recipe of a tensor, for as long as its storage lives, and the tensor's kind."""

    key: StorageWeakRef
    recipe: Recipe
    version: int | None
    dtype: torch.dtype
    shape: torch.Size


class Recipes:
    """Records the recipe of each result for as long as the result's memory lives.

    Args:
        saved: A function that returns an input or a tensor that is saved already; else None.
        is_input: A function of a tensor: whether its memory is the caller's.
        bits: The average of bits per element of saved tensors; 32 if none is quantized.
        products: Whether matrix products are computed again.
    """

    def __init__(
        self,
        saved: Callable[[Tensor], Saved | None],
        is_input: Callable[[Tensor], bool],
        bits: float,
        products: bool,
    ) -> None:
        self._saved, self._is_input = saved, is_input
        self.bits = bits
        self.products = products
        # By the places of the results; an expired key shows that a result is gone.
        self._records: dict[int, _Record] = {}
        self._exposed: dict[int, StorageWeakRef] = {}

    def expose(self, tensor: Tensor) -> None:
        """Forget a tensor that may change from now on without a new version."""
        if not is_plain(tensor):
            return
        key = key_of(tensor)
        self._exposed[key.cdata] = key
        self._records = {
            place: record
            for place, record in self._records.items()
            if place != key.cdata
            and all(storage_id(t) != key.cdata for t in record.recipe.references())
        }

    def is_exposed(self, tensor: Tensor) -> bool:
        """Return whether a tensor may change without a new version."""
        return bool(self._exposed) and storage_id(tensor) in self._exposed

    def see(self, call: Call, result: Any) -> None:
        """Record the recipe of an operation's result, if it has one."""
        write = WRITERS.get(call.name)
        if write is None or not isinstance(result, Tensor) or not is_plain(result):
            return
        whole = result.untyped_storage().nbytes() == result.nbytes and result.is_contiguous()
        if not whole or result.is_conj() or result.is_neg() or self.is_exposed(result):
            return
        if result.nbytes <= SMALL and call.name not in GATHERING:
            return  # as an operand it is copied
        if has_other_modes():
            return
        recipe = write(self, call, result)
        if recipe is None or recipe.operations > _OPERATIONS:
            return
        self._forget()
        key, version = key_of(result), version_of(result)
        self._records[key.cdata] = _Record(key, recipe, version, result.dtype, result.shape)

    def find(self, tensor: Tensor) -> Recipe | None:
        """Return the recipe of a tensor's storage, unless it or an operand has changed since."""
        record = self._record(tensor)
        if record is None or record.version != version_of(tensor):
            return None
        return record.recipe if record.recipe.is_current() else None

    def _record(self, tensor: Tensor) -> _Record | None:
        if not self._records:
            return None
        self._forget()
        record = self._records.get(storage_id(tensor))
        return record if record is not None and record.dtype == tensor.dtype else None

    def _forget(self) -> None:
        for place in [place for place, (key, *_) in self._records.items() if key.expired()]:
            del self._records[place]

    def clear(self) -> None:
        """Remove all records."""
        self._records.clear()
        self._exposed.clear()

    # Operands.

    def operand(self, value: Any, result: Tensor, copied: int = 0) -> Operand | None:
        """Return a tensor as an operand, or None if backward cannot have it again.

        Args:
            value: The tensor.
            result: The result. If both share memory, the operation has changed it in place.
            copied: The bytes up to which a parameter is copied, if more than :data:`SMALL`.
        """
        if not isinstance(value, Tensor) or not is_plain(value):
            return None
        in_place = storage_id(value) == storage_id(result)
        leaf = None if in_place else self._leaf(value, copied)
        if leaf is not None and leaf.exact:
            return leaf
        record = self._record(value)
        if record is None or not record.recipe.is_current():
            return leaf
        version = version_of(value)
        before = version - 1 if in_place and version is not None else version
        recipe = record.recipe
        if record.version != before or (leaf is not None and not recipe.exact):
            return leaf
        lazy = value.is_conj() or value.is_neg()
        if value.shape == record.shape and value.is_contiguous() and not lazy:
            return recipe
        return View(recipe, whole_of(value)[1])

    def _leaf(self, value: Tensor, copied: int) -> Operand | None:
        """Return a tensor that is small, an input or saved already; None for another."""
        is_parameter = value.is_leaf and value.requires_grad
        if value.untyped_storage().nbytes() <= max(SMALL, copied * is_parameter):
            return Constant(copy_of(value))
        if is_parameter:
            return None  # an optimizer may change it before backward
        if self.is_unguarded(value):
            return None
        saved = self._saved(value.detach())
        return None if saved is None else Leaf(saved, self.may_change(value))

    def source(self, value: Tensor, lossy: bool) -> Source:
        """Return the source or the index of a gather; a lossy one may be quantized."""
        return Source(value.detach(), self.may_change(value), lossy, version_of(value))

    def may_change(self, value: Any) -> bool:
        """Return whether a tensor may be memory of the user, who may change it behind autograd."""
        return isinstance(value, Tensor) and (value.grad_fn is None or self._is_input(value))

    def is_unguarded(self, value: Any) -> bool:
        """Return whether a tensor may change unseen: exposed, and not checked as the user's are."""
        exposed = isinstance(value, Tensor) and self.is_exposed(value)
        return exposed and not self.may_change(value)


_Writer = Callable[[Recipes, Call, Tensor], Recipe | None]
_Linear = Callable[[Sequence[bool]], bool]


# Gathers.


def _gather(
    recipes: Recipes,
    result: Tensor,
    source: Any,
    index: Any,
    run: Callable[[Tensor, Tensor], Tensor] | None,
) -> Recipe | None:
    if run is None or not isinstance(source, Tensor) or not isinstance(index, Tensor):
        return None
    source, index = plain_of(source), plain_of(index)
    if not (is_plain(source) and is_plain(index)):
        return None
    if storage_id(source) == storage_id(result) or source.numel() > result.numel():
        return None
    if recipes.is_unguarded(source):
        return None
    operands = recipes.source(source, recipes.bits < 32), recipes.source(index, lossy=False)
    return Recipe(lambda x, i: run(x.value(), i.value()), operands, _any, gathers=True)


def _select(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    dim = call.argument(1, "dim")
    run = (lambda x, i: x.index_select(dim, i)) if isinstance(dim, int) else None
    source, index = call.argument(0, "input", "self"), call.argument(2, "index")
    return _gather(recipes, result, source, index, run)


def _item(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    """``source[..., index, ...]``: one tensor among slices that take all elements."""
    source, key = call.args
    key = key if isinstance(key, tuple) else (key,)
    tensors = [i for i, part in enumerate(key) if isinstance(part, Tensor)]
    if len(tensors) != 1:
        return None
    [at] = tensors
    before, after = key[:at], key[at + 1 :]
    if not all(map(_takes_all, (*before, *after))):
        return None

    def run(x: Tensor, i: Tensor) -> Tensor:
        return x.__getitem__((*before, i, *after))

    return _gather(recipes, result, source, key[at], run)


def _takes_all(part: Any) -> bool:
    return part is Ellipsis or (isinstance(part, slice) and part == slice(None))


def _repeat(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    """As in PyG's softmax over sorted edges."""
    source, repeats = call.argument(0, "input", "self"), call.argument(1, "repeats")
    dim = call.argument(2, "dim")
    if not isinstance(dim, int):
        return None
    size = result.size(dim)

    def run(x: Tensor, i: Tensor) -> Tensor:
        return x.repeat_interleave(i, dim, output_size=size)

    return _gather(recipes, result, source, repeats, run)


# Operations on elements.


def _any(inexact: Sequence[bool]) -> bool:
    return True


def _none(inexact: Sequence[bool]) -> bool:
    return False


def _at_most_one(inexact: Sequence[bool]) -> bool:
    return sum(inexact) <= 1


def _first(inexact: Sequence[bool]) -> bool:
    return not any(inexact[1:])


class _Place(NamedTuple):
    """The place of an operand among the arguments of an operation."""

    number: int


def _again(linear: _Linear, copied: int = 0) -> _Writer:
    """Return a writer of recipes that call the operation again, as it was called.

    Args:
        linear: See :class:`Recipe`.
        copied: See :meth:`Recipes.operand`.
    """

    def write(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
        if not _is_differentiated(call, result):
            return None
        operands: list[Operand] = []
        arguments = (*call.args, *call.kwargs.values())
        for value in _flat(arguments):
            if isinstance(value, Tensor):
                operand = recipes.operand(value, result, copied)
                if operand is None or storage_id(value) == storage_id(result):
                    return None
                operands.append(operand)
        places = map(_Place, itertools.count())
        template = _replaced(arguments, lambda v: next(places) if isinstance(v, Tensor) else v)
        function, names = call.func, tuple(call.kwargs)

        def run(*values: Operand) -> Tensor:
            def value_of(value: Any) -> Any:
                return values[value.number].value() if isinstance(value, _Place) else value

            filled = _replaced(template, value_of)
            split = len(filled) - len(names)
            again: Tensor = function(
                *filled[:split], **dict(zip(names, filled[split:], strict=True))
            )
            return again

        return Recipe(run, tuple(operands), linear)

    return write


def _quotient(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    """Linear in the dividend, unless it is rounded."""
    rounded = call.kwargs.get("rounding_mode") is not None
    return _again(_none if rounded else _first)(recipes, call, result)


def _flat(value: Any) -> Iterator[Any]:
    if not _is_nested(value):
        yield value
        return
    for item in value:
        yield from _flat(item)


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    if not _is_nested(value):
        return replace(value)
    return tuple(_replaced(item, replace) for item in value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and not isinstance(value, _Place)


def _is_differentiated(call: Call, result: Tensor) -> bool:
    """Return whether the operation made the result's node, as dropout does in training only."""
    # Autocast is not active in backward; other tracers follow the operations themselves.
    if result.grad_fn is None or torch.is_autocast_enabled(result.device.type) or is_transformed():
        return False
    return result.grad_fn._sequence_nr() >= call.since


def _relu(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    mask = saved_as(result, "Relu", "result")
    operand = recipes.operand(call.argument(0, "input", "self"), result)
    if mask is None or operand is None or not _is_differentiated(call, result):
        return None

    def run(x: Operand) -> Tensor:
        value = x.value()
        if x.exact:
            return value.relu()
        if isinstance(mask.context.sample, Joint):
            # Only a dropout reads it, whose noise has the zeros of both: but 0 times -inf is NaN.
            lowest = torch.finfo(value.dtype).min
            return value.clamp_(min=lowest) if isinstance(x, Recipe) else value.clamp(min=lowest)
        # With noise, the sign of x is that of forward.
        return torch.where(mask.tensor() > 0, value, 0)

    return Recipe(run, (operand,), _any)


def _leaky_relu(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    mask = saved_as(result, "LeakyRelu", "self")
    operand = recipes.operand(call.argument(0, "input", "self"), result)
    if mask is None or operand is None or not _is_differentiated(call, result):
        return None
    slope = result.grad_fn._saved_negative_slope  # type: ignore[union-attr]

    def run(x: Operand) -> Tensor:
        value = x.value()
        if x.exact:
            return F.leaky_relu(value, slope)
        return torch.where(mask.tensor() > 0, value, value * slope)

    return Recipe(run, (operand,), _any)


def _dropout(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    """On a CPU a product with saved noise; on CUDA with a saved mask and a number."""
    operand = recipes.operand(call.argument(0, "input", "self"), result)
    if operand is None or not _is_differentiated(call, result):
        return None
    noise = noise_of(result)
    if noise is not None:
        return Recipe(_product, (operand, Leaf(noise, may_change=False)), _at_most_one)
    mask = saved_as(result, "NativeDropout", "result1")
    if mask is None:
        return None
    kept = 1 - result.grad_fn._saved_p  # type: ignore[union-attr]
    if result.is_cuda and result.dtype != torch.float64:
        kept = float(numpy.float32(kept))  # as in the kernel of forward
    scale = 0.0 if kept == 0 else 1 / kept

    def run(x: Operand, m: Operand) -> Tensor:
        return torch.ops.aten.native_dropout_backward(x.value(), m.value(), scale)

    return Recipe(run, (operand, Leaf(mask, may_change=False)), _first)


def _product(x: Operand, y: Operand) -> Tensor:
    value = x.value()
    return value.mul_(y.value()) if isinstance(x, Recipe) else value * y.value()


# The argument that is the weight, followed by the bias.
_WEIGHTS_OF_BATCH_NORM = {F.batch_norm: 3, torch.batch_norm: 1}


def _batch_norm(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    """The statistics are recorded; on exact values the operation computes the same ones again."""
    x = saved_as(result, "NativeBatchNorm", "input")
    mean = saved_as(result, "NativeBatchNorm", "result1")
    deviation = saved_as(result, "NativeBatchNorm", "result2")
    if x is None or mean is None or deviation is None or not _is_differentiated(call, result):
        return None
    normed = call.argument(0, "input", "self")
    if recipes.is_unguarded(normed):
        return None
    node: Any = result.grad_fn
    first = _WEIGHTS_OF_BATCH_NORM.get(call.func)
    if first is None or not node._saved_training:
        return None
    eps = node._saved_eps
    arguments = [call.argument(first + i, name) for i, name in enumerate(("weight", "bias"))]
    weight, bias = (None if a is None else a.detach().clone() for a in arguments)

    def run(operand: Operand) -> Tensor:
        value = operand.value()
        if operand.exact:
            return torch.batch_norm(
                value, weight, bias, None, None, True, 0.0, eps, torch.backends.cudnn.enabled
            )
        scale = deviation.tensor() if weight is None else deviation.tensor() * weight
        shift = -mean.tensor() * scale if bias is None else bias - mean.tensor() * scale
        shape = [-1 if d == 1 else 1 for d in range(value.dim())]
        shift, scale = shift.view(shape), scale.view(shape)
        in_place = x.context.sample.makes_memory and value.is_contiguous()  # not expanded
        if in_place and scale.dtype == value.dtype:
            return torch.addcmul(shift, value, scale, out=value)
        return torch.addcmul(shift, value, scale).to(value.dtype)

    return Recipe(run, (Leaf(x, recipes.may_change(normed)),), _any)


def _layer_norm(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
    x = saved_as(result, "NativeLayerNorm", "input")
    mean = saved_as(result, "NativeLayerNorm", "result1")
    deviation = saved_as(result, "NativeLayerNorm", "result2")
    if x is None or mean is None or deviation is None or not _is_differentiated(call, result):
        return None
    normed = call.argument(0, "input", "self")
    if recipes.is_unguarded(normed):
        return None
    shape = call.argument(1, "normalized_shape")
    eps = call.argument(4, "eps", default=1e-5)
    arguments = [call.argument(i, n) for i, n in ((2, "weight"), (3, "bias"))]
    weight, bias = (None if a is None else a.detach().clone() for a in arguments)

    def run(operand: Operand) -> Tensor:
        value = operand.value()
        if operand.exact:
            return torch.layer_norm(value, shape, weight, bias, eps, torch.backends.cudnn.enabled)
        normalized = (value - mean.tensor()).mul_(deviation.tensor())
        scaled = normalized if weight is None else normalized.mul_(weight)
        return (scaled if bias is None else scaled.add_(bias)).to(value.dtype)

    return Recipe(run, (Leaf(x, recipes.may_change(normed)),), _any)


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and is_plain(value)


def _has_its_alignment(operand: Operand, value: Tensor) -> bool:
    """Return whether a product with the operand has the bits of forward; see :func:`copy_of`."""
    decoded = isinstance(operand, Leaf) and operand.exact and not operand.kept
    return not decoded or value.data_ptr() % ALIGNMENT == 0


def _matrix_product(first: int) -> _Writer:
    """Return a writer of products; the factors are the argument of this number and the next."""

    def linear(inexact: Sequence[bool]) -> bool:
        return not (inexact[first] and inexact[first + 1])

    def write(recipes: Recipes, call: Call, result: Tensor) -> Recipe | None:
        arguments = call.args[: first + 2]
        # Keywords may come in any order.
        if (
            not recipes.products
            or len(arguments) < first + 2
            or not all(map(_is_plain_tensor, arguments))
        ):
            return None
        factors = x, y = arguments[first:]
        folds = y.dim() <= 2 and x.is_contiguous()
        if max(x.dim(), y.dim()) > 2 and not folds and x.shape[:-2] != y.shape[:-2]:
            return None  # the kernel depends on the gradients that forward needed
        copies = sum(f.nbytes for f in factors if f.is_leaf and f.requires_grad)
        bits = min(recipes.bits, 8 * result.element_size())
        bytes_saved = result.numel() * bits / 8 - copies
        if result.numel() * factors[0].size(-1) > _MULTIPLICATIONS * bytes_saved:
            return None
        recipe = _again(linear, copied=copies)(recipes, call, result)
        if recipe is None or not all(map(_has_its_alignment, recipe.operands[first:], factors)):
            return None
        return dataclasses.replace(recipe, multiplies=True)

    return write


_SUMS = ("add", "radd", "sub", "rsub", "subtract", "neg", "negative", "cat", "concat", "stack")
_PRODUCTS = ("mul", "rmul", "multiply")
_MATRIX_PRODUCTS = ("linear", "matmul", "mm")
_QUOTIENTS = ("div", "truediv", "divide", "true_divide")
_CURVED = (
    *("relu6", "hardtanh", "clamp", "abs", "square", "sqrt", "rsqrt", "exp", "sigmoid", "tanh"),
    *BOUNDED,
    *UNBOUNDED,
)

GATHERING: dict[str, _Writer] = {
    "index_select": _select,
    "getitem": _item,
    "repeat_interleave": _repeat,
}

WRITERS: dict[str, _Writer] = {
    **GATHERING,
    **dict.fromkeys(_SUMS, _again(_any)),
    **dict.fromkeys(_PRODUCTS, _again(_at_most_one)),
    **dict.fromkeys(_QUOTIENTS, _quotient),
    # The mean of a curved function of noisy values is not its value: exact operands only.
    **dict.fromkeys(_CURVED, _again(_none)),
    **dict.fromkeys(_MATRIX_PRODUCTS, _matrix_product(0)),
    "addmm": _matrix_product(1),
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
}
"""The writers of recipes, by the names of operations."""

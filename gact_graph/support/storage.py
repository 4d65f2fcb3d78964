"""The identity of storages, and the position of a tensor in its storage.

A storage's address is reused once it is freed. A :class:`StorageWeakRef` holds the address without
holding the memory, so as a key it cannot be confused with a later storage.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.index import Index
from torch_geometric.typing import SparseTensor

from gact_graph.support.objects import MODULE_INTERNALS, attributes
from gact_graph.support.torch_private import neg_view

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)
_TENSORS = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided


# Not by `callable`, which holds for PyG's Data.
_NO_DATA = (nn.Module, weakref.ref, ModuleType)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers in strides, and is of no subclass but ``Parameter``."""
    return (
        type(tensor) in _TENSORS
        and tensor.layout is _STRIDED
        and not (tensor.is_nested or tensor.is_quantized)
    )


def plain_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside PyG's ``Index``, such as ``EdgeIndex[0]``; else the tensor."""
    return tensor.as_tensor() if isinstance(tensor, Index) else tensor


def physical_of(tensor: Tensor) -> Tensor:
    """Return the elements in memory, without the conjugation and negation of lazy views."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return neg_view(tensor) if tensor.is_neg() else tensor


def key_of(tensor: Tensor) -> StorageWeakRef:
    """Return the identity of a plain tensor's storage."""
    return StorageWeakRef(tensor.untyped_storage())


def storage_id(tensor: Tensor) -> int:
    """Return the ``cdata`` of :func:`key_of`, in a quarter of the time.

    It identifies the storage as long as the storage or its :func:`key_of` exists.
    """
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors in a tensor: itself, or the indices and values of a sparse tensor.

    The list is empty for other subclasses, and for a COO tensor that is not coalesced.
    """
    if is_plain(tensor):
        return [tensor]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout == torch.sparse_coo and tensor.is_coalesced():
        return [tensor.indices(), tensor.values()]
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists, dicts and objects such as PyG's ``Data``."""
    yield from _walk(value, set(), into_objects=True)


def tensors_held_by(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers, and tensors in plain attributes of a module and its submodules."""
    seen: set[int] = set()
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            yield from (tensor for tensor in own.values() if tensor is not None)
        for name, value in vars(part).items():
            kind: Any = type(value)
            if _may_hold(kind) and name not in MODULE_INTERNALS:
                yield from _walk(value, seen, into_objects=False)


@functools.lru_cache(maxsize=1024)  # libraries may create classes at run time
def _may_hold(kind: type) -> bool:
    """Return whether a value of this type may hold tensors, apart from objects' attributes."""
    return issubclass(kind, (Tensor, Mapping, tuple, list, set, frozenset, SparseTensor))


def _walk(value: Any, seen: set[int], into_objects: bool) -> Iterator[Tensor]:
    # A stack of its own: a list of linked objects may be longer than Python's.
    waiting = [(value, into_objects)]
    while waiting:
        value, into_objects = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        children: Collection[Any]
        if isinstance(value, Tensor):
            yield from parts_of(value)
            if type(value) in (Tensor, nn.Parameter):
                continue
            children = [vars(value)]  # subclasses such as EdgeIndex keep their memory in attributes
        elif isinstance(value, Mapping):
            children = [*value.values()]  # those of a weak dictionary can be read once
        elif isinstance(value, (tuple, list, set, frozenset)):
            children = value
        elif isinstance(value, _NO_DATA) or inspect.isroutine(value):
            children = ()
        elif into_objects or isinstance(value, SparseTensor):
            children, into_objects = attributes(value).values(), True
        else:
            children = ()
        seen.add(id(value))
        kinds: Any = map(type, children)
        pairs = zip(children, kinds, strict=True)
        holders = [child for child, kind in pairs if into_objects or _may_hold(kind)]
        waiting += [(child, into_objects) for child in reversed(holders)]


class Layout(NamedTuple):
    """The layout of a tensor over its span: its elements, each once, consecutive in memory.

    The span of a tensor with holes, such as a slice of columns, is a copy without holes. The span
    of a lazy conjugate or negative view is the memory below, which other views share.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dense: bool
    offset: int = 0
    conjugate: bool = False
    negative: bool = False

    def restore(self, flat: Tensor) -> Tensor:
        """Return the tensor with its own shape and strides from its decoded span [numel]."""
        if self.dense:
            offset = self.offset + flat.storage_offset()
            physical = flat.as_strided(self.shape, self.stride, offset)
        else:
            physical = torch.empty_strided(
                self.shape, self.stride, dtype=flat.dtype, device=flat.device
            ).copy_(flat.view(self.shape))
        if self.conjugate:
            physical = physical.conj()
        return neg_view(physical) if self.negative else physical


def span_of(tensor: Tensor) -> tuple[Tensor, Layout] | None:
    """Return the span of a tensor [numel], and the layout of the tensor over it.

    The span of a dense tensor is a view, also if the tensor is permuted or expanded; tensors over
    the same elements have equal spans, whatever their shapes. None if elements overlap otherwise,
    as in windows made by ``unfold``.
    """
    flags = {"conjugate": tensor.is_conj(), "negative": tensor.is_neg()}
    tensor = physical_of(tensor)
    if tensor.is_contiguous():
        flat = tensor.as_strided((tensor.numel(),), (1,))
        return flat, Layout(tensor.shape, tensor.stride(), dense=True, **flags)
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((stride, size) for stride, size in sizes if size > 1)
    extent, numel, dense = 1, 1, True
    for stride, size in dims:
        if stride == 0:
            continue
        if stride < extent:
            return None
        dense = dense and stride == numel
        extent = stride * (size - 1) + extent
        numel *= size
    if dense:
        flat = tensor.as_strided((numel,), (1,))
        return flat, Layout(tensor.shape, tensor.stride(), dense=True, **flags)
    if dims and dims[0][0] == 0:
        return None  # expanded and with holes: no operation saves such a tensor
    return tensor.reshape(-1), Layout(tensor.shape, tensor.stride(), dense=False, **flags)


def whole_of(tensor: Tensor) -> tuple[Tensor, Layout]:
    """Return all elements of a tensor's storage [numel], and the layout of the tensor over them."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    layout = Layout(
        tensor.shape,
        tensor.stride(),
        dense=True,
        offset=int(tensor.storage_offset()),
        conjugate=tensor.is_conj(),
        negative=tensor.is_neg(),
    )
    return physical_of(tensor).as_strided((numel,), (1,), 0), layout


ALIGNMENT = 64
"""The bytes at whose multiples torch allocates memory on a CPU."""


def copy_of(tensor: Tensor) -> Tensor:
    """Return a detached copy of a tensor with a small storage, with its strides and alignment.

    Kernels take other paths for other strides. A matrix product of memory that is aligned
    otherwise may even add in another order. So results of other copies may differ in the last bits.
    """
    flat, layout = whole_of(tensor.detach())
    start = flat.data_ptr() % ALIGNMENT // flat.element_size()
    return layout.restore(flat.new_empty(start + flat.numel())[start:].copy_(flat))


def version_of(tensor: Tensor) -> int | None:
    """Return autograd's counter of in-place changes; None for inference tensors."""
    return None if tensor.is_inference() else tensor._version


class Elements(NamedTuple):
    """The elements that a tensor shows, each once.

    Args:
        flat: The elements [numel]; a view if they are consecutive in memory, else a copy.
        layout: The layout of the tensor over them.
        offset: Their first index in the storage.
        identity: A key that is equal for two tensors that show the same elements at the same
            version, while the :func:`key_of` of their storage is held.
    """

    flat: Tensor
    layout: Layout
    offset: int
    identity: Hashable


def elements_of(tensor: Tensor, whole_storage: bool) -> Elements | None:
    """Return the elements of a tensor, or None if they overlap in a way that has no flat form.

    Args:
        tensor: The tensor.
        whole_storage: Whether to take all elements of its storage, shown or not.
    """
    span = whole_of(tensor) if whole_storage else span_of(tensor)
    if span is None:
        return None
    flat, layout = span
    offset = int((flat if layout.dense else tensor).storage_offset())
    # A copy without holes has the elements of its tensor in the order of its dimensions.
    order = None if layout.dense else (layout.shape, layout.stride)
    where = storage_id(tensor), offset, flat.numel(), order
    return Elements(flat, layout, offset, (where, version_of(tensor), tensor.dtype))

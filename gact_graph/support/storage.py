"""The identity of storages, and where a tensor lies in its storage.

A storage's address is reused once it is freed. A :class:`StorageWeakRef` holds the address without
holding the memory, so as a key it cannot be confused with a later storage.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.index import Index
from torch_geometric.typing import SparseTensor

_MODULE_FIELDS = frozenset(vars(nn.Module()))
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)
_TENSORS = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided


# Not `callable`: PyG's Data is.
_NO_DATA = (nn.Module, weakref.ref, ModuleType)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is a strided one, and not of a subclass other than ``Parameter``."""
    return type(tensor) in _TENSORS and tensor.layout is _STRIDED


def plain_of(tensor: Tensor) -> Tensor:
    """The plain tensor inside PyG's ``Index``, such as ``EdgeIndex[0]``; others as they are."""
    return tensor.as_tensor() if isinstance(tensor, Index) else tensor


def physical_of(tensor: Tensor) -> Tensor:
    """The elements as they lie in memory: without the conjugation and negation of lazy views."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def key_of(tensor: Tensor) -> StorageWeakRef:
    """The identity of a plain tensor's storage."""
    return StorageWeakRef(tensor.untyped_storage())


def place_of(tensor: Tensor) -> int:
    """The ``cdata`` of :func:`key_of`, in a quarter of the time.

    It is the storage's for as long as the storage lives or somebody holds its :func:`key_of`: who
    remembers places holds that, too.
    """
    place: int = tensor.untyped_storage()._cdata
    return place


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the memory of ``tensor``: of a sparse one, indices and values.

    Other subclasses, and a COO tensor that is not coalesced, give none: they cannot be asked.
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
    """Every tensor inside nested tuples, lists, dicts and objects (PyG's ``Data``, dataclasses)."""
    yield from _walk(value, set(), into_objects=True)


def tensors_held_by(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and what the module or a submodule caches in plain attributes."""
    seen: set[int] = set()
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            yield from (tensor for tensor in own.values() if tensor is not None)
        for name, value in vars(part).items():
            kind: Any = type(value)
            if _may_hold(kind) and name not in _MODULE_FIELDS:
                yield from _walk(value, seen, into_objects=False)


@functools.lru_cache(maxsize=1024)  # a library may make classes as it goes
def _may_hold(kind: type) -> bool:
    """Whether a value of this type may hold tensors, where objects are not looked into."""
    return issubclass(kind, (Tensor, Mapping, tuple, list, set, frozenset, SparseTensor))


def _walk(value: Any, seen: set[int], into_objects: bool) -> Iterator[Tensor]:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    if isinstance(value, Tensor):
        yield from parts_of(value)
        if type(value) not in (Tensor, nn.Parameter):
            # Subclasses such as EdgeIndex keep their memory in attributes.
            seen.add(id(value))
            yield from _walk(vars(value), seen, into_objects)
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Any = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        children = value
    elif isinstance(value, _NO_DATA) or inspect.isroutine(value):
        return
    elif into_objects or isinstance(value, SparseTensor):
        children, into_objects = _attributes(value), True
    else:
        return
    for child in children:
        kind: Any = type(child)
        if into_objects or _may_hold(kind):
            yield from _walk(child, seen, into_objects)


def _attributes(value: Any) -> list[Any]:
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name) for name in slots)]


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Layout(NamedTuple):
    """How a tensor lies over its span: the elements that it shows, consecutive in memory.

    A tensor with holes, such as a slice of columns, has a copy without holes for its span. The span
    of a lazy conjugate or negative view is the memory below it, which other views share.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dense: bool
    offset: int = 0
    conjugate: bool = False
    negative: bool = False

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor with its own shape and strides over the decoded span [numel]."""
        if self.dense:
            offset = self.offset + flat.storage_offset()
            physical = flat.as_strided(self.shape, self.stride, offset)
        else:
            physical = torch.empty_strided(
                self.shape, self.stride, dtype=flat.dtype, device=flat.device
            ).copy_(flat.view(self.shape))
        if self.conjugate:
            physical = physical.conj()
        return torch._neg_view(physical) if self.negative else physical


def span_of(tensor: Tensor) -> tuple[Tensor, Layout] | None:
    """The elements that the tensor shows, flat, each once, and its layout over them.

    Of a dense tensor (a permuted or expanded one too) the flat tensor is a view, and equal spans of
    one storage are equal whatever their shapes. None where elements overlap otherwise, as windows
    made by ``unfold`` do.
    """
    flags = {"conjugate": tensor.is_conj(), "negative": tensor.is_neg()}
    tensor = physical_of(tensor)
    if tensor.is_contiguous():  # as most are
        flat = tensor.as_strided((tensor.numel(),), (1,))
        return flat, Layout(tensor.shape, tensor.stride(), dense=True, **flags)
    sizes = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if stride > 0 and size > 1
    )
    extent, numel, dense = 1, 1, True
    for stride, size in sizes:
        if stride < extent:
            return None
        dense = dense and stride == numel
        extent = stride * (size - 1) + extent
        numel *= size
    if tensor.numel() == 0:
        numel = 0
    if dense:
        flat = tensor.as_strided((numel,), (1,))
        return flat, Layout(tensor.shape, tensor.stride(), dense=True, **flags)
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return None  # expanded and with holes: no operation saves such a thing as its own memory
    return tensor.reshape(-1), Layout(tensor.shape, tensor.stride(), dense=False, **flags)


def whole_of(tensor: Tensor) -> tuple[Tensor, Layout]:
    """All elements of the tensor's storage, flat, and the tensor's layout over them."""
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


def spread_of(flat: Tensor, count: int = 16) -> Tensor:
    """Up to ``count`` elements of a tensor [numel], evenly spread."""
    return flat[:: max(1, flat.numel() // count)][:count]


def sample_of(flat: Tensor, count: int = 16) -> tuple[Any, ...]:
    """The same as Python numbers: waits for the tensor's device."""
    return tuple(spread_of(flat, count).tolist())


def version_of(tensor: Tensor) -> int | None:
    """Autograd's counter of in-place changes; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version

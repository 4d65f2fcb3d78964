"""Which bytes of new tensors have a value: those that a kernel or an operation has written.

Tensors of ``empty`` and the like, made inside a method of the kernels, have none at first, nor have
the tensors that the method is to fill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

# Operations that access some rows alone.
_OF_SOME_ROWS = ("index", "index_put_")

# For each new storage, by its address: the storage, which lives as long so that no other has the
# address, and whether each byte is written.
_storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}


class Fault(AssertionError):
    """An error of a kernel, which may have no consequence on the CPU."""


def extent(x: Tensor) -> int:
    """Return the number of bytes from a tensor's first to its last."""
    if not x.numel():
        return 0
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def bytes_of(x: Tensor) -> Tensor | None:
    """Return whether each byte of a tensor is written; None if all are."""
    storage = x.untyped_storage().data_ptr()
    if storage not in _storages:
        return None
    first = x.data_ptr() - storage
    return _storages[storage][1][first : first + extent(x)]


class Watched:
    """The kernels, with a watch on the new tensors of each method.

    Args:
        kernels: Kernels with the emulator's launch.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kernels, name)
        schema = getattr(torch.ops.gact_graph, name).default._schema

        def run(*args: Any, **options: Any) -> Any:
            with _watch():
                for argument, value in zip(schema.arguments, args, strict=False):
                    if _is_output(argument):
                        _add(value)
                results = method(*args, **options)
                for result in results if isinstance(results, tuple) else (results,):
                    if result is not None:
                        _check(result, f"the result of {name}")
            return results

        return run


def _is_output(argument: torch.Argument) -> bool:
    """Return whether an operator overwrites a tensor; it may also change one in place."""
    filled = argument.name == "out" or argument.name.startswith("of_")
    return filled and argument.alias_info is not None and argument.alias_info.is_write


@contextmanager
def _watch() -> Iterator[None]:
    try:
        with _Operations():
            yield
    finally:
        _storages.clear()


class _Operations(TorchDispatchMode):
    """Follows what operations of torch, between kernels, do with new tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in _OF_SOME_ROWS and not name.startswith("new_") and not name.endswith("_like"):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if isinstance(value, Tensor):
                    _use(value, argument.alias_info, name)
        result = func(*args, **kwargs)
        if name in _EMPTY:
            _add(result)
        return result


def _use(x: Tensor, alias: Any, name: str) -> None:
    written = bytes_of(x)
    if written is None:
        return
    if alias is None:
        _check(x, f"an argument of {name}")
    elif alias.is_write:
        written.fill_(1)


def _check(x: Tensor, what: str) -> None:
    written = bytes_of(x)
    if written is not None and not written.all():
        first = int((written == 0).nonzero()[0])
        raise Fault(f"Expected a value in each byte of {what} (got none in byte {first})")


def _add(x: Tensor) -> None:
    storage = x.untyped_storage()
    if storage.data_ptr() not in _storages:
        written = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu")
        _storages[storage.data_ptr()] = storage, written

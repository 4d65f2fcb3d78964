"""The tensors that are alive at the peak of a step, and the operations that made them."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gact_graph.support.storage import is_plain

_SMALL = 1 << 20
"""Storages below a mebibyte are counted together."""


class Made(NamedTuple):
    """The origin of a storage.

    Attributes:
        phase: ``forward`` or ``backward``.
        place: The path of the module in forward, the name of the autograd node in backward.
        operation: The name of the operator.
    """

    phase: str
    place: str
    operation: str


_OTHERS = Made("", "", "smaller tensors")


class AtPeak(TorchDispatchMode):
    """A mode that records the storages alive at the peak of the last step inside it.

    Each storage is followed from the operation that makes it until it is freed. Those from before
    the first step, such as weights and inputs, do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._peak = 0
        self._at_peak: list[tuple[int, Made]] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Made]] = {}

    def __enter__(self) -> AtPeak:
        self._peak = 0
        return super().__enter__()

    def rows(self) -> list[dict[str, Any]]:
        """Return the storages by origin, the largest first: ``bytes``, ``count``, and the entries
        of :class:`Made`."""
        sizes, counts = Counter[Made](), Counter[Made]()
        for nbytes, made in self._at_peak:
            by = made if nbytes >= _SMALL else _OTHERS
            sizes[by] += nbytes
            counts[by] += 1
        return [
            {"bytes": nbytes, "count": counts[made], **made._asdict()}
            for made, nbytes in sizes.most_common()
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in _storages_of((args, kwargs))}
        for new in _storages_of(result):
            if new._cdata not in before:  # else a view
                self._add(new, func)
        # By their present sizes: a storage may have been resized.
        alive = [
            (storage.nbytes(), made)
            for ref, made in [*self._alive.values()]
            if (storage := ref()) is not None
        ]
        total = sum(nbytes for nbytes, _ in alive)
        if total > self._peak:
            self._peak, self._at_peak = total, alive
        return result

    def _add(self, storage: torch.UntypedStorage, func: Any) -> None:
        key = storage._cdata
        if key not in self._alive:
            # The Python object of a storage lives as long as the storage.
            self._alive[key] = weakref.ref(storage), self._made(func)
            weakref.finalize(storage, self._alive.pop, key)

    def _made(self, func: Any) -> Made:
        node = torch._C._current_autograd_node()
        if node is not None:
            return Made("backward", node.name(), str(func))
        return Made("forward", self._module(), str(func))

    def _module(self) -> str:
        """Return the path of the innermost module on the stack."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is nn.Module._call_impl.__code__:
                name = self._names.get(id(frame.f_locals["self"]))
                if name:
                    return name
        return ""


def _storages_of(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and is_plain(value) and not value.is_meta:
            yield value.untyped_storage()

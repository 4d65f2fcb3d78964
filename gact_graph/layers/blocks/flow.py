"""Where the values of a tensor go while a function runs, told by its operations.

The result of an operation depends on all that the operation was given, unless it uses no more than
a shape (``zeros_like``). So it is known, whatever the values are, whether a tensor that autograd
saves, or that Python code gets to see, depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gact_graph.support.graph import ends_of, nodes_before

_aten = torch.ops.aten

_OF_SHAPES = frozenset(
    {
        *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
        *(_aten.rand_like, _aten.randn_like, _aten.randint_like),
        *(_aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones),
        _aten.new_full,
    }
)
"""Operations that use only the shapes of their arguments."""

_ROWS_AT = frozenset({_aten.index, _aten.index_select, _aten.gather, _aten.embedding, _aten.take})
"""Operations that read some entries of a tensor at an index."""

_LEAVES_TORCH = frozenset(
    {
        *("numpy", "__array__", "tolist", "__dlpack__", "__cuda_array_interface__", "data_ptr"),
        *("storage", "_typed_storage", "untyped_storage", "__deepcopy__", "__reduce_ex__"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "share_memory_"),
    }
)
"""Functions that show a tensor's values or gradient to code outside of PyTorch's operations."""

_BUILT_IN = re.compile(r"\w+Backward\d+|AccumulateGrad")


class Flow:
    """Follows labelled values within :meth:`followed`.

    Labels are powers of two; a sum of them stands for a set. A tensor is known by its storage.

    Attributes:
        seen: Labels of values that Python code or a data-dependent operation got to see.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._labels: dict[int, int] = {}
        self._made: set[int] = set()
        self._storages: list[Any] = []  # held, so that no address is reused
        self._saved: list[int | None] = []
        self._depth = 0

    def label(self, tensor: Tensor, label: int) -> None:
        """Gives a label to all values in the tensor's storage."""
        storage = self._storage(tensor)
        if storage is None:
            self.seen |= label
        else:
            self._labels[storage] = self._labels.get(storage, 0) | label

    def of(self, tensor: Tensor) -> int:
        """The labels that the tensor's values depend on."""
        storage = self._storage(tensor)
        return -1 if storage is None else self._labels.get(storage, 0)

    @property
    def saved(self) -> int:
        """Labels of values that autograd saved."""
        found = 0
        for storage in self._saved:
            found |= -1 if storage is None else self._labels.get(storage, 0)
        return found

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follows what this thread does meanwhile."""
        with (
            saved_tensors_hooks(self._save, lambda tensor: tensor),
            _Operations(self),
            _Functions(self),
        ):
            yield

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved.append(self._storage(tensor))
        # Detached, because an operation that saves its own result would close a cycle.
        return tensor.detach()

    def _storage(self, tensor: Tensor) -> int | None:
        """Identifies a tensor's storage; None if it has none that can be told."""
        try:
            with torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None  # a sparse tensor, say
        self._storages.append(storage)
        return storage._cdata

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of torch, as its caller sees it."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _LEAVES_TORCH:
            self.seen |= self._labels_in(args, kwargs)
        self._depth += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._depth -= 1

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, as the device sees it."""
        given, tags, packet = self._labels_in(args, kwargs), func.tags, func.overloadpacket
        if packet is _aten.index:
            # The shape of its result depends on values only for masks.
            shaping = self._labels_in(
                [i for i in args[1] if i is not None and not _is_positions(i)]
            )
        else:
            shaping = given
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            self.seen |= shaping
        if self._depth == 0:  # scripted code, which may run other operations later
            self.seen |= given
        self._look(packet, args)
        result = func(*args, **kwargs)
        if packet in _OF_SHAPES:
            given = 0
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        written = [*outputs, *_written(func, args, kwargs)]
        if packet is _aten.native_dropout:
            written = outputs[:1]  # the other output is a mask that depends on the shape alone
        for tensor in written:
            storage = self._storage(tensor)
            if storage is None:
                self.seen |= given
            elif given:
                self._labels[storage] = self._labels.get(storage, 0) | given
        self._made |= {storage for t in outputs if (storage := self._storage(t)) is not None}
        return result

    def _look(self, packet: Any, args: Any) -> None:
        """Called before each operation."""

    def _labels_in(self, *values: Any) -> int:
        found = 0
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                found |= self.of(value)
        return found


class FlowOfBlocks(Flow):
    """Sees also whether a layer reads a tensor from elsewhere at the destinations of edges.

    A block counts its destinations from zero, so that would read the wrong rows.

    Attributes:
        rows_of_others: Whether the layer does.
    """

    DESTINATIONS = 1
    """The label of the indices of destinations."""

    PARTS = 2
    """The label of tensors of which each block gets its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_of_others = False

    def _look(self, packet: Any, args: Any) -> None:
        if packet in _ROWS_AT and self._labels_in(args[1:]) & self.DESTINATIONS:
            tensor = args[0]
            own = self._storage(tensor) in self._made or self.of(tensor) & self.PARTS
            self.rows_of_others |= not own


class _Functions(TorchFunctionMode):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._flow.call(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._flow.run(func, args, kwargs or {})


def is_followed(results: Iterable[Tensor]) -> bool:
    """Whether these results come of PyTorch's own functions, which save nothing past the hooks."""
    kinds = {type(node) for node in nodes_before(ends_of(results))}
    return all(k.__module__ == "builtins" and _BUILT_IN.fullmatch(k.__name__) for k in kinds)


def _is_positions(index: Any) -> bool:
    return not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found

"""The autograd nodes that save tensors: they name the operation and the argument.

A saved-tensor hook gets a tensor and nothing else. Once the operation has returned, the graph of
its result has a node for each differentiable step, and the node names each tensor that it saved as
PyTorch's derivative formulas do: ``AddmmBackward0`` holds ``mat1``. Nodes of in-place operations on
views, and of functions that extensions write in C++, show nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from torch import Tensor

_RAW = "_raw_saved_"


class Attribute(NamedTuple):
    """The place of a saved tensor in a node.

    Args:
        node: The node.
        operation: The operation that the node differentiates, as in ``derivatives.yaml`` but for
            leading underscores: ``native_batch_norm``. Empty for an autograd function in Python.
        name: The tensor's name in the formulas: ``self``, ``mat1``, ``result``. Tensors of a list
            have their index behind it: ``indices.0``.
    """

    node: Any
    operation: str
    name: str

    @property
    def is_square(self) -> bool:
        """Whether the operation multiplies a tensor by itself."""
        if self.operation != "mul":
            return False
        left, right = self.node.next_functions
        return bool(left == right)

    def setting(self, name: str) -> Any:
        """An argument of the operation that is no tensor."""
        return getattr(self.node, f"_saved_{name}")

    def holds(self, name: str) -> bool:
        """Whether the argument of this name is a tensor, which the node saved."""
        return hasattr(self.node, f"{_RAW}{name}")

    def learns(self, index: int) -> bool:
        """Whether the input at this index needs a gradient."""
        return self.node.next_functions[index][0] is not None

    def shape_of(self, index: int) -> tuple[int, ...]:
        """The shape of the input at this index, which needs a gradient."""
        node, output = self.node.next_functions[index]
        return tuple(node._input_metadata[output].shape)


def attributes_of(result: Any, since: int) -> dict[int, Attribute]:
    """The places of the tensors that an operation saved, by the ids of what holds them.

    Args:
        result: What the operation returned: a tensor, or several.
        since: The sequence number of the first node that the operation may have made.
    """
    results = result if isinstance(result, (tuple, list)) else (result,)
    waiting: list[Any] = [tensor.grad_fn for tensor in results if isinstance(tensor, Tensor)]
    places: dict[int, Attribute] = {}
    seen: set[Any] = set()
    for node in waiting:
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        operation, attributes = _attributes(node.__class__, node.name())
        for attribute, name in attributes:
            raw = getattr(node, attribute)
            if isinstance(raw, tuple):
                for i, saved in enumerate(raw):
                    places[id(saved.data)] = Attribute(node, operation, f"{name}.{i}")
            else:
                places[id(raw.data)] = Attribute(node, operation, name)
        waiting += [following for following, _ in node.next_functions]
    return places


@functools.lru_cache(maxsize=4096)  # a library may make functions as it goes
def _attributes(kind: Any, name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The operation of a kind of node, and the attributes with what it saved, with their names."""
    native = re.fullmatch(r"(\w+)Backward\d+", name)
    raw = [attribute for attribute in dir(kind) if attribute.startswith(_RAW)]
    attributes = tuple((attribute, attribute.removeprefix(_RAW)) for attribute in raw)
    return (_snake(native[1]) if native else "", attributes)


def _snake(name: str) -> str:
    """``NativeBatchNorm`` as ``native_batch_norm``, ``AvgPool2D`` as ``avg_pool2d``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\d)(?=[A-Z][a-z])", "_", name).lower()

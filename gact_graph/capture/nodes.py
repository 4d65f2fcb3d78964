"""The autograd nodes that save tensors: they name the operation and the argument.

A saved-tensor hook gets a tensor and nothing else. Once the operation has returned, the graph of
its result has a node for each differentiable step, which names each tensor that it saved as
PyTorch's derivative formulas do: ``AddmmBackward0`` holds ``mat1``. Nodes of in-place operations on
views, and of functions that extensions write in C++, show nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from torch import Tensor

from gact_graph.codecs import Saved
from gact_graph.support.graph import raw_names

_RAW = "_raw_saved_"


class Attribute(NamedTuple):
    """The attribute of a node that holds a saved tensor.

    Args:
        node: The node.
        operation: The operation that the node differentiates, as in ``derivatives.yaml`` except for
            leading underscores: ``native_batch_norm``. Empty for most autograd functions in Python.
        name: The tensor's name in the formulas: ``self``, ``mat1``, ``result``. Tensors of a list
            have their index appended: ``indices.0``.
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
        """Return an argument of the operation that is not a tensor."""
        return getattr(self.node, f"_saved_{name}")

    def holds(self, name: str) -> bool:
        """Return whether the argument of this name is a tensor, which the node saved."""
        return hasattr(self.node, f"{_RAW}{name}")

    def requires_grad(self, index: int) -> bool:
        """Return whether the input at this index requires a gradient."""
        return self.node.next_functions[index][0] is not None

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Return the shape of the input at this index, which requires a gradient.

        Of an expanded or repeated tensor, it is the shape before.
        """
        node, output = self.node.next_functions[index]
        repeats = node.name() in ("ExpandBackward0", "RepeatBackward0")
        sizes = node._saved_self_sym_sizes if repeats else node._input_metadata[output].shape
        return tuple(sizes)


def saved_as(result: Tensor, operation: str, name: str) -> Saved | None:
    """Return the tensor that the node of a result saved under a name, if the node is of a kind.

    Args:
        result: The result.
        operation: The kind of the node, without ``Backward0``.
        name: The name.
    """
    node: Any = result.grad_fn
    if node is None:
        return None
    stands_for, tensors = _stands_for(node)
    if stands_for == _snake(operation) and name in tensors:
        try:
            return held_by(node._raw_saved_tensors[tensors.index(name)])
        except RuntimeError:  # a backward has freed them
            return None
    if node.name().partition("Backward")[0] != operation:
        return None
    return held_by(getattr(node, _RAW + name, None))


def held_by(raw: Any) -> Saved | None:
    """Return the object that a node's saved variable holds, if a session packed it."""
    saved = getattr(raw, "data", None)
    return saved if type(saved) is Saved else None


def attributes_of(result: Any, since: int) -> dict[int, Attribute]:
    """Return the attributes of the tensors that an operation saved.

    Args:
        result: The result of the operation: a tensor, or several.
        since: The sequence number of the first node that the operation may have made.

    Returns:
        The attributes by the ids of the objects that the pack hook returned.
    """
    results = result if isinstance(result, (tuple, list)) else (result,)
    waiting: list[Any] = [tensor.grad_fn for tensor in results if isinstance(tensor, Tensor)]
    attributes: dict[int, Attribute] = {}
    seen: set[Any] = set()
    for node in waiting:
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        operation, names, tensors = _names(node.__class__, node.name())
        for name in names:
            raw = getattr(node, _RAW + name)
            if isinstance(raw, tuple):
                for i, saved in enumerate(raw):
                    item = tensors[i] if tensors else f"{name}.{i}"
                    attributes[id(saved.data)] = Attribute(node, operation, item)
            else:
                attributes[id(raw.data)] = Attribute(node, operation, name)
        waiting += [following for following, _ in node.next_functions]
    return attributes


@functools.lru_cache(maxsize=4096)  # libraries may create functions at run time
def _names(kind: Any, name: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the operation of a kind of node, and the names of the tensors that it saves.

    The third item has the names for an autograd function in Python with an attribute
    ``differentiates``: the operation that the function stands for, and its saved tensors.
    """
    native = re.fullmatch(r"(\w+)Backward\d+", name)
    names = tuple(a.removeprefix(_RAW) for a in raw_names(kind))
    operation, tensors = _stands_for(kind)
    return (_snake(native[1]) if native else operation, names, tensors)


def _stands_for(kind: Any) -> tuple[str, tuple[str, ...]]:
    """Return the operation for which a function in Python stands, and its saved tensors."""
    function = getattr(kind, "_forward_cls", None)
    found: tuple[str, tuple[str, ...]] = getattr(function, "differentiates", ("", ()))
    return found


def _snake(name: str) -> str:
    """``NativeBatchNorm`` as ``native_batch_norm``, ``AvgPool2D`` as ``avg_pool2d``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\d)(?=[A-Z][a-z])", "_", name).lower()

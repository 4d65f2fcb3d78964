"""Edge work while a compiler traces a model: one call of an operator, or as in PyG.

The layer is analyzed during the trace, and the operators run the analysis on the tensors of a step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gact_graph.layers.blocks.graph_operators import call
from gact_graph.layers.blocks.graph_work import GraphCall, GraphWork
from gact_graph.support.torch_private import (
    FunctionalTensor,
    compilation,
    is_exporting,
    nonstrict_trace,
)

_NONE = ""
"""Stands for None among the arguments of a function that a compiler does not look into."""

_GUARDED = bool | int | float | str | None

_layer_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()
_found: weakref.WeakKeyDictionary[Any, dict[str, set[bool]]] = weakref.WeakKeyDictionary()
"""Whether the calls of a layer run in blocks, by the graph that is traced and by the layer."""


class Layer:
    """The interface of the patch of a layer, which a compiler traces.

    Args:
        module: The module whose code is the edge work; None if there is none.

    Attributes:
        key: The name of the patch in compiled graphs.
        settings: The names of the attributes of each submodule that were plain, or None, when the
            model was wrapped. A compiler traces the layer again when one of them changes; it does
            not notice attributes that are new since.
        works: The edge work that compiled graphs call, by name.
        kept: The attributes in which the last traced call leaves tensors.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.settings: list[list[str]] = [
            [name for name, value in vars(sub).items() if isinstance(value, _GUARDED)]
            for sub in ([] if module is None else module.modules())
        ]
        self.works: dict[str, GraphWork] = {}
        self.kept: tuple[str, ...] = ()
        self.register()

    def register(self) -> None:
        """Give the patch, which may be a copy, a name of its own."""
        self.key: str = f"layer {next(_layer_numbers)}"
        _layers[self.key] = self

    def graph_call(
        self,
        constants: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        again: bool,
    ) -> GraphCall | None:
        """Return a call while a compiler traces it; None if it runs as in PyG.

        Args:
            constants: The parameters and buffers of the module, as the compiler traces them.
            args: The arguments of the method.
            kwargs: The keyword arguments of the method.
            again: Whether the call is known to be worth running in blocks.
        """
        raise NotImplementedError


def in_graph(
    layer: Layer, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the result of edge work while a compiler traces it; None if it runs as in PyG.

    The compiler looks into this function.
    """
    if is_exporting():
        return None
    given = {str(number): value for number, value in enumerate(args)} | {**kwargs}
    if not all(_is_plain(value) for value in given.values()):
        return None
    given = {name: _without_none(value) for name, value in given.items()}
    settings = [
        _setting(getattr(sub, name, None))
        for sub, names in zip(module.modules(), layer.settings, strict=False)
        for name in names
    ]
    constants = [*module.parameters(), *module.buffers()]
    results = _traced(layer.key, given, len(args), constants, settings)
    if not results:
        return None
    for name, tensor in zip(layer.kept, results[1:], strict=True):
        setattr(module, name, tensor)
    return results[0]


def _setting(value: Any) -> Any:
    # A compiler guards the type of any other value, too: what a layer leaves in an attribute that
    # was None compiles it again.
    return value if isinstance(value, (bool, int, float, str)) else _NONE


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    plain = value is None or isinstance(value, (bool, int, float, str))
    return plain or type(value) in (Tensor, nn.Parameter)


def _without_none(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_without_none(item) for item in value)
    return _NONE if value is None else value


def _with_none(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_with_none, value))
    return None if isinstance(value, str) and value == _NONE else value


@nonstrict_trace
def _traced(
    key: str, given: dict[str, Any], positional: int, constants: list[Tensor], settings: list[Any]
) -> list[Tensor]:
    """Return the outputs of edge work, or nothing if it runs as in PyG.

    A compiler runs this function with tensors that have no values, and records the operators. It
    traces again when one of the ``settings`` changes. AOTAutograd runs the function again, perhaps
    with less knowledge of sizes, and must get what the compiler got.
    """
    values = {name: _with_none(value) for name, value in given.items()}
    args = [values.pop(str(number)) for number in range(positional)]
    layer = _layers[key]
    graph = compilation()
    found = set[bool]() if graph is None else _found.setdefault(graph, {}).setdefault(key, set())
    again = any(isinstance(tensor, FunctionalTensor) for tensor in (*constants, *values.values()))
    if again and found == {False}:
        return []
    traced = layer.graph_call(constants, args, values, again)
    found.add(traced is not None)
    if traced is None:
        return []
    name = f"{key}: {traced.work.key()}"
    layer.works[name] = traced.work
    layer.kept = traced.work.analysis.kept
    return [*call(name, traced)]

"""The analyses of edge functions, each made once for all layers in the same state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.analysis import LayerAnalysis, analyse
from gact_graph.layers.blocks.arguments import Arguments, CannotBlock
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.support.reach import Reach, Unknowable

_MOST = 512
"""Analyses that are remembered."""

_CHANGES = 16
"""New states in a row after which a layer is taken for one that changes at every call."""

_known: OrderedDict[Hashable, LayerAnalysis | str] = OrderedDict()


class Analyses:
    """The analyses of one layer's edge function, or of one function of the user's.

    Layers of one class with equal settings, and with tensors of equal shapes, share them.

    Args:
        edge_function: The function that runs for each block.
        methods: The methods of the layer that it calls.
    """

    def __init__(self, edge_function: EdgeFunction, methods: frozenset[str]) -> None:
        self._edge_function, self._methods = edge_function, methods
        self._new_in_a_row = 0
        self._last: Hashable = None

    def of(
        self, module: Any, arguments: Arguments
    ) -> tuple[LayerAnalysis, list[tuple[str, Tensor]]]:
        """The analysis for a call, and the tensors that it reads beside its arguments, by path.

        Raises:
            CannotBlock: The call cannot run in blocks.
        """
        try:
            reach = Reach([module, *arguments.others.values()], self._methods)
        except Unknowable as reason:
            raise CannotBlock(str(reason)) from reason
        key = self._edge_function, _described(arguments), reach.key
        known = _known.get(key)
        if known is None:
            known = self._find(key, module, arguments, reach)
        else:
            self._new_in_a_row = 0
        if isinstance(known, str):
            raise CannotBlock(known)
        return known, [reach.tensors[number] for number in known.constants]

    def _find(
        self, key: Hashable, module: Any, arguments: Arguments, reach: Reach
    ) -> LayerAnalysis | str:
        changes = self._last is not None and self._last != key
        self._new_in_a_row += 1
        self._last = key
        if changes and self._new_in_a_row > _CHANGES:
            raise CannotBlock("has another state at each call")
        found: LayerAnalysis | str
        try:
            found = analyse(self._edge_function, module, arguments, reach)
        except CannotBlock as reason:
            found = str(reason)
        _known[key] = found
        while len(_known) > _MOST:
            _known.popitem(last=False)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": None}


def _described(arguments: Arguments) -> Hashable:
    """The properties of a call's arguments that decide what the layer does with them."""
    device = arguments.tensors[0].device.type
    whole = {use.index for use in arguments.uses if use.level == "whole"}
    return (
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        torch.is_grad_enabled(),
        arguments.uses,
        tuple(arguments.others),
        tuple(
            (
                *(t.dtype, t.device, t.requires_grad, t.is_contiguous()),
                (t.shape, t.stride()) if i in whole else t.shape[1:],
            )
            for i, t in enumerate(arguments.tensors)
        ),
    )

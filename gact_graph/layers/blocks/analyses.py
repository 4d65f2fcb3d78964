"""The cache of analyses, shared by all layers in equal states."""

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

_CACHED_ANALYSES = 512

_NEW_STATES = 16
"""New states in a row after which a layer counts as changing its state at each call."""

_known: OrderedDict[Hashable, LayerAnalysis | str] = OrderedDict()


class Analyses:
    """The analyses of an edge function in the states of one layer, or of one function of the user.

    Layers of one class with equal settings, and with tensors of equal shapes, share analyses.

    Args:
        edge_function: The function that runs for each block.
    """

    def __init__(self, edge_function: EdgeFunction) -> None:
        self._edge_function = edge_function
        self._new_in_a_row = 0
        self._last: Hashable = None

    def of(
        self, module: Any, arguments: Arguments
    ) -> tuple[LayerAnalysis, list[tuple[str, Tensor]]]:
        """Return the analysis for a call, and the constants that the layer reads, by path.

        Raises:
            CannotBlock: The call cannot run in blocks.
        """
        try:
            reach = Reach([module, *arguments.others.values()], self._edge_function.methods)
        except Unknowable as reason:
            raise CannotBlock(str(reason)) from reason
        key = self._edge_function, _properties(arguments), reach.key
        analysis = _known.get(key)
        if analysis is None:
            analysis = self._analyse(key, module, arguments, reach)
        else:
            self._new_in_a_row = 0
        if isinstance(analysis, str):
            raise CannotBlock(analysis)
        return analysis, [reach.tensors[number] for number in analysis.constants]

    def _analyse(
        self, key: Hashable, module: Any, arguments: Arguments, reach: Reach
    ) -> LayerAnalysis | str:
        changes = self._last is not None and self._last != key
        self._new_in_a_row += 1
        self._last = key
        if changes and self._new_in_a_row > _NEW_STATES:
            raise CannotBlock("has another state at each call")
        analysis: LayerAnalysis | str
        try:
            analysis = analyse(self._edge_function, module, arguments, reach)
        except CannotBlock as reason:
            analysis = str(reason)
        _known[key] = analysis
        while len(_known) > _CACHED_ANALYSES:
            _known.popitem(last=False)
        return analysis

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": None}


def _properties(arguments: Arguments) -> Hashable:
    """Return the properties of arguments on which the behavior of a layer depends."""
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

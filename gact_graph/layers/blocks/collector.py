"""The tensors of a call, collected one by one with the part of each that a block reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, Level, Use
from gact_graph.layers.recompute.structure import Structure, taken_apart


class Collector:
    """Collects the arguments of one call.

    Attributes:
        others: Arguments that are no tensors, by parameter.
    """

    def __init__(self) -> None:
        self.others: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        self._names: list[str] = []
        self._uses: list[Use] = []

    def add(self, parameter: str, level: Level, tensor: Tensor, name: str) -> None:
        """Add a tensor.

        Args:
            parameter: The parameter of the edge function that gets it.
            level: The part of it that a block reads.
            tensor: The tensor.
            name: Its name in the report.

        Raises:
            CannotBlock: It is of a kind that cannot be cut.
        """
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise CannotBlock(f"has a {type(tensor).__name__} in {name}")
        index = next((i for i, t in enumerate(self._tensors) if t is tensor), None)
        if index is None:
            index = len(self._tensors)
            self._tensors.append(tensor)
            self._names.append(name)
        self._uses.append(Use(parameter, level, index))

    def add_nested(
        self, parameter: str, level: Level, value: Any, name: str, rows: int | None = None
    ) -> None:
        """Add a tensor, None, or tuples, lists and dicts of tensors: :func:`nested` returns them.

        Args:
            parameter: A name for :func:`nested`.
            level: The part of each tensor that a block reads.
            value: The argument.
            name: Its name in the report.
            rows: The rows that its tensors must have; None for any number.

        Raises:
            CannotBlock: A tensor has another number of rows, or is of a kind that cannot be cut.
        """
        tensors, structure = taken_apart(value)
        self.others[parameter] = structure
        self.others[f"{parameter} as text"] = str(structure.spec), structure.others
        for number, tensor in enumerate(tensors):
            inner = name if len(tensors) == 1 else f"{name}.{number}"
            if rows is not None and (tensor.dim() == 0 or tensor.size(0) != rows):
                raise CannotBlock(
                    f"has a tensor of shape {[*tensor.shape]} in {inner} where {rows} rows are "
                    "expected"
                )
            self.add(f"{parameter}.{number}", level, tensor, inner)

    def arguments(self, num_destinations: int, num_sources: int) -> Arguments:
        """Return the arguments.

        Raises:
            CannotBlock: There is no tensor.
        """
        if not self._uses:
            raise CannotBlock("gets no tensor")
        return Arguments(
            tuple(self._tensors),
            tuple(self._names),
            tuple(self._uses),
            self.others,
            num_destinations,
            num_sources,
        )


def nested(inputs: Mapping[str, Any], parameter: str) -> Any:
    """An argument of :meth:`Collector.add_nested`, for a block.

    Args:
        inputs: The inputs of the edge function.
        parameter: The name of the argument.
    """
    structure: Structure = inputs[parameter]
    return structure.filled([inputs[f"{parameter}.{i}"] for i in range(structure.num_tensors)])

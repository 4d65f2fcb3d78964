"""Arguments of edge work that come by their levels, and may be nested.

The other way is that of ``sort_arguments``, where names tell the levels, as for PyG's layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, Level, Use
from gact_graph.layers.recompute.structure import Structure, taken_apart


class Collector:
    """Takes the arguments of one call, one by one.

    Args:
        lengths: For each level the rows that its tensors must have; any number if there is none.
    """

    def __init__(self, lengths: dict[Level, int]) -> None:
        self._lengths = lengths
        self._tensors: list[Tensor] = []
        self._names: list[str] = []
        self._uses: list[Use] = []
        self._structures: dict[str, Structure] = {}

    def add(self, parameter: str, level: Level, value: Any, name: str) -> None:
        """Takes an argument: a tensor, None, or tuples, lists and dicts of tensors.

        Args:
            parameter: What :func:`given_to` will know it by.
            level: What a block gets of its tensors.
            value: The argument.
            name: Its name in the report.

        Raises:
            CannotBlock: A tensor has another number of rows, or is of a kind that cannot be cut.
        """
        tensors, structure = taken_apart(value)
        self._structures[parameter] = structure
        for number, tensor in enumerate(tensors):
            inner = name if len(tensors) == 1 else f"{name}.{number}"
            if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
                raise CannotBlock(f"has a {type(tensor).__name__} in {inner}")
            rows = self._lengths.get(level)
            if rows is not None and (tensor.dim() == 0 or tensor.size(0) != rows):
                raise CannotBlock(
                    f"has a tensor of shape {[*tensor.shape]} in {inner} where {rows} rows are "
                    "expected"
                )
            index = next((i for i, t in enumerate(self._tensors) if t is tensor), None)
            if index is None:
                index = len(self._tensors)
                self._tensors.append(tensor)
                self._names.append(inner)
            self._uses.append(Use(_part(parameter, number), level, index))

    def arguments(self, num_destinations: int, num_sources: int) -> Arguments:
        """All of them.

        Raises:
            CannotBlock: There is no tensor.
        """
        if not self._tensors:
            raise CannotBlock("gets no tensor")
        others = {
            "structures": self._structures,
            "leaves": [structure.others for structure in self._structures.values()],
            "specs": [str(structure.spec) for structure in self._structures.values()],
        }
        return Arguments(
            tuple(self._tensors),
            tuple(self._names),
            tuple(self._uses),
            others,
            num_destinations,
            num_sources,
        )


def given_to(given: dict[str, Any], parameter: str) -> Any:
    """An argument as a block has it.

    Args:
        given: What :meth:`Arguments.part` gave.
        parameter: As in :meth:`Collector.add`.
    """
    structure: Structure = given["structures"][parameter]
    return structure.filled(
        [given[_part(parameter, number)] for number in range(structure.num_tensors)]
    )


def _part(parameter: str, number: int) -> str:
    return f"{parameter}.{number}"

"""Which layer of the model a slot belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gact_graph.api.report.contexts import Contexts
from gact_graph.support.rows import Row


@dataclass(frozen=True)
class Layer(Contexts):
    """The contexts of one layer.

    Attributes:
        name: Its name; empty for operations in the model's own forward.
    """

    name: str = ""

    @property
    def label(self) -> str:
        """The name to show."""
        return label_of(self.name)

    @property
    def kind(self) -> str:
        """The name without the number at its end."""
        return self.name.rstrip("0123456789").rstrip(".")


def label_of(layer: str) -> str:
    """The name to show for a layer."""
    return layer or "(model)"


def layer_of(slot: str) -> str:
    """The name of the layer that saves a slot; empty for the model's own forward.

    It is the path of modules up to the first number in it, as ``convs.1`` or ``encoder/conv2``:
    numbers tell layers of one kind apart. A path without any belongs to its first module.
    """
    path = slot.rpartition("/")[0]
    ends = [part.end() for part in re.finditer(r"[^/.]+", path)]
    numbered = (end for end in ends if path[end - 1].isdigit())
    return path[: next(numbered, ends[0])] if ends else ""


def by_layer(rows: Iterable[Row]) -> list[Layer]:
    """The layers of these contexts, in the order of their first ones."""
    found: dict[str, Layer] = {}
    for row in rows:
        name = layer_of(row.slot)
        found.setdefault(name, Layer(name=name)).contexts.append(row)
    return [*found.values()]

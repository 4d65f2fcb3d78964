"""Layers whose result is a sum of weights times rows of one tensor: no message is ever made.

So are those of GCN, GAT, GATv2 and TransformerConv without features of arcs. Their weights may be
whatever the layer's ``message`` makes of its other arguments: it runs on all of these, and only the
product with the row at the source is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gact_graph.blocks.arguments import Rows
from gact_graph.blocks.product import Products
from gact_graph.blocks.work import messages
from gact_graph.weighted import weighted_sum, weighted_sum_rows, weighted_sum_weights


@dataclass(frozen=True)
class Summed:
    """What the layer adds up.

    Attributes:
        parameter: Of ``message``, with the row at the source of each arc.
        place: Of that tensor in ``Arguments.tensors``.
        product: Number of the product that is the message, as :class:`Products` counts.
    """

    parameter: str
    place: int
    product: int

    def weigh(self, module: MessagePassing, given: dict[str, Any]) -> Tensor | None:
        """The weights [A, ..., 1]; None if the message is no such product this time."""
        with Products(self.product) as products:
            out = messages(module, given)
        return weights_of(products, out, given[self.parameter])


@dataclass(frozen=True)
class Sums:
    """Sums of a block: A arcs of R rows.

    Args:
        x: The tensor of nodes [N, ...].
        places: The sources of the arcs [A].
        weight: Weights [A, ..., 1].
        starts: Of the rows' arcs [R + 1].
    """

    x: Tensor | Rows
    places: Tensor
    weight: Tensor
    starts: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[R, ...]."""
        return len(self.starts) - 1, *self.x.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def write(self, out: Tensor) -> None:
        """Into ``out`` [R, ...]."""
        rows, places = self._rows()
        weighted_sum(out.flatten(1), rows, places, self._weight(), self.starts)

    def of_weights(self, gradient: Tensor) -> Tensor:
        """The gradient of the weights, from that of the sums."""
        rows, places = self._rows()
        heads = self._weight().size(1)
        found = weighted_sum_weights(_matrix(gradient), rows, places, self.starts, heads)
        return found.view(self.weight.shape)

    def add_of_rows(self, total: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of x to ``total``, from that of the sums."""
        weighted_sum_rows(
            total.flatten(1), _matrix(gradient), self.places, self._weight(), self.starts
        )

    def _weight(self) -> Tensor:
        return _matrix(self.weight.detach())

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        """As a matrix, of which the places are rows, or which has a row for each arc."""
        if isinstance(self.x, Tensor):
            return _matrix(self.x), self.places
        return _matrix(self.x.rows(self.places.long())), None


def weights_of(products: Products, out: Tensor, row: Tensor) -> Tensor | None:
    """The other factor, if ``out`` is the product of ``row`` and of one number a head."""
    if products.factors is None or products.result is not out:
        return None
    one, other = products.factors
    if one is row:
        one, other = other, one
    if other is not row or row.dim() < 2 or one.dtype != row.dtype:
        return None
    return one if one.shape == (*row.shape[:-1], 1) else None


def stand_in(x: Tensor | Rows, arcs: int, value: float = 0.0) -> Tensor:
    """In place of the rows of x [N, ...] at the sources of some arcs: one value, in no memory."""
    return torch.full((), value, dtype=x.dtype, device=x.device).expand(arcs, *x.shape[1:])


def can_sum(x: Tensor) -> bool:
    """Whether the rows of this tensor of nodes can be added up where they lie."""
    return x.dtype in (torch.float32, torch.float64) and x.is_contiguous()


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten(1)

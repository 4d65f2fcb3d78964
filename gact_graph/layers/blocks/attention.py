"""The attention that a layer computes, by operators that make no row of an edge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows


@dataclass(frozen=True)
class Attention(ABC):
    """The attention that a layer computes.

    Attributes:
        source: Index of what the sources have, in ``Arguments.tensors``.
        destination: Index of what the destinations have.
        dropout: The share of weights that become 0.
    """

    source: int
    destination: int
    dropout: float

    @property
    def tensors(self) -> tuple[int, ...]:
        """Indices of the tensors that it reads."""
        return self.source, self.destination

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of the parameters that it reads, in ``Snapshot.learning``."""
        return ()

    @abstractmethod
    def outputs(
        self, tensors: Sequence[Tensor], learning: Sequence[Tensor], order: Order
    ) -> list[Tensor]:
        """What a call gives, in the order of ``BlockedCall.outputs``; draws a number if there is
        dropout.

        Args:
            tensors: Those of the arguments.
            learning: Those of the layer.
            order: The order of the edges.
        """

    @abstractmethod
    def gradients(
        self,
        tensors: Sequence[Tensor | Rows],
        learning: Sequence[Tensor],
        order: Order,
        gradients: Sequence[Tensor | None],
        learns: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of :attr:`tensors`, then those of :attr:`parameters`; None for none.

        Args:
            tensors: As in forward, or coded. The random state must be that of forward, too.
            learning: As in forward.
            order: The order of the edges.
            gradients: Those of the outputs, of which one at least is not None.
            learns: Whether each of the arguments' tensors needs its gradient.
        """

    @abstractmethod
    def written_out(self, read: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        """What :meth:`outputs` gives, by operations that have second derivatives. The random state
        must be that of forward.

        Args:
            read: :attr:`tensors`, then :attr:`parameters`.
            order: The order of the edges.
        """

    def _seed(self) -> int:
        return int(torch.randint(2**63 - 1, (), device="cpu")) if self.dropout else 0

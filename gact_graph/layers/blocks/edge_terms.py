"""What the features of edges add to the scores of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PART = 256
"""Edges whose products are added up by themselves."""


@dataclass(frozen=True)
class EdgeTerms:
    """GAT's: for each head, the dot product of a vector and of what a matrix makes of the features.

    As both are linear, they are one matrix [H, D], and no edge has a row of H * C numbers.

    Attributes:
        features: Index of the features [E, D] or [E] in ``Arguments.tensors``.
        matrix: Index of the matrix [H * C, D] in ``Snapshot.learning``.
        vector: Index of the vector [1, H, C] there.
    """

    features: int
    matrix: int
    vector: int

    @property
    def parameters(self) -> tuple[int, int]:
        """Indices of the parameters that they are made of."""
        return self.matrix, self.vector

    @staticmethod
    def of(features: Tensor, matrix: Tensor, vector: Tensor) -> Tensor:
        """The terms [E, H]."""
        return _rows(features) @ _product(matrix, vector).t()

    @staticmethod
    def gradients(
        of_terms: Tensor, features: Tensor, matrix: Tensor, vector: Tensor, learns: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The gradients of the features, if they learn, of the matrix and of the vector.

        Args:
            of_terms: That of the terms [E, H].
            features: As for :meth:`of`, and so are the two that follow.
            matrix: See there.
            vector: See there.
            learns: Whether the features have a gradient.
        """
        of_product = sum_of_products(of_terms, _rows(features)).unsqueeze(1)
        of_matrix = (of_product * vector[0].unsqueeze(-1)).view_as(matrix)
        of_vector = (of_product * _by_head(matrix, vector)).sum(-1).view_as(vector)
        if not learns:
            return None, of_matrix, of_vector
        return (of_terms @ _product(matrix, vector)).view_as(features), of_matrix, of_vector


def sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Of [E, H] and [E, D] over E: [H, D]. In parts, so that errors do not grow with E."""
    count = len(one) // _PART
    end = count * _PART
    parts = (x[:end].unflatten(0, (count, _PART)) for x in (one.contiguous(), other.contiguous()))
    left, right = parts
    return torch.bmm(left.mT, right).sum(0) + one[end:].t() @ other[end:]


def _rows(features: Tensor) -> Tensor:
    return features.unsqueeze(1) if features.dim() == 1 else features


def _by_head(matrix: Tensor, vector: Tensor) -> Tensor:
    """The matrix [H, C, D]."""
    return matrix.reshape(*vector.shape[1:], -1)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    """[H, D]."""
    return (_by_head(matrix, vector) * vector[0].unsqueeze(-1)).sum(1)

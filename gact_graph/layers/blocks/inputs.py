"""The inputs of a call while its gradients are computed, and the graphs of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gact_graph.layers.blocks.rows import CodedRows, add_rows, rows_of


@dataclass
class Input:
    """An input of the call: a tensor among the arguments, or a constant of the layer.

    Attributes:
        value: The saved tensor, which may be quantized.
        requires_grad: Whether its gradient is needed.
        of_gradient: In a backward of backward, the incoming gradient of the input's gradient.
        gradient: The gradient; None until a block has one.
    """

    value: Tensor | CodedRows
    requires_grad: bool = False
    of_gradient: Tensor | None = None
    gradient: Tensor | None = None
    _owned: bool = field(default=False, init=False)  # whether no other tensor shares its memory

    @property
    def tensor(self) -> Tensor:
        """The value of an input that is never quantized."""
        assert isinstance(self.value, Tensor)
        return self.value

    def add(self, gradient: Tensor, rows: Tensor | slice | None = None) -> None:
        """Add a gradient of the whole input, or of the rows at an index."""
        if self.gradient is None and rows is None:
            self.gradient = gradient
            return
        if self.gradient is None or not self._owned:
            # Not in place: autograd may return one tensor as the gradient of several inputs.
            value, total = self.value, self.gradient
            self.gradient = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            if total is not None:
                self.gradient += total
            self._owned = True
        if rows is None:
            self.gradient += gradient
        else:
            add_rows(self.gradient, rows, gradient)


@dataclass(frozen=True)
class Leaf:
    """A leaf of the graph of a block.

    Attributes:
        tensor: The leaf: an input, or some of its rows.
        input: The input, which adds up the gradients of its leaves.
        rows: Index of these rows; None for the whole input.
    """

    tensor: Tensor
    input: Input
    rows: Tensor | slice | None = None

    @property
    def of_gradient(self) -> Tensor | None:
        """In a backward of backward, the incoming gradient of the leaf's gradient."""
        of_gradient = self.input.of_gradient
        if of_gradient is None or self.rows is None:
            return of_gradient
        return rows_of(of_gradient, self.rows)


@dataclass(frozen=True)
class BlockGraph:
    """The autograd graph of a block that has run again.

    Attributes:
        results: The results of the block.
        gradients: Their gradients; None for no gradient.
        leaves: The leaves whose gradients are needed.
    """

    results: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    leaves: Sequence[Leaf]

    def backward(self) -> None:
        """Add the gradients of the leaves to those of their inputs."""
        _add(self.leaves, self._differentiated(create_graph=False))

    def double_backward(self, gradients: Sequence[Leaf]) -> None:
        """Add the second-order gradients of :meth:`backward`.

        Args:
            gradients: The incoming gradients of :meth:`backward`, as leaves.
        """
        first = self._differentiated(create_graph=True)
        pairs = [
            (gradient, leaf.of_gradient)
            for leaf, gradient in zip(self.leaves, first, strict=True)
            if gradient is not None
            and gradient.requires_grad
            and leaf.input.of_gradient is not None
        ]
        if not pairs:
            return
        outputs, of_outputs = zip(*pairs, strict=True)
        leaves = [*self.leaves, *gradients]
        inputs = [leaf.tensor for leaf in leaves]
        _add(leaves, torch.autograd.grad(outputs, inputs, of_outputs, allow_unused=True))

    def _differentiated(self, create_graph: bool) -> Sequence[Tensor | None]:
        """Return the gradient of each leaf; None where none arrives."""
        pairs = [
            (result, gradient)
            for result, gradient in zip(self.results, self.gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        if not pairs or not self.leaves:
            return [None] * len(self.leaves)
        results, gradients = zip(*pairs, strict=True)
        inputs = [leaf.tensor for leaf in self.leaves]
        return torch.autograd.grad(
            results, inputs, gradients, create_graph=create_graph, allow_unused=True
        )


def _add(leaves: Sequence[Leaf], gradients: Sequence[Tensor | None]) -> None:
    for leaf, gradient in zip(leaves, gradients, strict=True):
        # An input that no block uses has no gradient, as in stock autograd.
        if gradient is not None:
            leaf.input.add(gradient, leaf.rows)

"""The inputs of a call while its gradients are computed, and the graphs of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Use
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, add_rows, rows_of


@dataclass
class Input:
    """An input of the call: a tensor among the arguments, or one that the layer reads beside them.

    Attributes:
        value: The saved tensor, which may be coded.
        requires_grad: Whether its gradient is needed.
        of_gradient: In a backward of backward, the incoming gradient of the input's gradient.
        gradient: The gradient; None until a block has one.
    """

    value: Tensor | Rows
    requires_grad: bool
    of_gradient: Tensor | None = None
    gradient: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The value of an input that is never coded."""
        assert isinstance(self.value, Tensor)
        return self.value

    def total(self) -> Tensor:
        """The gradient to add to, zeros to begin with."""
        if self.gradient is None:
            value = self.value
            self.gradient = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return self.gradient

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the whole input, which may be changed in place from then on."""
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def leaf_of_all(self) -> Leaf:
        """The whole input as a leaf."""
        tensor = self.tensor.detach().requires_grad_(self.requires_grad)
        return Leaf(tensor, self.add, self.of_gradient)

    def leaf_of_part(
        self, tensor: Tensor, use: Use, order: Order, block: Block, sources: Tensor
    ) -> Leaf:
        """A leaf with the part of the input that a block uses."""
        of_gradient = self.of_gradient
        index: Tensor | slice
        if use.level == "whole":
            return Leaf(tensor, self._add_all, of_gradient)
        if use.level == "source":
            index = sources
        elif use.level == "edge":
            index = order.positions(block)
        else:
            index = block.nodes
        if of_gradient is not None:
            of_gradient = rows_of(of_gradient, index)
        return Leaf(tensor, partial(self._add_rows, index), of_gradient)

    def _add_all(self, gradient: Tensor) -> None:
        self.total().add_(gradient)

    def _add_rows(self, index: Tensor | slice, gradient: Tensor) -> None:
        add_rows(self.total(), index, gradient)


@dataclass(frozen=True)
class Leaf:
    """A leaf of the graph of a block.

    Attributes:
        tensor: The leaf.
        add: Adds its gradient to that of its input.
        of_gradient: In a backward of backward, the incoming gradient of the leaf's gradient.
    """

    tensor: Tensor
    add: Callable[[Tensor], None]
    of_gradient: Tensor | None = None


@dataclass(frozen=True)
class BlockGraph:
    """A block that has run again with a graph.

    Attributes:
        results: Its results.
        gradients: Their gradients; None for none.
        leaves: The leaves whose gradients are needed.
    """

    results: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    leaves: Sequence[Leaf]

    def backward(self) -> None:
        """Add the gradients of the leaves to those of their inputs."""
        _add(self.leaves, self._differentiated(create_graph=False))

    def double_backward(self, gradients: Sequence[Leaf]) -> None:
        """Add the gradients of :meth:`backward`, by the leaves and by the incoming gradients.

        Args:
            gradients: The incoming gradients, as leaves.
        """
        first = self._differentiated(create_graph=True)
        pairs = [
            (gradient, leaf.of_gradient)
            for leaf, gradient in zip(self.leaves, first, strict=True)
            if gradient is not None and gradient.requires_grad and leaf.of_gradient is not None
        ]
        if not pairs:
            return
        outputs, of_outputs = zip(*pairs, strict=True)
        leaves = [*self.leaves, *gradients]
        inputs = [leaf.tensor for leaf in leaves]
        _add(leaves, torch.autograd.grad(outputs, inputs, of_outputs, allow_unused=True))

    def _differentiated(self, create_graph: bool) -> Sequence[Tensor | None]:
        """The gradient of each leaf; None where none arrives."""
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
            leaf.add(gradient)

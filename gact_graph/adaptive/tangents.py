r"""How far the inputs of operations move with the parameters: tangents, sampled.

Move all parameters by :math:`\eta v`, with signs :math:`v` drawn at random, and run forward again:
an input :math:`x` of an operation moves by :math:`\eta \dot{x}`. What reaches the parameters of a
small change :math:`u` of the gradient at :math:`x` is :math:`J u`, with :math:`J` the rest of
backward, and

.. math::
    E_v \langle \dot{x}, u \rangle^2 = \lVert J u \rVert^2 .

So the tangents of one forward tell, of every operation at once, how much a change in its backward
matters, and no operation needs to be derived twice.

Where changes are found in few elements, the square of each tangent counts, and that of a single one
is often far from its mean over :math:`v`. The mean is about the same for all elements of a row and
of a column, but for a factor each: a linear layer's output moves as far as its row of inputs is
long. :attr:`Tangent.squares` are the squares that these factors give.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gact_graph.capture.trace import Call
from gact_graph.support.storage import is_plain

SAMPLES = 1 << 14
"""Elements of one tensor that are looked at, at most."""

_TINY = torch.finfo(torch.float32).tiny

Key = tuple[str, int, torch.Size]


@dataclass(frozen=True)
class Tangent:
    """Tangents of sampled elements of a tensor.

    Attributes:
        indices: Which elements [S] of the flattened tensor; None for all of them.
        values: Their tangents [S] in float32.
        shape: The tensor's.
    """

    indices: Tensor | None
    values: Tensor
    shape: torch.Size

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return self.shape.numel()

    @functools.cached_property
    def squares(self) -> Tensor:
        """Estimates [S] of the mean squares over all draws: a factor of the row (all dimensions but
        the last) times a factor of the column."""
        squares = self.values.square()
        columns = self.shape[-1] if self.shape else 1
        rows = self.numel // max(1, columns)
        if self.indices is None:
            table = squares.view(-1, max(1, columns))
            of_columns = table.mean(0)
            of_rows = table.sum(1, keepdim=True) / of_columns.sum().clamp_min(_TINY)
            return (of_rows * of_columns).flatten()
        if rows > len(squares):  # too few samples of each row
            return squares
        row, column = self.indices // columns, self.indices % columns
        of_columns = _sums(column, squares, columns) / column.bincount(minlength=columns)
        expected = of_columns[column]
        of_rows = _sums(row, squares, rows) / _sums(row, expected, rows).clamp_min(_TINY)
        return of_rows[row] * expected

    def sample(self, tensor: Tensor) -> Tensor:
        """The same elements [S] of a tensor of the same shape, in float32."""
        return _sample(tensor, self.indices)


class Tangents:
    """Tangents of all inputs of operations, from a forward that was moved and one that was not.

    The operations of both are told apart by name, argument and shape, and by which of these it is
    in the order of the forward.
    """

    def __init__(self) -> None:
        self._moved: dict[Key, deque[Tensor]] = defaultdict(deque)
        # In the moved forward, where one tensor is an input of several operations.
        self._seen: dict[tuple[Node, int], Tensor] = {}
        self._edges: dict[tuple[Node, int], Tangent] = {}
        self._indices: dict[tuple[int, torch.device], Tensor | None] = {}

    def see_moved(self, call: Call) -> None:
        """Takes the inputs of an operation of the forward whose parameters were moved."""
        for key, tensor in _inputs_of(call):
            edge = get_gradient_edge(tensor)
            if (edge.node, edge.output_nr) not in self._seen:
                indices = self.sampled_indices(tensor.numel(), tensor.device)
                self._seen[edge.node, edge.output_nr] = _sample(tensor, indices)
            self._moved[key].append(self._seen[edge.node, edge.output_nr])

    def end_moved(self) -> None:
        """Forgets the graph of the moved forward, which holds the moved parameters."""
        self._seen.clear()

    def see_unmoved(self, call: Call, step: float) -> None:
        """Takes them of the forward as it is, whose graph :meth:`at` is asked about.

        Args:
            call: The operation.
            step: How far all parameters were moved in the other forward.
        """
        for key, tensor in _inputs_of(call):
            if self._moved[key]:
                moved = self._moved[key].popleft()
                edge = get_gradient_edge(tensor)
                if (edge.node, edge.output_nr) not in self._edges:
                    indices = self.sampled_indices(tensor.numel(), tensor.device)
                    values = (moved - _sample(tensor, indices)).div_(step)
                    tangent = Tangent(indices, values, tensor.shape)
                    self._edges[edge.node, edge.output_nr] = tangent

    def at(self, node: Node, output: int) -> Tangent | None:
        """The tangent of the tensor that this output of this node of the graph is, if known."""
        return self._edges.get((node, output))

    def sampled_indices(self, numel: int, device: torch.device) -> Tensor | None:
        """Which of so many elements are looked at, in the order of samples; None for all."""
        if numel <= SAMPLES:
            return None
        key = numel, device
        if key not in self._indices:
            generator = torch.Generator().manual_seed(numel)
            indices = torch.randint(numel, (SAMPLES,), generator=generator, device="cpu")
            self._indices[key] = indices.to(device)
        return self._indices[key]


def _sample(tensor: Tensor, indices: Tensor | None) -> Tensor:
    tensor = tensor.detach()
    if indices is None:
        return tensor.flatten().to(torch.float32, copy=True)
    return tensor.take(indices).float()  # of an expanded tensor, without a copy of it


def _sums(groups: Tensor, values: Tensor, count: int) -> Tensor:
    """The sum [count] of the values [S] of each group."""
    return values.new_zeros(count).index_add_(0, groups, values)


def _inputs_of(call: Call) -> Iterator[tuple[Key, Tensor]]:
    for position, tensor in enumerate(_tensors_of(call)):
        learns = tensor.requires_grad and tensor.grad_fn is not None
        if learns and tensor.is_floating_point() and is_plain(tensor):
            yield (call.name, position, tensor.shape), tensor


def _tensors_of(call: Call) -> Iterator[Tensor]:
    given: list[Any] = [*call.args, *call.kwargs.values()]
    for value in given:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor):
                yield item

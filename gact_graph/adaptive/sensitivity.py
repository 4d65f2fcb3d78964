r"""The effect of each slot's noise on the gradient, for all slots in the user's own backward.

For each slot l, GACT (ICML 2022, Algorithm 1) runs a step again with other noise in that slot only,
and takes the change of the gradient as its sensitivity :math:`c_l`. Here no step runs again. In a
measured step, quantized contexts are stored in a finer width, which backward decodes. After each
operation of backward, the same operation runs again by itself:

- with one slot decoded in the width of training. The difference is the slot's error :math:`u_l` in
  the gradients of the operation's inputs and parameters;
- on the error :math:`e` of its incoming gradient. Backward is linear in gradients, so this
  propagates the error, and gives the factor by which the operation magnifies its square:
  :math:`\lVert J e \rVert^2 / \lVert e \rVert^2`.

An operation passes on all errors together, :math:`e = J e' + \sum_l u_l`; at the parameters, they
are the error of the gradient, to first order. The part of a single slot is computed when backward
has ended, from the parameters back to the outputs: a squared error counts once at a parameter, and
elsewhere as much as the operations from there on magnify it,

.. math::
    c_l = \frac{1}{S(b_l) \lVert g \rVert^2} \Bigl(
        \sum_p \lVert u_{l,p} \rVert^2 + \sum_x a_x \lVert u_{l,x} \rVert^2 \Bigr), \qquad
    a_x = \sum_p \frac{\lVert J_p e_x \rVert^2}{\lVert e_x \rVert^2}
        + \sum_{x'} a_{x'} \frac{\lVert J_{x'} e_x \rVert^2}{\lVert e_x \rVert^2} .

Only operations of PyTorch and of this library run again, never the model's code, a user's hook or a
user's ``autograd.Function``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gact_graph.adaptive.allocator import noise
from gact_graph.adaptive.row_weights import LEAST_ROWS
from gact_graph.codecs import Saved
from gact_graph.codecs.compared import MeasuredWidths
from gact_graph.support.current import unpack
from gact_graph.support.graph import nodes_of, saved_by_node
from gact_graph.support.part import in_proportion
from gact_graph.support.progress import PATIENCE, progress
from gact_graph.support.torch_private import FUNCTORCH, at_end_of_backward, holders_of, running_node


class Measured(NamedTuple):
    """The sensitivities of one step.

    Attributes:
        sensitivities: c_l by slot, over the squared norm of the gradient.
        error: The norm of the gradient's error at the current bits, over that of the gradient.
        explained: The same, computed from the sensitivities.
    """

    sensitivities: dict[str, float]
    error: float
    explained: float


class Edge(NamedTuple):
    """A tensor in the graph of a step: an input of the operation that made it, in backward.

    Attributes:
        node: The number of the operation.
        input: The index of the tensor among its outputs.
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        parameter: Whether the tensor is a leaf whose gradient counts.
    """

    node: int
    input: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: bool


_MANY = 1 << 20
"""Errors with at least this many elements wait in bfloat16.

Codes of 4 bits are not precise enough: in backward of a softmax, errors cancel and the noise of
codes does not. The error of a GAT on amazon_computers seemed to be 780 times as large.
"""

_RUN = 1 << 10
"""The number of elements whose squares are summed in their own precision."""

Outcome = Measured | Exception | None
"""None if the gradient was zero or not finite; the exception of an operation that ran again."""

Gradients = Sequence[Tensor | None]


class Measurement:
    """Measures all slots in the backward of one forward.

    The hooks on the graph hold the measurement, which holds no node of the graph: both are released
    with the graph if backward never runs.

    Args:
        done: A callback for the end of backward.

    Attributes:
        widths: The widths of contexts, for the session that captures the forward.
        row_squares: By slot, the squares of the gradients that backward multiplies its rows with,
            float32 [rows], once backward has ended.
    """

    def __init__(self, done: Callable[[Outcome], None]) -> None:
        self.widths: Final = MeasuredWidths()
        self.row_squares: dict[str, Tensor] = {}
        self._done = done
        self._edges: list[list[Edge | None]] = []
        self._uses: dict[int, int] = {}
        self._order: list[int] = []
        self._ended = False
        self._error: Exception | None = None
        # In transit: errors by node and input, and the parts of gradients and errors of parameters.
        self._errors: dict[tuple[int, int], Tensor] = {}
        self._parameters: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._squared_gradient = 0.0
        self._squared_error = 0.0
        # The squared errors of slots at edges, and the factor of each edge by node.
        self._own: dict[str, list[tuple[Edge, float]]] = {}
        self._magnified: dict[int, list[tuple[Edge, float]]] = {}
        self._not_run: set[str] = set()
        self._seconds = 0.0  # so far, in all operations

    def watch(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> str | None:
        """Add hooks to the graph of a forward that has ended.

        Args:
            outputs: The outputs of the forward.
            inputs: Its arguments. Their gradients do not count.

        Returns:
            The reason why the forward cannot be measured; None if it can.
        """
        nodes = [*nodes_of(outputs)]
        if not nodes:
            return "forward returns no tensor with a gradient"
        if any(m.is_cpp_nested_tensor for node in nodes for m in node._input_metadata):
            return "forward makes nested tensors"
        numbers = {node: number for number, node in enumerate(nodes)}
        arguments = {id(tensor) for tensor in inputs}

        def edge(node: Node | None, index: int) -> Edge | None:
            if node is None:
                return None
            number = numbers[node]
            # Only nodes of leaves are last. A function of the user's may have any attribute.
            variable = None if node.next_functions else getattr(node, "variable", None)
            if variable is None:
                tensor = node._input_metadata[index]
                return Edge(number, index, torch.Size(tensor.shape), tensor.dtype, False)
            self._uses[number] = self._uses.get(number, 0) + 1
            counts = id(variable) not in arguments
            return Edge(number, index, variable.shape, variable.dtype, counts)

        for number, node in enumerate(nodes):
            self._edges.append([edge(*following) for following in node.next_functions])
            if self._edges[-1]:
                can_run_again = _can_run_again(node)
                node.register_prehook(functools.partial(self._before, number, can_run_again))
                node.register_hook(functools.partial(self._after, number, can_run_again))
        return None

    def _before(self, number: int, can_run_again: bool, gradients: Gradients) -> None:
        """Propagate the errors of a node's incoming gradients, before its first run."""
        if self._ended or number in self._magnified:
            return
        if not self._order:
            at_end_of_backward(self._end)
        self._order.append(number)
        self._magnified[number] = []
        with self._measuring():
            if can_run_again:
                self._propagate(number, gradients)
        self.widths.read.clear()

    def _after(
        self, number: int, can_run_again: bool, results: Gradients, gradients: Gradients
    ) -> None:
        """Add the errors of the slots that a node has read, and the gradients of parameters."""
        if self._ended or self._order[-1:] != [number]:
            return
        with self._measuring():
            results = [*map(_as, self._edges[number], results)]
            slots = sorted(self.widths.read)
            self._add_row_squares(slots, gradients)
            if not can_run_again:
                self._not_run.update(slots)
                self._estimate(number, results, gradients)
            elif slots:
                # Runs again do not communicate, so the run that they are compared with must not.
                local = _local_backward(running_node())
                fine = results if local is None else self._run_again(number, gradients)
                for by_edge in self._runs_of(running_node(), slots):
                    self._measure(number, by_edge, fine, gradients)
            for edge, result in zip(self._edges[number], results, strict=True):
                if edge is not None and edge.parameter and result is not None:
                    self._parameters.setdefault(edge.node, ([], []))[0].append(result)
                    self._sum_up(edge.node, self._uses[edge.node])

    def _add_row_squares(self, slots: Sequence[str], gradients: Gradients) -> None:
        """Add the gradients of an operation to those of the rows that it has read."""
        dense = [g for g in gradients if slots and g is not None and g.layout == torch.strided]
        by_rows = [g for g in dense if g.dim() and len(g) >= LEAST_ROWS]
        if len({len(g) for g in by_rows}) != 1:
            return
        square = functools.reduce(torch.add, map(_squares_of_rows, by_rows))
        for slot in slots:
            old = self.row_squares.get(slot)
            if old is None or len(old) == len(square):
                self.row_squares[slot] = square if old is None else old + square

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """End the measurement, and not the user's backward, if an operation inside raises.

        The error is reported when backward has ended: if backward itself raises, the report is not
        needed.
        """
        start = monotonic()
        try:
            with progress("measuring sensitivities", PATIENCE - self._seconds), torch.no_grad():
                yield
        except Exception as error:  # of any kind: the operation was not made to run twice
            self._ended = True
            self._error = error.with_traceback(None)  # whose frames hold tensors
        self._seconds += monotonic() - start

    def _runs_of(self, node: Any, slots: Sequence[str]) -> list[dict[int, str]]:
        """Return the runs that measure a node's slots, each as slots by the results that read them.

        The errors of two slots must not meet in one result.
        """
        by_edge: dict[int, str] = {}
        for name, edge in _FACTORS.get(node.name(), {}).items() if len(slots) > 1 else ():
            read = self._slots_of(getattr(node, f"_raw_saved_{name}").data)
            if len(read) == 1:
                [by_edge[edge]] = read
        if len(slots) > 1 and sorted(by_edge.values()) == [*slots]:
            return [by_edge]
        return [dict.fromkeys(range(len(node.next_functions)), slot) for slot in slots]

    def _slots_of(self, saved: Any) -> set[str]:
        """Return the slots that the decoding of a saved tensor reads."""
        self.widths.read.clear()
        if isinstance(saved, Saved):
            for _ in saved.all_encoded():
                pass
        return {*self.widths.read}

    def _run_again(self, number: int, gradients: Gradients) -> list[Tensor | None]:
        results = [*_run_again(running_node(), gradients)]
        for index, edge in enumerate(self._edges[number]):  # each is released before the next
            results[index] = _as(edge, results[index])
        return results

    def _propagate(self, number: int, gradients: Gradients) -> None:
        """Run a node on the errors of its incoming gradients, if there are any."""
        errors = [self._take_error(number, *of) for of in enumerate(gradients)]
        total = _sum_of_squares(errors)
        if not total:
            return
        for index, gradient in enumerate(gradients):
            if errors[index] is None and gradient is not None:
                errors[index] = torch.zeros_like(gradient)
        self._add_magnified(number, self._run_again(number, errors), total)

    def _estimate(self, number: int, results: Gradients, gradients: Gradients) -> None:
        """Propagate errors of unchanged size relative to the gradient, with random signs."""
        total = _sum_of_squares([self._take_error(number, *of) for of in enumerate(gradients)])
        squared = _sum_of_squares(gradients)
        if total and squared:
            share = math.sqrt(total / squared)
            errors = [None if r is None else _with_random_signs(r) * share for r in results]
            self._add_magnified(number, errors, total)

    def _add_magnified(self, number: int, errors: Gradients, total: float) -> None:
        """Add the errors that a node made from errors whose sum of squares is ``total``."""
        for edge, error in zip(self._edges[number], errors, strict=True):
            if edge is not None and error is not None:
                self._magnified[number].append((edge, _squared(error) / total))
                self._add_error(edge, error)

    def _measure(
        self, number: int, by_edge: Mapping[int, str], results: Gradients, gradients: Gradients
    ) -> None:
        """Run a node with some narrow slots, and compare with the results of fine slots.

        Args:
            number: The node.
            by_edge: The slots, by the results that read them.
            results: The results of fine slots.
            gradients: The incoming gradients.
        """
        self.widths.narrow = frozenset(by_edge.values())
        try:
            narrow = self._run_again(number, gradients)
        finally:
            self.widths.narrow = frozenset()
        for index, (edge, fine) in enumerate(zip(self._edges[number], results, strict=True)):
            own, narrow[index] = narrow[index], None  # each is released before the next
            if edge is None or own is None or fine is None or index not in by_edge:
                continue
            # A node may return its incoming gradient itself.
            own = own.sub_(fine) if _is_alone(own, gradients) else own - fine
            squared = _squared(own)
            if squared:
                self._own.setdefault(by_edge[index], []).append((edge, squared))
                self._add_error(edge, own)

    def _add_error(self, edge: Edge, error: Tensor) -> None:
        if edge.parameter:
            self._parameters.setdefault(edge.node, ([], []))[1].append(error)
        elif edge.node not in self._uses:
            place = edge.node, edge.input
            waiting = self._errors.get(place)
            self._errors[place] = _small(error) if waiting is None else _plus(waiting, error)

    def _take_error(self, number: int, index: int, gradient: Tensor | None) -> Tensor | None:
        """Return and remove the error of a node's incoming gradient, if there is one."""
        error = self._errors.pop((number, index), None)
        return error if error is None or gradient is None else error.to(gradient.dtype)

    def _sum_up(self, number: int, uses: int) -> None:
        """Count the gradient of a parameter, once all of its parts are there."""
        gradients, errors = self._parameters.get(number, ([], []))
        if gradients and len(gradients) == uses:
            del self._parameters[number]
            self._squared_gradient += _squared(functools.reduce(torch.add, gradients))
            self._squared_error += _squared(functools.reduce(torch.add, errors)) if errors else 0.0

    def _end(self) -> None:
        """End the measurement, after backward."""
        if self._error is not None:
            self._done(self._error)
        if self._ended:
            return
        self._ended = True
        for number, (gradients, _) in [*self._parameters.items()]:
            self._sum_up(number, len(gradients))
        self._errors.clear()
        gradient, error = self._squared_gradient, self._squared_error
        self._done(self._measured() if 0 < gradient < math.inf and error < math.inf else None)

    def _measured(self) -> Measured:
        slots, counts = self.widths.slots, dict[int, float]()

        def squared(parts: Iterable[tuple[Edge, float]]) -> float:
            of_tensors = (s * counts.get(edge.node, 0.0) for edge, s in parts)
            return sum(of_tensors) + sum(s for edge, s in parts if edge.parameter)

        for number in reversed(self._order):
            counts[number] = squared(self._magnified[number])
        gradient = self._squared_gradient
        shares = {s: squared(self._own.get(s, ())) / gradient for s in sorted(slots)}
        # An operation that did not run again is unknown: its slots count as the worst do.
        worst = max(shares.values(), default=0.0)
        shares |= dict.fromkeys(self._not_run & set(slots), worst)
        values = {slot: share / noise(slots[slot]) for slot, share in shares.items()}
        return Measured(
            {slot: value for slot, value in values.items() if value < math.inf},
            math.sqrt(self._squared_error / gradient),
            math.sqrt(sum(shares.values())),
        )


def _can_run_again(node: Node) -> bool:
    """Return whether a node is of PyTorch or this library, and has no tensors in other hooks.

    The hooks of ``torch.utils.checkpoint`` would run a forward, and work only once.
    """
    hooks = {getattr(saved, "unpack_hook", None) for saved in saved_by_node(node)}
    if not hooks <= {None, unpack}:
        return False
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return True
    return bool(function.__module__.startswith(("gact_graph.", FUNCTORCH)))


def _local_backward(node: Any) -> Callable[..., Any] | None:
    """Return the backward without communication of a function that communicates, if it has it."""
    return getattr(getattr(node, "_forward_cls", None), "local_backward", None)


def _run_again(node: Any, gradients: Gradients) -> Gradients:
    """Return the results of a node, in the order of its ``next_functions``."""
    if not hasattr(node, "needs_input_grad"):
        results = node(*gradients)
        return results if isinstance(results, tuple) else (results,)
    # A function in Python returns an item for each argument, tensor or not. Other processes do not
    # run it again, so a function that communicates has a backward without that.
    local = _local_backward(node)
    results = node.apply(*gradients) if local is None else local(node, *gradients)
    results = results if isinstance(results, tuple) else (results,)
    needed = (r for r, need in zip(results, node.needs_input_grad, strict=False) if need)
    return tuple(None if node is None else next(needed) for node, _ in node.next_functions)


def _as(edge: Edge | None, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in the shape and dtype of its tensor, as autograd converts it."""
    if edge is None or gradient is None:
        return None
    shaped = gradient if gradient.is_sparse else gradient.sum_to_size(edge.shape)
    return shaped.to(edge.dtype)


_FACTORS = {
    "AddmmBackward0": {"mat1": 2, "mat2": 1},
    "BmmBackward0": {"self": 1, "mat2": 0},
    "MmBackward0": {"self": 1, "mat2": 0},
    "MulBackward0": {"self": 1, "other": 0},
}
"""By the kind of a node that differentiates a product, and by the name of a factor: the only result
that reads the factor, which is the gradient of the other factor."""


def _small(error: Tensor) -> Tensor:
    """Return the form in which an error waits for the next operation."""
    if error.is_sparse or error.dtype != torch.float32 or error.numel() < in_proportion(_MANY):
        return error
    if error.untyped_storage().nbytes() <= 2 * error.numel():  # expanded: a copy would take more
        return error
    return error.bfloat16()


def _plus(waiting: Tensor, error: Tensor) -> Tensor:
    """Return the sum with an error that waits, in the memory of a copy in bfloat16 if there is one.

    Both are of one dtype then: on a CPU, operations on two dtypes make copies in the wider one.
    """
    if waiting.is_sparse or error.is_sparse:
        return waiting + error
    short, other = (waiting, error) if waiting.dtype != error.dtype else (_small(error), waiting)
    if short.dtype == error.dtype:
        return waiting + error
    return short.add_(other.to(short.dtype))


def _is_alone(tensor: Tensor, others: Gradients) -> bool:
    """Return whether nothing else holds the memory of a result, which a node has just returned."""
    if tensor.layout != torch.strided or any(tensor is other for other in others):
        return False
    # The tensor holds its storage, and so does the function that counts.
    return bool(tensor._use_count() == 1 and holders_of(tensor) == 2)  # type: ignore[attr-defined]


def _with_random_signs(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    bits = torch.randint(2, tensor.shape, generator=generator, dtype=torch.int8, device="cpu")
    return tensor * bits.mul_(2).sub_(1).to(tensor.device)


def _sum_of_squares(tensors: Gradients) -> float:
    return sum(_squared(tensor) for tensor in tensors if tensor is not None)


def _squares_of_rows(tensor: Tensor) -> Tensor:
    """Return the sum of squares of each row, float32."""
    rows = tensor.reshape(len(tensor), -1)
    return torch.linalg.vector_norm(rows, dim=1).float().square()


def _squared(tensor: Tensor) -> float:
    """Return the sum of squares: by runs of elements in the tensor's own precision, without a copy,
    and over all runs in float64."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    flat = values.reshape(-1)
    end = len(flat) // _RUN * _RUN
    runs = torch.linalg.vector_norm(flat[:end].view(-1, _RUN), dim=1).double()
    rest = torch.linalg.vector_norm(flat[end:].double())
    return float(runs.square().sum() + rest.square())

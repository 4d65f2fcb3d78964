"""The edge work of a layer, one block of destinations at a time, in forward and in backward.

Each block is computed again in backward from tensors of nodes, with the random numbers it had in
forward: nothing with a row for each arc and the width of a message is alive for more than a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.nn import MessagePassing

from gact_graph import again
from gact_graph.blocks.arguments import Arguments, Rows, Use, add_rows, rows_of
from gact_graph.blocks.coded import CodedRows, saved_tensors
from gact_graph.blocks.order import Block, Order
from gact_graph.blocks.sums import Summed, Sums, stand_in
from gact_graph.blocks.work import Work, work_again
from gact_graph.heap import give_back
from gact_graph.stand_ins import learning, stand_ins
from gact_graph.surroundings import Surroundings

Pair = tuple[Tensor, Tensor]


@dataclass
class Run:
    """One call of a layer's ``propagate`` or ``edge_updater``, without its tensors.

    Attributes:
        module: The layer.
        work: What is done for each block.
        arguments: Their uses; the tensors come separately.
        order: Of the arcs.
        size: Arcs and rows of a block.
        of_edges: Whether the result has a row for each arc, else one for each destination.
        kept: Attributes in which the layer leaves a tensor of arcs, as some do with attention.
        unread: Places of the tensors whose values backward does not read.
        summed: What the layer adds up, if that is known.
        thrifty: Whether the heap's free memory counts beside what is saved.
    """

    module: MessagePassing
    work: Work
    arguments: Arguments
    order: Order
    size: int
    of_edges: bool
    kept: tuple[str, ...]
    unread: frozenset[int]
    summed: Summed | None
    thrifty: bool
    surroundings: Surroundings = field(init=False)

    @property
    def blocks(self) -> list[Block]:
        return self.order.blocks(self.size)

    def __call__(self) -> Tensor:
        """The result, with a graph if one is needed; sets the attributes of ``kept``."""
        tensors = self.arguments.tensors
        self.surroundings = Surroundings({t.device.type for t in tensors})
        parameters = learning(self.module)
        # What autograd holds must hold no tensor past the hooks on what it saves.
        self.arguments = replace(self.arguments, tensors=())
        calls = again.current()
        shapes_only = calls is not None and calls.next_is_unread
        known = None if calls is None else calls.next_known
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters)):
            with nullcontext() if calls is None else calls.one():
                results = _Blocked.apply(
                    self, shapes_only, known, len(tensors), *tensors, *parameters
                )
        else:
            results = self.forward(tensors, shapes_only)
        if calls is not None:
            calls.add(results[0], self.of_edges and not self.kept)
        for name, kept in zip(self.kept, results[1:], strict=True):
            setattr(self.module, name, kept)
        return results[0]

    @torch.no_grad()
    def forward(self, tensors: Sequence[Tensor], shapes_only: bool = False) -> tuple[Tensor, ...]:
        """The result and what is kept, without a graph; or zeros in their place."""
        results: list[Tensor] = []
        for block in self.blocks[:1] if shapes_only else self.blocks:
            found = None if shapes_only else self._sums(tensors, block)
            parts: list[Tensor | Sums]
            if found is None:
                given, _ = self.arguments.part(tensors, self.order, block)
                parts = [self.work(self.module, given), *self._left()]
            else:
                parts = [found[0], *self._left()]
            for i, part in enumerate(parts):
                if len(results) == i:
                    results.append(self._room(i, part, shapes_only))
                if not shapes_only:
                    self._write(results[i], i, block, part)
        return tuple(results)

    def backward(
        self,
        tensors: Sequence[Tensor | CodedRows],
        values: Sequence[Tensor],
        learn: Sequence[bool],
        of_parameters: Sequence[bool],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """The gradients of the tensors and of the parameters, where they are needed."""
        n, device = len(tensors), tensors[0].device
        # What a layer's edge_update used, its propagate uses again, and the other way round.
        thrifty = self.thrifty and not self.of_edges
        if thrifty:
            give_back(device)
        found: list[Tensor | None] = [None] * (n + len(values))
        with stand_ins(self.module, values) as parameters, self.surroundings.again():
            wanted = [i for i, needed in enumerate(of_parameters) if needed]
            for block in self.blocks:
                sums = self._sums(tensors, block, learn)
                if sums is None:
                    pairs, leaves, sources = self._pairs(tensors, block, learn, gradients)
                else:
                    leaves, sources = sums[1], sums[0].places
                    pairs = self._pairs_of(sums[0], block, learn, gradients, found)
                if not pairs:
                    continue
                added = torch.autograd.grad(
                    [out for out, _ in pairs],
                    [*(leaf for _, leaf in leaves), *(parameters[i] for i in wanted)],
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
                for (use, _), part in zip(leaves, added, strict=False):
                    if part is not None:
                        total = found[use.place]
                        if total is None:
                            total = found[use.place] = _zeros(tensors[use.place])
                        self._add(total, use, block, sources, part)
                for i, part in zip(wanted, added[len(leaves) :], strict=True):
                    known = found[n + i]
                    # What no block uses has no gradient, as in stock autograd.
                    if part is not None:
                        found[n + i] = part if known is None else known.add_(part)
        if thrifty:
            give_back(device)
        return found

    def _pairs(
        self,
        tensors: Sequence[Tensor | CodedRows],
        block: Block,
        learn: Sequence[bool],
        gradients: Sequence[Tensor | None],
    ) -> tuple[list[Pair], list[tuple[Use, Tensor]], Tensor]:
        """What a block gives, computed again, each with its gradient; the leaves; the sources."""
        given, leaves = self.arguments.part(tensors, self.order, block, learn)
        work = work_again(self.module, self.work)
        out, pairs = work(self.module, given), []
        if gradients[0] is not None and out.requires_grad:
            gradient = self._read(gradients[0], 0, block)
            if work is not self.work:
                gradient = rows_of(gradient, given["index"]).expand_as(out)
            pairs.append((out, gradient))
        return pairs + self._pairs_left(block, gradients), leaves, given["edge_index_j"]

    def _pairs_of(
        self,
        sums: Sums,
        block: Block,
        learn: Sequence[bool],
        gradients: Sequence[Tensor | None],
        found: list[Tensor | None],
    ) -> list[Pair]:
        """The same of a block that is added up; adds the gradient of the rows to ``found``."""
        assert self.summed is not None
        pairs, gradient, place = [], gradients[0], self.summed.place
        if gradient is not None:
            gradient = gradient[block.row : block.row_end]
            if learn[place]:
                total = found[place]
                if total is None:
                    total = found[place] = _zeros(sums.x)
                sums.add_of_rows(total, gradient)
            if sums.weight.requires_grad:
                pairs.append((sums.weight, sums.of_weights(gradient)))
        return pairs + self._pairs_left(block, gradients)

    def _pairs_left(self, block: Block, gradients: Sequence[Tensor | None]) -> list[Pair]:
        return [
            (out, self._read(gradient, i, block))
            for i, (out, gradient) in enumerate(zip(self._left(), gradients[1:], strict=True), 1)
            if gradient is not None and out.requires_grad
        ]

    def _sums(
        self, tensors: Sequence[Tensor | CodedRows], block: Block, learn: Sequence[bool] = ()
    ) -> tuple[Sums, list[tuple[Use, Tensor]]] | None:
        """What is added up in a block, and the leaves; None if that is to be done otherwise."""
        if self.summed is None:
            return None
        x, parameter = tensors[self.summed.place], self.summed.parameter
        given, leaves = self.arguments.part(tensors, self.order, block, learn, parameter)
        given[parameter] = stand_in(x, block.arc_end - block.arc)
        weight = self.summed.weigh(self.module, given)
        if weight is None:
            return None
        starts = self.order.starts[block.row : block.row_end + 1]
        return Sums(x, given["edge_index_j"], weight, starts), leaves

    def _left(self) -> list[Tensor]:
        return [getattr(self.module, name) for name in self.kept]

    def _room(self, output: int, part: Tensor | Sums, shape_only: bool) -> Tensor:
        length = self.order.arcs if self._of_edges(output) else self.order.rows
        shape = length, *part.shape[1:]
        if shape_only:
            return torch.zeros((), dtype=part.dtype, device=part.device).expand(shape)
        return torch.empty(shape, dtype=part.dtype, device=part.device)

    def _of_edges(self, output: int) -> bool:
        return self.of_edges or output > 0

    def _write(self, result: Tensor, output: int, block: Block, part: Tensor | Sums) -> None:
        if isinstance(part, Sums):
            part.write(result[block.row : block.row_end])
            return
        if not self._of_edges(output):
            result[block.row : block.row_end] = part
            return
        places = self.order.places(block)
        if isinstance(places, slice):
            result[places] = part
        else:
            result.index_copy_(0, places.long(), part)

    def _read(self, gradient: Tensor, output: int, block: Block) -> Tensor:
        if self._of_edges(output):
            return rows_of(gradient, self.order.places(block))
        return gradient[block.row : block.row_end]

    def _add(
        self, total: Tensor, use: Use, block: Block, sources: Tensor, gradient: Tensor
    ) -> None:
        if use.level == "source":
            add_rows(total, sources, gradient)
        elif use.level == "edge":
            add_rows(total, self.order.places(block), gradient)
        elif use.level == "whole":
            total += gradient
        else:
            total[block.row : block.row_end] += gradient


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, shapes_only: bool, known: Tensor | None, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.count = run, count
        ctx.set_materialize_grads(False)
        ctx.shapes = {i: (tensors[i].shape, tensors[i].new_ones(())) for i in run.unread}
        # Through the hooks of whoever compresses what is saved.
        ctx.save_for_backward(*(t for i, t in enumerate(tensors) if i not in run.unread))
        return (known,) if known is not None else run.forward(tensors[:count], shapes_only)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, n = ctx.needs_input_grad[4:], ctx.count
        kept = [i for i in range(len(needed)) if i not in ctx.shapes]
        read = iter(saved_tensors(ctx, ctx.run.arguments.uses, kept))
        saved = [
            ctx.shapes[i][1].expand(ctx.shapes[i][0]) if i in ctx.shapes else next(read)
            for i in range(len(needed))
        ]
        found = ctx.run.backward(saved[:n], saved[n:], needed[:n], needed[n:], gradients)
        return (None, None, None, None, *found)


def _zeros(like: Tensor | Rows) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)

"""Whether a layer may run in blocks: it is tried out on a small graph with rows of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gact_graph.layers.blocks.arguments import BlockFailed, CannotBlock
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.flow import FlowOfBlocks
from gact_graph.layers.blocks.sample import Sample, blocks_of, changed
from gact_graph.layers.blocks.steps import Recorder, Steps
from gact_graph.support.replica import Replica, Snapshot, leaves_of
from gact_graph.support.run_state import RunState

_OVER_ALL = ("batch_norm", "instance_norm", "native_batch_norm")
"""Operations that take statistics over all rows while training."""

_VALUES = 4
"""The label of all values that a layer is given."""

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""How far results may differ, as a share of the largest one; 2e-2 for other types."""


@dataclass(frozen=True)
class Probed:
    """What a layer does with its edges.

    Attributes:
        kept: The attributes in which it leaves a tensor with a row for each edge.
        steps: The operations that it runs on any block.
        edgeless: Whether it can run on a block that begins with a node without edges, or has none.
    """

    kept: tuple[str, ...]
    steps: Steps
    edgeless: bool


def probe(snapshot: Snapshot, edge_function: EdgeFunction, sample: Sample) -> Probed:
    """Runs a layer on the sample, as a whole and in blocks.

    Args:
        snapshot: The layer.
        edge_function: What runs for each block.
        sample: A small graph with rows of a call's tensors.

    Raises:
        CannotBlock: The layer normalises over all edges, gives a result of another shape, uses a
            tensor that it was not given, decides by values what it does, or gives a destination
            another result when other destinations are in its block.
    """
    run_state = RunState({t.device.type for t in sample.arguments.tensors})
    with snapshot.replica(own=True, watch=True) as replica, run_state.restored(), _Guard():
        kept = _follow(replica, edge_function, sample)
    edgeless = True
    for number, tensors in enumerate(sample.draws()):
        values = other_parameters(snapshot) if number else None
        with snapshot.replica(values, own=True) as replica:
            runs = _Runs(replica.module, edge_function, sample, tensors, kept, run_state)
            whole, steps = runs(sample.whole)
            edgeless = edgeless and all(runs.takes(part, steps) for part in sample.parts[1:])
            parts = [runs(part) for part in blocks_of(sample, edgeless)]
        if any(taken != steps for _, taken in parts):
            raise CannotBlock("runs other operations on some blocks than on others")
        for i, expected in enumerate(whole):
            if not _close(torch.cat([results[i] for results, _ in parts]), expected):
                raise CannotBlock("gives a node another result when other nodes are in its block")
        if number == 0:
            found = steps
    return Probed(kept, found, edgeless)


def _follow(replica: Replica, edge_function: EdgeFunction, sample: Sample) -> tuple[str, ...]:
    """Follows the values of all edges at once; gives the attributes in which the layer leaves some.

    Raises:
        CannotBlock: See :func:`probe`.
    """
    module: Any = replica.module
    tensors, block, flow = sample.arguments.tensors, sample.whole, FlowOfBlocks()
    learns = [t.is_floating_point() for t in tensors]
    given, leaves = sample.arguments.part(tensors, sample.order, block, learns)
    for use in sample.arguments.uses:
        flow.label(given[use.parameter], _VALUES | (0 if use.level == "whole" else flow.PARTS))
    for name in ("index", "edge_index_i"):
        flow.label(given[name], flow.DESTINATIONS)
    with flow.followed():
        out = _tried(module, edge_function, given)
    length = block.num_edges if edge_function.of_edges else block.num_nodes
    if not isinstance(out, Tensor) or out.dim() == 0 or out.size(0) != length:
        raise CannotBlock("returns something other than a tensor with one row per node or edge")
    if flow.seen & _VALUES:
        raise CannotBlock(
            "reads values of tensors in Python, or passes them to a function unknown to PyTorch"
        )
    if flow.rows_of_others:
        raise CannotBlock("reads rows of a tensor that is not among its arguments")
    elsewhere = replica.undo()
    if elsewhere is not None:
        raise CannotBlock(f"changes {elsewhere} while it makes messages")
    kept = _left_behind(replica.changes(), block.num_edges)
    results = [out, *(getattr(module, name) for name in kept)]
    _check_leaves(results, [*(leaf for _, leaf in leaves), *replica.parameters])
    return kept


def _tried(module: Any, edge_function: EdgeFunction, given: dict[str, Any]) -> Tensor:
    try:
        return edge_function(module, given)
    except (CannotBlock, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # If the caller's arguments are wrong, PyG's own propagate raises the error again.
        raise BlockFailed(f"fails on a block ({type(error).__name__}: {error})") from error


class _Guard(TorchFunctionMode):
    """Within, operations that take statistics over all edges raise CannotBlock."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OVER_ALL:
            raise CannotBlock(f"applies {name} over all edges")
        return func(*args, **(kwargs or {}))


def _left_behind(changes: dict[str, Any], edges: int) -> tuple[str, ...]:
    for name, value in changes.items():
        if (
            not isinstance(value, Tensor)
            or value.dim() == 0
            or value.size(0) != edges
            or "." in name
        ):
            raise CannotBlock(
                f"leaves something other than one row per edge in its attribute {name}"
            )
    return tuple(changes)


def _check_leaves(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    known = {id(t) for t in leaves}
    if any(id(leaf) not in known for leaf in leaves_of(results)):
        raise CannotBlock("uses a tensor that learns and is not among its arguments")


class _Runs:
    """Runs one layer on blocks with tensors of one draw, each time with the same random numbers."""

    def __init__(
        self,
        module: Any,
        edge_function: EdgeFunction,
        sample: Sample,
        tensors: Sequence[Tensor],
        kept: tuple[str, ...],
        run_state: RunState,
    ) -> None:
        self._module = module
        self._edge_function = edge_function
        self._sample = sample
        self._tensors = tensors
        self._kept = kept
        self._run_state = run_state

    def __call__(self, block: Block) -> tuple[list[Tensor], Steps]:
        """The result and the tensors left in attributes; and the operations."""
        given, _ = self._sample.arguments.part(self._tensors, self._sample.order, block)
        with self._run_state.restored(), torch.no_grad(), _Still(), Recorder() as recorder:
            out = _tried(self._module, self._edge_function, given)
        return [out, *(getattr(self._module, name) for name in self._kept)], recorder.steps

    def takes(self, block: Block, expected: Steps) -> bool:
        """Whether the layer runs on a block, with these operations."""
        try:
            _, steps = self(block)
        except BlockFailed:
            return False
        return steps == expected


class _Still(TorchDispatchMode):
    """Within, all random numbers are the same one, so that blocks can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    if not tensor.is_floating_point():
                        raise CannotBlock("draws random integers")
                    tensor.fill_(0.5)
        return result


def other_parameters(snapshot: Snapshot) -> list[Tensor]:
    """Random values for the parameters, which may be zeros to begin with."""
    generator = torch.Generator().manual_seed(2)
    return [changed(p, generator) for p in snapshot.learning]


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    finite = expected.nan_to_num(0.0, 0.0, 0.0)
    most = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = _TOLERANCE.get(expected.dtype, 2e-2) * most
    return torch.allclose(found, expected, rtol=0.0, atol=tolerance, equal_nan=True)

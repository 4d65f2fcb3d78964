"""The shapes of the arguments of operators over edges, declared once and checked for any device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gact_graph.ops.checks import check_range, check_strided, check_tensor, name_of


class Shapes:
    """The shapes of an operator's arguments, in order of the checks.

    ``"x: N W, places: E < N, starts: R + 1, out: R W"`` stands for a matrix [N, W]; an index tensor
    [E] of numbers below N, int32 or int64; the first edges of R rows, int64 [R + 1]; and a matrix
    [R, W]. The first argument with a size defines it. ``heads: H`` stands for an int.

    Matrices are contiguous and have the dtype, float32 or float64, and the device of the first. An
    argument that is None is not checked; if it is an index, edge e has row e, so both sizes are
    equal. E edges belong to the rows, H heads share W columns evenly, and each has C columns.

    Args:
        function: The function that declares the operator. If it has an argument ``dropout``, that
            is checked too.
        shapes: The shapes.
    """

    def __init__(self, function: Callable[..., Any], shapes: str) -> None:
        arguments = [*inspect.signature(function).parameters]
        rules = [rule.split(": ") for rule in shapes.split(", ")]
        self._rules = [(arguments.index(name), name, sizes.split()) for name, sizes in rules]
        self._first = next(place for place, _, sizes in self._rules if len(sizes) == 2)
        self._dropout = arguments.index("dropout") if "dropout" in arguments else None

    def check(self, *args: Any) -> None:
        """Raise an error for invalid arguments of the operator.

        Raises:
            ValueError: If a tensor has another dtype, layout, shape or device, or is not
                contiguous; if the heads do not share the columns evenly; if dropout is out of
                range; or (on the CPU) if the starts decrease or do not span the edges.
            IndexError: If an index is out of range (on the CPU).
        """
        sizes: dict[str, int] = {}
        indices: list[tuple[str, Tensor, str]] = []
        starts: Tensor | None = None
        dtype, device = args[self._first].dtype, args[self._first].device
        for place, name, rule in self._rules:
            x = args[place]
            match rule:
                case [edges, "<", rows] if x is None:
                    size = sizes[edges] if edges in sizes else sizes[rows]
                    sizes[edges] = sizes[rows] = size
                case [edges, "<", rows]:
                    _check_index(name, x, sizes.setdefault(edges, x.numel()), device)
                    indices.append((name, x, rows))
                case [rows, "+", "1"]:
                    _check_starts(x, device)
                    sizes[rows], starts = x.numel() - 1, x
                case [rows, columns] if x is not None:
                    if rows not in sizes or columns not in sizes:
                        _check_matrix(name, x, device)
                        sizes = {rows: x.size(0), columns: x.size(1), **sizes}
                    check_tensor(name, x, dtype, [sizes[rows], sizes[columns]], device)
                case [number]:
                    sizes[number] = x
            _check_heads(sizes)
        if self._dropout is not None:
            _check_dropout(args[self._dropout])
        if starts is not None:
            _check_span(starts, sizes["E"])
        for name, index, rows in indices:
            check_range(name, index, sizes[rows] - 1)


def _check_index(name: str, x: Tensor, edges: int, device: torch.device) -> None:
    check_strided(name, x, device)
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"Expected {name} of int32 or int64 (got {name_of(x.dtype)})")
    check_tensor(name, x, x.dtype, [edges], device)


def _check_starts(starts: Tensor, device: torch.device) -> None:
    check_strided("starts", starts, device)
    if not starts.numel():
        raise ValueError("Expected starts of 1 number or more (got none)")
    check_tensor("starts", starts, torch.int64, [starts.numel()], device)


def _check_span(starts: Tensor, edges: int) -> None:
    if starts.device.type != "cpu":
        return
    if bool((starts[1:] < starts[:-1]).any()):
        raise ValueError("Expected starts that do not decrease (got some that do)")
    first, last = starts[0].item(), starts[-1].item()
    if last - first != edges:
        raise ValueError(f"Expected starts that span {edges} edges (got {first} to {last})")


def _check_matrix(name: str, x: Tensor, device: torch.device) -> None:
    check_strided(name, x, device)
    if x.dim() != 2 or not x.is_contiguous():
        how = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(f"Expected {name} of 2 dimension(s), contiguous (got {[*x.shape]}{how})")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Expected {name} of float32 or float64 (got {name_of(x.dtype)})")


def _check_heads(sizes: dict[str, int]) -> None:
    if "H" not in sizes or "W" not in sizes:
        return
    heads, width = sizes["H"], sizes["W"]
    if "C" in sizes:
        if heads * sizes["C"] != width:
            raise ValueError(f"Expected att of {width} elements (got {heads * sizes['C']})")
    elif heads < 1 or width % heads:
        raise ValueError(f"Expected heads that share {width} columns evenly (got {heads})")


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"Expected dropout from 0 to less than 1 (got {dropout})")

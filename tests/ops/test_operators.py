"""The operators called directly, with anything: a clear error or a right result, never a crash.

Under the sanitizers (``.ci/sanitize``) that also means: nothing is read or written beside a tensor,
and no number overflows.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch
from cpu_builds import operators
from kernel_errors import of_kernels
from samples import seeded
from torch import Tensor

from gact_graph.ops import cpu
from gact_graph.ops.reference import attention as attention_reference
from gact_graph.ops.reference import batch_norm as batch_norm_reference
from gact_graph.ops.reference import bernoulli as bernoulli_reference
from gact_graph.ops.reference import bitmask as bitmask_reference
from gact_graph.ops.reference import dot_attention as dot_reference
from gact_graph.ops.reference import leaky_attention as leaky_reference
from gact_graph.ops.reference import quantize as reference
from gact_graph.ops.reference import weighted_sum as weighted_reference

INT_MAX = 2**63 - 1
_INTS = (0, 1, -1, 2, 3, 63, 64, 256, 2**31, 2**32, 2**40, 2**62, INT_MAX - 63, INT_MAX, -(2**63))
_DTYPES = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
_SAID = (ValueError, TypeError, IndexError, RuntimeError)


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=seeded(7)).to(dtype)


def _coded(bad: bool = False) -> tuple[Any, ...]:
    x = _normal(30, 20)
    if bad:
        x[2] = torch.inf  # not NaN: opcheck compares
    codes, stats = reference.pack(x, 3, 256, 1)
    return codes, stats, *reference.exact_groups(x, stats, 256)


def _coded_in_widths() -> tuple[Tensor, ...]:
    """Three groups of a tensor of 600 elements; the last has two tiles."""
    x, widths = _normal(30, 20), torch.tensor([3, 16, 1], dtype=torch.uint8)
    x[2], x[28:] = torch.inf, 0.1
    codes, stats = reference.pack(x, 3, 256, 1, widths, _WORDS)
    return codes, stats, *reference.exact_groups(x, stats, 256), widths


_WORDS = 3 * 4 + 16 * 4 + 1 * 2


def _call(backend: Any, name: str) -> Any:
    """The operator of a key of :func:`_calls`."""
    return getattr(backend, name.split()[0])


def _calls() -> dict[str, tuple[Any, ...]]:
    """Right arguments of each operator; a key begins with its name."""
    codes, stats, groups, values = _coded(bad=True)
    wide_codes, wide_stats, wide_groups, wide_values, widths = _coded_in_widths()
    x, weight = _normal(12, 8), _normal(50, 2)
    places = torch.randint(12, (50,), generator=seeded(1))
    weight_places = torch.randperm(50, generator=seeded(2))
    starts = torch.tensor([3, 13, 13, 40, 53])
    words = torch.arange(10)
    return {
        "pack": (_normal(30, 20), 3, 256, 7),
        "pack in widths": (_normal(30, 20), 3, 256, 7, widths, _WORDS),
        "unpack in widths": (
            *(wide_codes, wide_stats, [30, 20], 3, 256, torch.float32, wide_groups, wide_values),
            *(1, widths),
        ),
        "unpack_rows in widths": (
            *(wide_codes, wide_stats, torch.tensor([0, 13, 29, 3]), 600, 20, 3, 256),
            *(torch.float32, wide_groups, wide_values, 1, widths),
        ),
        "pack in channels": (
            *(_normal(30, 20), 3, 256, 7, widths, _WORDS, _normal(2, 20).abs(), 1),
        ),
        "group_ranges": (_normal(30, 20), 64, _normal(2, 30).abs(), 20),
        "decorrelated_weight": (_normal(30, 20), stats, 256, 2, _normal(2, 20).abs(), 1),
        "exact_groups": (_normal(30, 20), stats, 256),
        "unpack": (codes, stats, [30, 20], 3, 256, torch.float32, groups, values, 1),
        "unpack a mean": (
            *(codes, stats, [30, 20], 3, 256, torch.float32, groups, values, 1, None),
            torch.tensor([0.4]),
        ),
        "unpack_rows": (
            *(codes, stats, torch.tensor([0, 29, 3]), 600, 20, 3, 256, torch.float32),
            *(groups, values, 1),
        ),
        "pack_bits": (_normal(30, 20), 1, 0.5),
        "pack_pair": (_normal(600).sign(), -1.0, 1.0),
        "unpack_bits": (words, [30, 20], 0.0, 1.0, torch.float32),
        "masked_select": (_normal(30, 20), words, True),
        "masked_scatter": (_normal(15), words, 600),
        "weighted_sum": (_normal(4, 8), x, places, weight, weight_places, starts),
        "weighted_sum_weights": (_normal(4, 8), x, places, starts, 2),
        "weighted_sum_backward": (
            _normal(4, 8),
            _normal(50, 2),
            x,
            _normal(4, 8),
            places,
            weight,
            weight_places,
            starts,
        ),
        "attention": (
            *(_normal(50, 2), _normal(12, 2), _normal(4, 2), _normal(50, 2)),
            *(places, weight_places, starts, 0.2, 0.5, 7),
        ),
        "attention_backward": (
            *(_normal(50, 2), _normal(4, 2), _normal(50, 2), _normal(12, 2), _normal(4, 2)),
            *(_normal(50, 2), places, weight_places, starts, 0.2, 0.5, 7),
        ),
        "segment_sum": (_normal(4, 8), x, places, starts),
        "leaky_attention": (
            *(_normal(50, 2), x, _normal(4, 8), _normal(2, 4), places, weight_places, starts),
            *(0.2, 0.5, 7),
        ),
        "leaky_attention_backward": (
            *(_normal(50, 2), _normal(4, 8), _normal(2, 4), _normal(50, 2), x, _normal(4, 8)),
            *(_normal(2, 4), places, weight_places, starts, 0.2, 0.5, 7),
        ),
        "leaky_attention_source": (
            *(_normal(4, 8), _normal(50, 2), _normal(4, 8), x, _normal(2, 4), places),
            *(weight_places, starts, 0.2),
        ),
        "dot_attention": (
            *(_normal(50, 2), x, _normal(4, 8), _normal(50, 2), places, weight_places, starts, 0.5),
        ),
        "dot_attention_backward": (_normal(50, 2), weight, weight_places, starts, 0.5),
        "drop_weights": (_normal(50, 2), 0.5, 7),
        "draw_bits": (seeded(1).get_state(), words.clone(), 601, 0.3),
        "batch_norm_backward": (_normal(12, 8), _normal(12, 8), x, _normal(3, 8)),
        "restore_columns": (x.clone(), _normal(2, 8)),
    }


def _others(value: Any) -> list[Any]:
    """Wrong values for an argument."""
    if isinstance(value, Tensor):
        other = [value.to(dtype) for dtype in _DTYPES if dtype != value.dtype]
        other += [
            value[:0],
            value[:-1],
            value[None],
            value.flatten()[:1].squeeze(),
            value.flatten(),
        ]
        other += [torch.cat([value, value[-1:]]), value.repeat_interleave(2, 0)[::2]]
        other += [value.to("meta"), value.to_sparse(), value[:1].expand_as(value), value.t()]
        freed = value.clone()
        freed.untyped_storage().resize_(0)
        other.append(freed)
        if value.is_floating_point():
            other += [
                torch.full_like(value, number) for number in (torch.nan, torch.inf, -torch.inf)
            ]
        if value.dim() == 2:
            other += [value[:, :0], value[:, :-1].contiguous(), value.new_empty(0, 0)]
        if value.dtype == torch.uint8:
            other += [torch.full_like(value, number) for number in (0, 1, 16, 17, 255)]
            other.append(value.flip(0))
            other += [None] if len(value) == 3 else []  # widths may be None
        if value.dtype == torch.int64:
            numbers = (-1, 12, 2**31, 2**32 + 3, INT_MAX, -(2**63))
            for number, place in itertools.product(numbers, (0, -1, len(value) // 2)):
                wrong = value.clone()
                wrong[place] = number
                other.append(wrong)
            other.append(value.flip(0))
        return other
    if isinstance(value, torch.dtype):
        return [d for d in (*_DTYPES, torch.complex64, torch.bfloat16) if d != value]
    if isinstance(value, list):
        return [[], [0], [-1], [30], [601], [30, -20], [-30, -20], [2**62, 4], [2**32, 2**32]]
    if isinstance(value, float):
        return [torch.inf, -torch.inf, torch.nan, 1e300]
    return [number for number in _INTS if number != value]


def _backends() -> dict[str, Any]:
    class Reference:
        def __getattr__(self, name: str) -> Any:
            modules = (
                *(reference, bitmask_reference, bernoulli_reference, weighted_reference),
                *(attention_reference, leaky_reference, dot_reference, batch_norm_reference),
            )
            return next(getattr(m, name) for m in modules if hasattr(m, name))

    assert cpu.load() is not None
    return {"dispatched": torch.ops.gact_graph, "reference": Reference()}


def _copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments, so that a call that writes changes no other."""
    return tuple(
        a.clone() if isinstance(a, Tensor) and a.is_contiguous() and not a.is_meta
        and a.layout == torch.strided and a.untyped_storage().nbytes() else a
        for a in arguments
    )  # fmt: skip


@pytest.mark.parametrize("backend", _backends())
@pytest.mark.parametrize("name", _calls())
def test_one_wrong_argument(name: str, backend: str) -> None:
    call = _call(_backends()[backend], name)
    right = _calls()[name]
    call(*_copied(right))
    refused = 0
    for place, value in enumerate(right):
        for other in _others(value):
            try:
                call(*_copied((*right[:place], other, *right[place + 1 :])))
            except _SAID as error:
                refused += str(error).startswith("Expected")
    assert refused > len(right)


@pytest.mark.parametrize("name", _calls())
def test_several_wrong_arguments(name: str) -> None:
    call, right, draw = _call(torch.ops.gact_graph, name), _calls()[name], random.Random(name)
    for _ in range(300):
        arguments = [draw.choice(_others(v)) if draw.random() < 0.4 else v for v in right]
        with contextlib.suppress(_SAID):
            call(*_copied(tuple(arguments)))


def _bytes(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


_MISTAKES: dict[str, tuple[str, int, Any, type[Exception], str]] = {
    "heads 0": ("weighted_sum_weights", 4, 0, ValueError, r"share 8 columns evenly \(got 0\)"),
    "heads -1": ("weighted_sum_weights", 4, -1, ValueError, r"share 8 columns evenly \(got -1\)"),
    "heads 3": ("weighted_sum_weights", 4, 3, ValueError, r"share 8 columns evenly \(got 3\)"),
    "no heads": ("weighted_sum", 3, torch.ones(50, 0), ValueError, r"evenly \(got 0\)"),
    "out": ("weighted_sum", 0, torch.ones(3, 8), ValueError, r"out of \[4, 8\].*\(got \[3, 8\]\)"),
    "few weights": ("weighted_sum", 3, torch.ones(49, 2), IndexError, r"from 0 to 48 \(got 49\)"),
    "few places": (
        "weighted_sum", 4, torch.arange(49), ValueError, r"weight_places of \[50\]",
    ),
    "double": ("weighted_sum", 3, torch.ones(50, 2).double(), ValueError, r"weight of "),
    "starts fall": (
        "weighted_sum", 5, torch.tensor([3, 13, 9, 40, 53]), ValueError, "do not decrease",
    ),
    "starts beyond": (
        "weighted_sum", 5, torch.tensor([3, 13, 13, 40, 54]), ValueError,
        r"span 50 edges \(got 3 to 54\)",
    ),
    "no starts": (
        "weighted_sum", 5, torch.zeros(0, dtype=torch.int64), ValueError, r"starts of 1 number",
    ),
    "place": (
        "weighted_sum_backward", 4, torch.full((50,), 12), IndexError,
        r"Expected places from 0 to 11 \(got 12\)",
    ),
    "int16 places": (
        "weighted_sum", 2, torch.zeros(50, dtype=torch.int16), ValueError, r"int32 or int64",
    ),
    "gradient": ("weighted_sum_backward", 2, torch.ones(12, 9), ValueError, r"of \[12, 8\]"),
    "dropout 1": ("attention", 8, 1.0, ValueError, r"dropout from 0 to less than 1 \(got 1"),
    "dropout -1": ("attention_backward", 10, -1.0, ValueError, r"less than 1 \(got -1"),
    "att": ("leaky_attention", 3, torch.ones(2, 3), ValueError, r"att of 8 elements \(got 6\)"),
    "att's heads": (
        "leaky_attention_backward", 6, torch.ones(1, 8), ValueError, r"gradient of \[50, 1\]",
    ),
    "a source's rows": (
        "leaky_attention_source", 2, torch.ones(5, 8), ValueError, r"source of \[4, 8\]",
    ),
    "columns": ("dot_attention", 0, torch.ones(50, 3), ValueError, r"share 8 columns evenly"),
    "dropout of weights": ("drop_weights", 1, 1.0, ValueError, r"less than 1 \(got 1"),
    "terms": ("attention", 3, torch.ones(49, 2), ValueError, r"terms of \[50, 2\]"),
    "terms of products": ("dot_attention", 3, torch.ones(50, 3), ValueError, r"terms of \[50, 2"),
    "scores": ("attention", 2, torch.ones(4, 3), ValueError, r"destination of \[4, 2\]"),
    "int32 rows": (
        "unpack_rows", 2, torch.zeros(3, dtype=torch.int32), ValueError, r"Expected rows of",
    ),
    "numel": ("unpack_rows", 3, -600, ValueError, r"Expected numel from 0 on \(got -600\)"),
    "dtype": ("unpack", 5, torch.int32, ValueError, r"Expected a dtype of float16"),
    "shape": ("unpack", 2, [2**62, 4], ValueError, r"less than 2\^63 elements"),
    "weight": ("unpack a mean", 10, torch.ones(2), ValueError, r"Expected weight of \[1\]"),
    "weight of float64": (
        "unpack a mean", 10, torch.ones(1, dtype=torch.float64), ValueError, "Expected weight of",
    ),
    "weight without seed": ("unpack a mean", 8, None, ValueError, "Expected a seed with a weight"),
    "weight of halves": ("unpack a mean", 5, torch.float16, ValueError, r"float32|Float"),
    "one of both": ("unpack", 6, None, ValueError, r"Expected groups and values, or none of both"),
    "test": ("pack_bits", 1, 3, ValueError, r"Expected test from 0 to 2 \(got 3\)"),
    "words": ("pack in widths", 5, 80, ValueError, r"widths of 80 words \(got 78\)"),
    "words -1": ("pack in widths", 5, -1, ValueError, r"widths of -1 words \(got 78\)"),
    "other words": (
        "unpack in widths", 9, _bytes(3, 16, 2), ValueError, r"widths of 78 words \(got 80\)",
    ),
    "width 0": ("pack in widths", 4, _bytes(3, 0, 1), ValueError, r"from 1 to 16 \(got 0\)"),
    "width 17": (
        "unpack_rows in widths", 11, _bytes(3, 16, 17), ValueError, r"from 1 to 16 \(got 17\)",
    ),
    "few widths": ("pack in widths", 4, _bytes(3, 16), ValueError, r"Expected widths of \[3\]"),
    "int32 widths": (
        "unpack in widths", 9, _bytes(3, 16, 1).int(), ValueError, "Expected widths of",
    ),
    "codes in a matrix": (
        "unpack in widths", 0, torch.zeros(78, 1, dtype=torch.int64), ValueError,
        r"Expected codes of .*\(got \[78, 1\]\)",
    ),
    "channels": (
        "pack in channels", 7, 4, ValueError, r"channels that divide 600 elements \(got 20 of 4\)",
    ),
    "no groups": ("decorrelated_weight", 3, 0, ValueError, r"groups \(got 600 and 0\)"),
    "count": ("draw_bits", 2, -1, ValueError, "Expected count"),
    "probability": ("draw_bits", 3, 1.5, ValueError, r"p from 0 to 1 \(got"),
    "statistics": ("batch_norm_backward", 3, torch.ones(2, 8), ValueError, r"of \[3, 8\]"),
    "integers": ("pack", 0, torch.ones(3, dtype=torch.int64), ValueError, r"Expected x of float16"),
}  # fmt: skip


@pytest.mark.parametrize("backend", _backends())
@pytest.mark.parametrize("mistake", _MISTAKES.values(), ids=_MISTAKES)
def test_errors_name_the_argument(
    mistake: tuple[str, int, Any, type[Exception], str], backend: str
) -> None:
    name, place, other, error, words = mistake
    arguments = [*_calls()[name]]
    arguments[place] = other
    with pytest.raises(of_kernels(error), match=words):
        _call(_backends()[backend], name)(*arguments)


@pytest.mark.parametrize("backend", _backends())
def test_an_empty_tensor_has_no_widths(backend: str) -> None:
    ops = _backends()[backend]
    codes, stats = ops.pack(_normal(0), 2, 256, 0, _bytes(), 0)
    assert codes.shape == (0,) and stats.shape == (0, 2)
    how = 2, 256, torch.float32, None, None, None, _bytes()
    assert ops.unpack(codes, stats, [0, 3], *how).shape == (0, 3)
    none = torch.zeros(0, dtype=torch.int64)
    assert ops.unpack_rows(codes, stats, none, 0, 5, *how).shape == (0, 5)


def test_groups_of_any_size() -> None:
    """Sums of sizes and counts are not made where they would overflow."""
    x = _normal(600)
    for group_size in (2**32, 2**62, INT_MAX - 63):
        codes, stats = torch.ops.gact_graph.pack(x, 2, group_size, 0)
        y = torch.ops.gact_graph.unpack(codes, stats, [600], 2, group_size, x.dtype)
        assert (y - x).abs().max() <= stats[0, 1].float() * 1.01
        rows = torch.tensor([0, 5])
        some = torch.ops.gact_graph.unpack_rows(
            codes, stats, rows, 600, 100, 2, group_size, x.dtype
        )
        assert torch.equal(some, y.view(6, 100)[rows])
        packed = torch.ops.gact_graph.pack(x, 2, group_size, 0, _bytes(2), 20)
        assert torch.equal(packed[0], codes.view(-1)) and torch.equal(packed[1], stats)


REGISTERED = sorted(operators())


def test_every_operator_is_called_here() -> None:
    assert {*REGISTERED} == {name.split()[0] for name in _calls()} and len(REGISTERED) >= 19


@pytest.mark.parametrize("name", _calls())
def test_opcheck(name: str) -> None:
    """Its schema, its behavior under autograd, and its fake implementation."""
    torch.library.opcheck(_call(torch.ops.gact_graph, name).default, _copied(_calls()[name]))


@pytest.mark.parametrize(
    "name",
    [
        *("weighted_sum", "weighted_sum_backward", "segment_sum", "attention"),
        *("attention_backward", "leaky_attention", "leaky_attention_backward"),
        *("leaky_attention_source", "dot_attention", "dot_attention_backward", "restore_columns"),
    ],
)
def test_a_result_in_the_memory_of_an_argument_is_refused(name: str) -> None:
    out, *others = _calls()[name]
    for place, other in enumerate(others):
        if isinstance(other, Tensor) and other.is_floating_point():
            memory = torch.zeros(max(out.numel(), other.numel()))
            own = memory[: out.numel()].view_as(out).copy_(out)
            shared = memory[: other.numel()].view_as(other)
            with pytest.raises(RuntimeError, match="results and arguments of different memory"):
                _call(torch.ops.gact_graph, name)(
                    own, *others[:place], shared, *others[place + 1 :]
                )

"""Batch norm's backward and its reverse, in the memory of the input."""

from __future__ import annotations

import pytest
import torch
from samples import seeded
from torch import Tensor

from gact_graph.ops.batch_norm import batch_norm_backward, restore_columns
from gact_graph.ops.reference import batch_norm as reference


def _arguments(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    generator = seeded(rows)
    x = torch.randn(rows, columns, generator=generator, dtype=dtype) * 3 + 5
    gradient = torch.randn(rows, columns, generator=generator, dtype=dtype)
    deviation = (x.var(0, correction=0) + 1e-5).rsqrt()
    weight = torch.randn(columns, generator=generator, dtype=dtype)
    return [gradient, x, torch.stack([x.mean(0), deviation, deviation * weight])]


@pytest.mark.parametrize("rows", [2, 255, 1000, 70_001])
@pytest.mark.parametrize("columns", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_that_of_pytorch(rows: int, columns: int, dtype: torch.dtype) -> None:
    gradient, x, statistics = _arguments(rows, columns, dtype)
    mean, deviation, scale = statistics
    exact = [t.double() for t in (gradient, x, scale / deviation, mean, deviation)]
    of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        *(exact[0], exact[1], exact[2], None, None, exact[3], exact[4], True, 1e-5),
        [True, True, True],
    )
    bound = 1e-4 if dtype == torch.float32 else 1e-11
    for run in (batch_norm_backward, reference.batch_norm_backward):
        for in_place in (False, True):
            out = x.clone() if in_place else torch.empty_like(x)
            own = out if in_place else x
            sums = run(out, gradient, own, statistics)
            torch.testing.assert_close(out.double(), of_x, rtol=bound, atol=bound)
            products = sums[1].double() * deviation.double()
            torch.testing.assert_close(
                sums[0].double(), of_bias, rtol=bound, atol=bound * rows**0.5
            )
            torch.testing.assert_close(products, of_weight, rtol=bound, atol=bound * rows**0.5)


@pytest.mark.parametrize("rows", [1, 255, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restored_columns_have_the_given_mean_and_factor(rows: int, dtype: torch.dtype) -> None:
    _, x, statistics = _arguments(max(2, rows), 33, dtype)
    x, mean, factor = x[:rows], *statistics[:2].double()
    expected = (x.double() - x.double().mean(0)) * factor + mean
    for run in (restore_columns, reference.restore_columns):
        restored = x.clone()
        run(restored, statistics[:2].contiguous())
        torch.testing.assert_close(restored.double(), expected, rtol=1e-4, atol=1e-4)


def test_does_not_depend_on_threads() -> None:
    threads, found = torch.get_num_threads(), list[list[Tensor]]()
    arguments = _arguments(5000, 33, torch.float32)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, restored = torch.empty_like(arguments[0]), arguments[1].clone()
            restore_columns(restored, arguments[2][:2].contiguous())
            found.append([batch_norm_backward(out, *arguments), out, restored])
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def test_refuses_an_input_that_overlaps_in_part() -> None:
    gradient, x, statistics = _arguments(100, 8, torch.float32)
    memory = torch.cat([x, x])
    with pytest.raises(RuntimeError, match="memory"):
        batch_norm_backward(memory[50:150], gradient, memory[:100], statistics)

"""Comparisons of backward, read from gradients: of this PyTorch, and of another that is made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import Lambda
from seen import SeenFunctions, SeenOperations
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import gact_graph
from gact_graph.capture import sides
from gact_graph.codecs.reads import Side

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "threshold": lambda x: F.threshold(x, 0.25, 20.0),
    "hardtanh": lambda x: F.hardtanh(x, -0.25, 0.5),
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-0.25, 0.5),
    "clamp of one number": lambda x: x.clamp(0.25, 0.25),
    "clamp that crosses": lambda x: x.clamp(0.5, -0.25),
    "clamp min": lambda x: x.clamp(min=0.25),
    "clamp max": lambda x: x.clamp(max=0.25),
    "clamp_min": lambda x: x.clamp_min(0.25),
    "clamp_max": lambda x: x.clamp_max(0.25),
}
NUMBERS = (-0.25, 0.0, -0.0, 0.25, 0.5, 6.0, -1.0, 9.0, math.inf, -math.inf)


def gradient(
    function: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    numbers: tuple[float, ...] = (),
    **options: Any,
) -> Tensor:
    around = [
        float(torch.tensor(x, dtype=dtype).nextafter(torch.tensor(to, dtype=dtype)))
        for x in (0.0, 0.25, -0.25, 0.5, 6.0)
        for to in (-math.inf, math.inf)
    ]
    x = torch.tensor([*NUMBERS, *numbers, *around], dtype=dtype).repeat(256).requires_grad_()
    model = Lambda(lambda module, x: function(x * 1) * 2)
    if options:
        gact_graph.wrap(model, min_bytes=0, **options)
    out = model(x)
    out.backward(torch.full_like(out, 3.0))
    if options:
        assert {row.codec for row in gact_graph.report(model).contexts} == {"mask"}
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_at_the_bounds_and_beside_them(name: str, dtype: torch.dtype) -> None:
    function = OPERATIONS[name]
    # Of hardtanh, NaN has a gradient in some places of a tensor, and none in others.
    numbers = () if name in ("hardtanh", "relu6") else (math.nan,)
    expected = gradient(function, dtype, numbers)
    own = gradient(function, dtype, numbers, level="lossless")
    torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)


def test_an_operation_that_is_not_known() -> None:
    assert sides.find_tests().get("maximum") is None


class Clamp(torch.autograd.Function):
    """A clamp at 0.25 and 0.5 whose gradient is another than PyTorch's."""

    gradient: Callable[[Tensor], Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(sides._LOW, sides._HIGH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        return grad * Clamp.gradient(x)


@pytest.fixture
def clamp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Tensor], Tensor]], Any]]:
    """Return the test that is found for a clamp with a given gradient."""

    def found(gradient: Callable[[Tensor], Tensor]) -> str | None:
        Clamp.gradient = staticmethod(gradient)  # type: ignore[assignment]
        _, usual = sides._PROBES["clamp"]
        monkeypatch.setitem(sides._PROBES, "clamp", (Clamp.apply, usual))
        sides.find_tests.cache_clear()
        return sides.find_tests()["clamp"]

    yield found
    sides.find_tests.cache_clear()


def test_gradients_of_other_versions(clamp: Any) -> None:
    low, high = sides._LOW, sides._HIGH
    assert clamp(lambda x: (x >= low) & (x <= high)) == "within"
    assert clamp(lambda x: (x > low) & (x < high)) == "strictly_within"
    assert clamp(lambda x: (x >= low) & (x < high)) is None
    assert clamp(lambda x: torch.where(x == low, 0.5, 1.0)) is None
    assert clamp(lambda x: x) is None


def test_a_gradient_that_is_not_understood_keeps_the_tensor(clamp: Any) -> None:
    clamp(lambda x: x)
    model = Lambda(lambda module, x: (x * 1).clamp(-0.5, 0.5) * 2)
    gact_graph.wrap(model, min_bytes=0, level="lossless")
    x = torch.randn(4096, requires_grad=True)
    model(x).sum().backward()
    assert {row.codec for row in gact_graph.report(model).contexts} == {"keep"}


def test_the_search_takes_no_thread_and_no_mode_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits forever where a limit leaves no memory for its stack."""
    expected = sides.find_tests()
    sides.find_tests.cache_clear()
    monkeypatch.setattr(Thread, "start", None)
    seen: list[Any] = []
    hooked: list[Any] = []
    with (
        torch.no_grad(),
        torch.device("meta"),
        FakeTensorMode(),
        saved_tensors_hooks(hooked.append, hooked.append),
        SeenFunctions(seen),
        SeenOperations(seen),
    ):
        assert sides.find_tests() == expected
    assert not seen and not hooked


def test_a_captured_forward_has_searched_before_its_first_node() -> None:
    sides.find_tests.cache_clear()
    found = []
    model = Lambda(lambda module, x: found.append(sides.find_tests.cache_info().currsize) or x * 2)
    gact_graph.wrap(model, min_bytes=0)
    model(torch.randn(8, requires_grad=True)).sum().backward()
    assert found == [1]


def test_the_tests_of_the_probes_are_those_of_sides() -> None:
    x = torch.tensor([*sides._AROUND, math.nan])
    words = {
        (test, bounds): tuple(Side(test, bounds, 0.0, 1.0).words(x).tolist())
        for bounds in ((0.0,), (sides._LOW, sides._HIGH), (sides._LOW, None))
        for test in sides._ALTERNATIVES[len(bounds)]
    }
    assert len({*words.values()}) == len(words)  # the numbers show each difference

"""Operations whose backward writes a gradient over a decoded tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import controller_of, seeded
from torch import Tensor, nn

import gact_graph
from gact_graph.capture.in_place import backward_in_place
from gact_graph.capture.trace import Call
from gact_graph.codecs import Saved

ROWS, WIDTH = 600, 24


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gact_graph.capture.in_place._LEAST", 0)


def random(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    return values.requires_grad_()


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
    "relu": (F.relu, (random(9, 5),), {}),
    "relu of a method": (Tensor.relu, (random(9, 5),), {}),
    "scaled": (Tensor.mul, (random(9, 3, 4), random(1, 3, 4, seed=1)), {}),
    "scaled by fewer dimensions": (torch.mul, (random(9, 5), random(5, seed=1)), {}),
    "scaled constant": (torch.mul, (random(9, 5).detach(), random(5, seed=1)), {}),
    "linear": (F.linear, (random(9, 5), random(7, 5, seed=1), random(7, seed=2)), {}),
    "linear without bias": (F.linear, (random(9, 5), random(7, 5, seed=1)), {}),
    "linear of a constant": (F.linear, (random(9, 5).detach(), random(7, 5, seed=1)), {}),
    "addmm": (
        torch.addmm,
        (random(9, 7), random(9, 5, seed=1), random(5, 7, seed=2)),
        {"beta": 0.3, "alpha": 0.7},
    ),
    "addmm of itself": (torch.addmm, (random(9, 9), random(9, 9), random(9, 9, seed=2)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_pytorch(name: str) -> None:
    function, args, kwargs = CALLS[name]
    inputs = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]

    def run(*values: Tensor) -> Tensor:
        found = backward_in_place(Call(function, values, kwargs), may_reorder=True)
        assert found is not None
        return found()

    assert torch.equal(run(*inputs), function(*inputs, **kwargs))
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_gradients(name: str) -> None:
    """As ``torch.autograd.functional.jacobian(..., vectorize=True)`` has it."""
    function, args, kwargs = CALLS[name]
    found = backward_in_place(Call(function, args, kwargs), may_reorder=True)
    assert found is not None
    ours, stock = found(), function(*args, **kwargs)
    gradients = torch.randn(3, *stock.shape, generator=seeded(5), dtype=stock.dtype)
    inputs = [a for a in args if a.requires_grad]
    got = torch.autograd.grad(ours, inputs, gradients, is_grads_batched=True)
    expected = torch.autograd.grad(stock, inputs, gradients, is_grads_batched=True)
    torch.testing.assert_close(got, expected)


def test_a_batch_of_gradients_of_a_model() -> None:
    """Where one gradient would take the place of a decoded tensor, or of a dropout's noise."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Net(), nn.Dropout(0.3)), torch.randn(ROWS, WIDTH, generator=seeded(3))
    ours = gact_graph.wrap(copy.deepcopy(model), level="lossless", min_bytes=0)

    def gradients(net: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        parameters = [*net.parameters()]
        return torch.autograd.grad(
            net(x).sum(0), parameters, torch.eye(3), is_grads_batched=True, allow_unused=True
        )

    torch.testing.assert_close(gradients(ours), gradients(model))


@pytest.mark.parametrize("name", ["scaled constant", "linear of a constant", "addmm"])
def test_a_weight_may_change_where_rows_have_no_gradient(name: str) -> None:
    function, args, kwargs = CALLS[name]
    args = tuple(a.detach() for a in args)
    weight = args[-1 if name == "addmm" else 1].requires_grad_()
    found = backward_in_place(Call(function, args, kwargs), may_reorder=True)
    assert found is not None
    result = found()
    expected = torch.autograd.grad(function(*args, **kwargs).sum(), weight)
    with torch.no_grad():
        weight.mul_(0.5)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), weight), expected)


_X = random(9, 5)
OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
    "in place": (F.relu, (_X,), {"inplace": True}),
    "of a constant": (F.relu, (_X.detach(),), {}),
    "of integers": (torch.relu, (torch.arange(9),), {}),
    "not contiguous": (F.relu, (_X.t(),), {}),
    "of a number": (torch.mul, (_X, 2.0), {}),
    "row by row": (torch.mul, (_X, random(9, 1)), {}),
    "of two large tensors": (torch.mul, (_X, random(9, 5, seed=1)), {}),
    "of a constant factor": (torch.mul, (_X, random(5).detach()), {}),
    "of two dtypes": (torch.mul, (_X, random(5).detach().float().requires_grad_()), {}),
    "with three dimensions": (F.linear, (random(2, 9, 5), random(7, 5)), {}),
    "of a constant weight": (F.linear, (_X, random(7, 5).detach()), {}),
    "of a broadcast sum": (torch.addmm, (random(7), _X, random(5, 7)), {}),
    "another operation": (torch.sigmoid, (_X,), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_left_to_pytorch(name: str) -> None:
    function, args, kwargs = OTHERS[name]
    assert backward_in_place(Call(function, args, kwargs), may_reorder=True) is None


def test_small_tensors_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gact_graph.capture.in_place._LEAST", _X.numel() + 1)
    assert backward_in_place(Call(F.relu, (_X,), {}), may_reorder=True) is None


def test_sums_keep_their_order_where_nothing_is_quantized() -> None:
    for function, args, kwargs in CALLS.values():
        found = backward_in_place(Call(function, args, kwargs), may_reorder=False)
        assert (found is None) == (function not in (F.relu, Tensor.relu))


class Net(nn.Module):
    """Each of the operations once, between norms, so that its input has codes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.lin, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.factor = nn.Parameter(torch.randn(1, WIDTH, generator=seeded(1)))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=seeded(2)) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.lin(x)).relu()
        x = self.norms[1](x * self.factor)
        x = self.norms[2](torch.addmm(x, x.sin(), self.weight, beta=0.5))
        return self.last(x.cos())


@pytest.mark.parametrize("level", ["L1", "CB2", "lossless"])
def test_features_times_a_factor_that_is_computed(level: str) -> None:
    """A mask over features: neither is a parameter, and the features need no gradient."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.randn(WIDTH, generator=seeded(5)))
            self.lin = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x * self.mask.sigmoid())

    torch.manual_seed(0)
    model, x = Gate(), torch.randn(ROWS, WIDTH, generator=seeded(3))
    ours = gact_graph.wrap(copy.deepcopy(model), level=level, blocks="auto", min_bytes=0)
    for own, stock in zip(step(ours, x), step(model, x), strict=True):
        torch.testing.assert_close(own, stock)


def step(model: nn.Module, x: Tensor, twice: bool = False) -> list[Tensor]:
    out = model(x)
    gradient = torch.randn(out.shape, generator=seeded(4))
    if twice:
        out.backward(gradient, retain_graph=True)
        model.zero_grad()
    out.backward(gradient)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("level", ["L1", "L2", "lossless"])
@pytest.mark.parametrize("twice", [False, True])
def test_of_a_model(level: str, twice: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH, generator=seeded(3))
    bits = 32 if level == "lossless" else 16
    ours = gact_graph.wrap(copy.deepcopy(model), bits=bits, level=level, min_bytes=0)
    if level == "L2":
        controller_of(ours).swapping.least = 0  # or all would stay, as at L1
    expected = step(model, x)
    got = step(ours, x, twice)
    for own, stock in zip(got, expected, strict=True):
        if level == "lossless":
            assert torch.equal(own, stock)
        torch.testing.assert_close(own, stock, rtol=1e-2, atol=1e-2 * float(stock.abs().max()))


def test_slots_do_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def slots(least: int) -> list[str]:
        monkeypatch.setattr("gact_graph.capture.in_place._LEAST", least)
        torch.manual_seed(0)
        model = gact_graph.wrap(Net(), bits=4, min_bytes=0)
        step(model, torch.randn(ROWS, WIDTH, generator=seeded(3)))
        return [row.slot for row in gact_graph.report(model).contexts]

    assert slots(0) == slots(1 << 40)


def test_a_gradient_takes_the_place_of_the_decoded_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ReLU's mask, of the rows that a factor scales, and of the rows of matrix products."""
    decoded: list[Tensor] = []
    plain = Saved.tensor

    def tensor(saved: Saved) -> Tensor:
        decoded.append(plain(saved))
        return decoded[-1]

    torch.manual_seed(0)
    model = gact_graph.wrap(Net(), bits=4, min_bytes=0, adaptive=False)
    places: dict[str, int] = {}
    out = model(torch.randn(ROWS, WIDTH, generator=seeded(3)))
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]

        def record(results: Any, gradients: Any, name: str = node.name()) -> None:
            for result in results:
                if isinstance(result, Tensor) and result.shape == (ROWS, WIDTH):
                    places[name] = result.data_ptr()

        node.register_hook(record)
    monkeypatch.setattr(Saved, "tensor", tensor)
    out.sum().backward()
    memory = {t.data_ptr() for t in decoded}
    for name in ("_ReluBackward", "_ScaledBackward", "_AddmmBackward", "_LinearBackward"):
        assert places[name] in memory, name


class Scores(nn.Module):
    """Scores of two kinds from one product, as in GAT: backward computes the product once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        for name in ("source", "destination"):
            values = torch.randn(1, 2, WIDTH, generator=seeded(len(name)))
            setattr(self, name, nn.Parameter(values))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.project(self.norm(self.lin(x)).relu()).view(-1, 2, WIDTH)
        of_source, of_destination = (rows * self.source).sum(-1), (rows * self.destination).sum(-1)
        return of_source.tanh() * of_destination.sigmoid()


def test_a_decoded_tensor_that_two_operations_read_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gradients(least: int) -> list[Tensor]:
        monkeypatch.setattr("gact_graph.capture.in_place._LEAST", least)
        torch.manual_seed(0)
        model = gact_graph.wrap(Scores(), bits=4, min_bytes=0, adaptive=False)
        found = step(model, torch.randn(ROWS, WIDTH, generator=seeded(3)))
        saved = {row.slot: row.codec for row in gact_graph.report(model).contexts}
        assert saved["mul.input"] == "rebuild"
        return found

    for own, stock in zip(gradients(0), gradients(1 << 40), strict=True):
        torch.testing.assert_close(own, stock, rtol=1e-3, atol=1e-3 * float(stock.abs().max()))


def test_a_bias_of_two_dimensions_is_left_to_pytorch() -> None:
    args = random(9, 5), random(7, 5, seed=1), random(1, 7, seed=2)
    assert backward_in_place(Call(F.linear, args, {}), may_reorder=True) is None


def test_a_strided_gradient_of_relu_and_dropout_has_the_bits_of_pytorch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            h = F.dropout(F.relu(self.lin(x)), 0.5)
            return h.t().contiguous().view(-1, 64).softmax(-1)

    x, weights = (random(*shape).detach().float() for shape in ((1024, 128), (2048, 64)))
    stock = Net()
    own = gact_graph.wrap(copy.deepcopy(stock), level="lossless", min_bytes=0)
    for net in (stock, own):
        torch.manual_seed(1)
        (net(x) * weights).sum().backward()
    assert torch.equal(own.lin.bias.grad, stock.lin.bias.grad)
    assert torch.equal(own.lin.weight.grad, stock.lin.weight.grad)

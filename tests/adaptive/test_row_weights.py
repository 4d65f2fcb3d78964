"""Weights of rows: the effect of each row's noise on the gradient."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from samples import seeded
from torch import Tensor, nn

import gact_graph
from gact_graph.adaptive.row_weights import RowWeights

N, F = 2000, 256
CPU = torch.device("cpu")


def _of(weights: RowWeights, slot: str = "a") -> Tensor:
    found = weights.of(slot, CPU)
    assert found is not None
    return found


def test_weights_are_squares_over_their_mean_and_a_floor() -> None:
    square = torch.rand(50, generator=seeded(0)) ** 4
    weights = RowWeights()
    weights.add({"a": square})
    torch.testing.assert_close(_of(weights), 1 + square / square.mean() / 0.3, rtol=0.05, atol=0)
    assert weights.of("b", CPU) is None


def test_each_measurement_moves_them_halfway() -> None:
    first, second = torch.rand(2, 50, generator=seeded(0))
    weights = RowWeights()
    weights.add({"a": first})
    weights.add({"a": 100 * second})
    want = 1 + (first / first.mean() + second / second.mean()) / 0.6
    torch.testing.assert_close(_of(weights), want, rtol=0.1, atol=0)


@pytest.mark.parametrize("square", [torch.zeros(50), torch.full((50,), torch.inf)])
def test_a_gradient_of_zero_or_infinity_changes_nothing(square: Tensor) -> None:
    weights = RowWeights()
    weights.add({"a": torch.arange(50.0)})
    before = _of(weights)
    weights.add({"a": square})
    assert torch.equal(_of(weights), before)


def test_other_rows_start_anew() -> None:
    weights = RowWeights()
    weights.add({"a": torch.rand(50)})
    weights.add({"a": torch.ones(60)})
    assert torch.allclose(_of(weights), torch.tensor(4.333), rtol=0.05)
    weights.clear()
    assert weights.of("a", CPU) is None


def test_the_state_is_restored() -> None:
    weights, other = RowWeights(), RowWeights()
    weights.add({"a": torch.rand(5000), "b": torch.rand(3000)})
    state = weights.state_dict()
    other.check_state("state", state)
    other.load_state_dict(state)
    assert torch.equal(_of(other), _of(weights)) and torch.equal(_of(other, "b"), _of(weights, "b"))
    assert other.state_dict() == state


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ([], TypeError, "to map names of slots"),
        ({"a": 3}, TypeError, r"Expected state\['a'\] to be a str \(got int\)"),
        ({"a": "?"}, ValueError, r"Expected state\['a'\] to be bytes in base64 \(got "),
        ({"a": ""}, ValueError, r"Expected state\['a'\] to be bytes in base64 \(got "),
    ],
)
def test_other_states_are_refused(state: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RowWeights.check_state("state", state)


class Sparse(nn.Module):
    """A linear layer whose loss reads one row in twenty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(N, F, generator=seeded(1)))
        self.linear = nn.Linear(F, F)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear((self.first * x).sin())
        return out[:, :8] * (torch.arange(len(x)) % 20 == 0).float()[:, None]


def _wrapped(stock: nn.Module) -> nn.Module:
    return gact_graph.wrap(copy.deepcopy(stock), bits=2, min_bytes=0)


def _gradient(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().sum().backward()
    gradient = model.get_submodule("linear").weight.grad
    assert gradient is not None
    return gradient.clone()


def _row_weights(model: nn.Module) -> dict[str, str]:
    weights: dict[str, str] = gact_graph.state_dict(model)["adaptation"]["row_weights"]
    return weights


def test_rows_with_a_gradient_get_more_bits_and_the_gradient_is_unbiased() -> None:
    x = torch.randn(N, F, generator=seeded(2))
    torch.manual_seed(0)
    stock = Sparse()
    exact, model = _gradient(stock, x), _wrapped(stock)

    def errors() -> Tensor:
        return torch.stack([_gradient(model, x) - exact for _ in range(40)])

    _gradient(model, x)
    assert "linear/linear.input" in _row_weights(model)
    state = gact_graph.state_dict(model)
    found = errors()
    state["adaptation"]["row_weights"] = {}
    gact_graph.load_state_dict(model, state)
    without = errors()
    assert found.var(0).sum() < 0.3 * without.var(0).sum()
    assert found.mean(0).square().sum() < 3 * without.var(0).sum() / len(found)


def test_a_resumed_run_has_the_same_gradients() -> None:
    x = torch.randn(N, F, generator=seeded(2))
    model, other = _wrapped(stock := Sparse()), _wrapped(stock)
    for _ in range(2):
        _gradient(model, x)
    file = io.BytesIO()
    torch.save(gact_graph.state_dict(model), file)
    file.seek(0)
    gact_graph.load_state_dict(other, torch.load(file, weights_only=True))
    for _ in range(2):
        assert torch.equal(_gradient(model, x), _gradient(other, x))


def test_batches_have_no_weights() -> None:
    model = _wrapped(Sparse())
    for step in range(3):
        _gradient(model, torch.randn(N, F, generator=seeded(step)))
    assert not _row_weights(model)


def test_copies_keep_the_weights() -> None:
    x = torch.randn(N, F, generator=seeded(2))
    model = _wrapped(Sparse())
    _gradient(model, x)
    assert _row_weights(copy.deepcopy(model)) == _row_weights(model) != {}

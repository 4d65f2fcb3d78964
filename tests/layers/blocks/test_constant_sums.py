"""Sums of constant rows: their gradients, and that kept sums are up to date."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from samples import graph, one_thread  # noqa: F401
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCNConv, GINConv, LGConv, SAGEConv, SGConv, TAGConv

from gact_graph.api.controller import Controller
from gact_graph.api.install import install
from gact_graph.capture.config import Config
from gact_graph.layers.blocks.constant_sums import ConstantSums
from gact_graph.ops import cpu

X, EDGES = graph()
F, W = X.size(1), 48

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="needs a C++ compiler")


class TwoLayers(nn.Module):
    def __init__(self, first: nn.Module, width: int = W) -> None:
        super().__init__()
        self.first, self.second = first, GCNConv(width, 5)

    def forward(self, x: Tensor, edge_index: Tensor, *weight: Tensor) -> Tensor:
        hidden = self.first(x, edge_index, *weight).sigmoid()
        out: Tensor = self.second(hidden, edge_index)
        return out


NETS = {
    "GCN": lambda: TwoLayers(GCNConv(F, W)),
    "SAGE": lambda: TwoLayers(SAGEConv(F, W)),
    "SAGE, sum": lambda: TwoLayers(SAGEConv(F, W, aggr="sum")),
    "GIN": lambda: TwoLayers(GINConv(nn.Linear(F, W))),
    "TAG": lambda: TwoLayers(TAGConv(F, W, K=2)),
    "SG": lambda: TwoLayers(SGConv(F, W, K=2)),
}


def wrapped(model: nn.Module, keep: bool) -> Controller:
    """Run a model in blocks from now on."""
    config = Config(level="lossless", blocks="auto", min_bytes=0, keep_results=keep)
    return install(model, config, ("forward",)).controller


def sums_in(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an entry for each product with sums: whether these were kept."""
    seen: list[bool] = []
    multiply = ConstantSums.multiply

    def record(self: ConstantSums, factor: Tensor) -> Tensor:
        seen.append(self.kept is not None)
        return multiply(self, factor)

    monkeypatch.setattr(ConstantSums, "multiply", record)
    return seen


def step(model: nn.Module, x: Tensor = X, *weight: Tensor) -> list[Tensor]:
    """Return the gradients of a step."""
    model.zero_grad()
    model(x, EDGES, *weight).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def in_float64(make: nn.Module, x: Tensor = X, *weight: Tensor) -> list[Tensor]:
    model = make.double()
    return step(model, x.double(), *(w.double() for w in weight))


def assert_near(gradients: list[Tensor], expected: list[Tensor]) -> None:
    assert len(gradients) == len(expected)
    for own, true in zip(gradients, expected, strict=True):
        assert (own.double() - true).norm() <= 1e-5 * true.norm()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(2)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_stock(name: str, keep: bool) -> None:
    model, plain = NETS[name](), NETS[name]()
    plain.load_state_dict(model.state_dict())
    controller = wrapped(model, keep)
    expected = in_float64(plain)
    for _ in range(4):
        assert_near(step(model), expected)
    blocks = controller.blocks
    assert blocks is not None
    assert blocks.sums.nbytes == (EDGES.max() + 1) * F * 4 * keep
    assert controller.report.sum_bytes == blocks.sums.nbytes
    assert ("kept for the next step" in str(controller.report)) == keep


def test_sums_are_kept_from_the_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NETS["GCN"]()
    wrapped(model, keep=True)
    seen = sums_in(monkeypatch)
    for _ in range(3):
        step(model)
    assert seen == [False, True, True]


def _in_place(x: Tensor) -> Tensor:
    return x.mul_(-2)


def _through_numpy(x: Tensor) -> Tensor:
    x.numpy()[7, 3] += 1  # behind autograd
    return x


def _through_data(x: Tensor) -> Tensor:
    x.data[-1, -1] = 4
    return x


@pytest.mark.parametrize("change", [_in_place, _through_numpy, _through_data, torch.clone])
def test_changed_features(change: object) -> None:
    model, x = NETS["GCN"](), X.clone()
    plain = NETS["GCN"]()
    plain.load_state_dict(model.state_dict())
    wrapped(model, keep=True)
    for _ in range(3):
        step(model, x)
    x = change(x)  # type: ignore[operator]
    expected = in_float64(plain, x)
    for _ in range(3):
        assert_near(step(model, x), expected)


def test_changed_weights_of_edges() -> None:
    model, weight = NETS["GCN"](), torch.rand(EDGES.size(1))
    plain = NETS["GCN"]()
    plain.load_state_dict(model.state_dict())
    wrapped(model, keep=True)
    for _ in range(3):
        step(model, X, weight)
    weight[5] = 9
    assert_near(step(model, X, weight), in_float64(plain, X, weight))


def test_weights_with_a_gradient_are_no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weight = NETS["GCN"](), torch.rand(EDGES.size(1), requires_grad=True)
    wrapped(model, keep=True)
    seen = sums_in(monkeypatch)
    for _ in range(3):
        step(model, X, weight)
    assert seen == [] and weight.grad is not None


def assert_trains_as_stock(net: Callable[[], nn.Module]) -> None:
    model, plain = net(), net()
    plain.load_state_dict(model.state_dict())
    wrapped(model, keep=True)
    expected = in_float64(plain)
    for _ in range(4):
        assert_near(step(model), expected)


def test_two_layers_of_other_weights() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.normed = GCNConv(F, W, normalize=False), GCNConv(F, W)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.plain(x, edge_index).tanh() + self.normed(x, edge_index)
            return out

    assert_trains_as_stock(Both)


class Sum(nn.Module):
    """Leaves its sum over neighbors to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = LGConv(), nn.Linear(F, 1)
        self.last = torch.empty(0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.last = self.conv(x, edge_index)
        out: Tensor = self.linear(self.last)
        return out


def test_results_in_the_hands_of_the_caller() -> None:
    model = Sum()
    wrapped(model, keep=True)
    expected, held = LGConv()(X, EDGES), []
    for _ in range(5):
        step(model)
        held.append(model.last)
    with torch.no_grad():
        held[-1] += 1  # the results are the caller's
        held[-2] -= 1
    for result, change in zip(held, (0, 0, 0, -1, 1), strict=True):
        torch.testing.assert_close(result, expected + change)


@pytest.mark.parametrize("change", [_in_place, _through_numpy, _through_data])
def test_results_that_the_caller_changes(change: Callable[[Tensor], Tensor]) -> None:
    model = Sum()
    wrapped(model, keep=True)
    expected = LGConv()(X, EDGES)
    for _ in range(5):
        step(model)
        torch.testing.assert_close(model.last, expected)
        with torch.no_grad():
            change(model.last)
        model.last = torch.empty(0)


class Mixed(nn.Module):
    """Changes a sum in place whose rows another layer multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.plain = GCNConv(F, W, add_self_loops=False), LGConv()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        product: Tensor = self.product(x, edge_index).tanh()
        half = self.plain(x, edge_index).mul_(0.5)
        return product + half.sum(1, keepdim=True)


def test_results_that_the_model_changes_before_the_backward_of_a_product() -> None:
    assert_trains_as_stock(Mixed)


def test_products_share_their_sums_with_those_of_earlier_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = GCNConv(F, W, add_self_loops=False)
            self.other = GCNConv(F, W, add_self_loops=False)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.one(x, edge_index).tanh() + self.other(x, edge_index)
            return out

    model, held = Both(), []
    wrapped(model, keep=True)
    seen = sums_in(monkeypatch)
    for _ in range(3):
        held.append(model(X, EDGES))
    assert seen == [False] * 2 + [True] * 4


@pytest.mark.parametrize("keep", [False, True])
def test_features_that_change_before_backward(keep: bool) -> None:
    model, x = NETS["GCN"](), X.clone()
    wrapped(model, keep)
    for _ in range(2):
        step(model, x)
    loss = model(x, EDGES).square().sum()
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("keep", [False, True])
def test_second_derivative(keep: bool) -> None:
    model, plain = NETS["GCN"](), NETS["GCN"]()
    plain.load_state_dict(model.state_dict())
    wrapped(model, keep)

    def twice(model: nn.Module, x: Tensor) -> list[Tensor]:
        loss = model(x, EDGES).square().sum()
        first = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [*torch.autograd.grad(total, [*model.parameters()])]

    expected = twice(plain.double(), X.double())
    for _ in range(3):
        assert_near(twice(model, X), expected)


def test_sampled_batches_keep_nothing() -> None:
    model = NETS["GCN"]()
    controller = wrapped(model, keep=True)
    for _ in range(5):
        step(model, torch.randn_like(X))
        assert controller.blocks is not None and controller.blocks.sums.nbytes == 0


def test_unused_sums_are_dropped() -> None:
    model = NETS["GCN"]()
    controller = wrapped(model, keep=True)
    for _ in range(3):
        step(model)
    for _ in range(4):
        step(model, torch.randn_like(X))
    assert controller.blocks is not None and controller.blocks.sums.nbytes == 0


def test_products_are_kept_too() -> None:
    saved = {}
    for keep in (False, True):
        model = TwoLayers(GINConv(nn.Sequential(nn.Linear(F, W), nn.BatchNorm1d(W))))
        controller = wrapped(model, keep)
        step(model)
        rows = controller.report.contexts
        [saved[keep]] = [row.codec for row in rows if row.slot.endswith("batch_norm.input")]
    assert saved == {False: "rebuild", True: "keep"}


@pytest.mark.parametrize("keep", [False, True])
def test_a_checkpoint_around_the_layer(keep: bool) -> None:
    class Checkpointed(TwoLayers):
        def forward(self, x: Tensor, edge_index: Tensor, *weight: Tensor) -> Tensor:
            hidden = checkpoint(self.first, x, edge_index, use_reentrant=False).sigmoid()
            out: Tensor = self.second(hidden, edge_index)
            return out

    model, plain = Checkpointed(GCNConv(F, W)), NETS["GCN"]()
    plain.load_state_dict(model.state_dict())
    wrapped(model, keep)
    expected = in_float64(plain)
    for _ in range(3):
        assert_near(step(model), expected)

"""Saved tensors of which a mask shows the zeros: only the others are stored."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import distance, equal, gradients, make, one_thread, seeded, train_step  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import GCN, GraphSAGE

import gact_graph
from gact_graph.support.rows import Row

ROWS, WIDTH = 400, 64  # more elements than the least
X = torch.randn(ROWS, WIDTH, generator=seeded(1))
LOSSLESS = {"level": "lossless", "min_bytes": 0}
FOUR_BITS = {"bits": 4, "adaptive": False, "min_bytes": 0}


class Net(nn.Module):
    """A function between two linear layers."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).cumsum(0)))


def _dropout(h: Tensor) -> Tensor:
    return F.dropout(h, 0.5)


BETWEEN = {
    "relu": (F.relu, 0.5),
    "in place": (lambda h: h.relu_(), 0.5),
    "dropout": (_dropout, 0.5),
    "both": (lambda h: _dropout(F.relu(h)), 0.25),
    "a mask of floats": (lambda h: F.relu(h) * (torch.rand(h.shape) < 0.3).float(), 0.3),
}


def input_of(model: nn.Module, slot: str = "second/linear.input") -> Row:
    [row] = [row for row in gact_graph.report(model).contexts if row.slot == slot]
    return row


@pytest.mark.parametrize("name", BETWEEN)
def test_at_lossless_gradients_keep_their_bits(name: str) -> None:
    between, share = BETWEEN[name]
    net = make(lambda: Net(between))
    model = gact_graph.wrap(copy.deepcopy(net), **LOSSLESS)
    assert equal(train_step(model, X), train_step(net, X))
    row = input_of(model)
    if name == "dropout":  # of negative elements, which become -0
        assert row.codec == "keep"
        return
    assert row.codec == "nonzero"
    assert row.stored_bytes == 4 * row.numel == pytest.approx(4 * X.numel() * share, rel=0.2)


@pytest.mark.parametrize("name", BETWEEN)
def test_codes_are_those_of_the_other_elements(name: str) -> None:
    between, share = BETWEEN[name]
    net = make(lambda: Net(between))
    model = gact_graph.wrap(copy.deepcopy(net), **FOUR_BITS)
    assert distance(train_step(model, X), train_step(net, X)) < 0.1
    row = input_of(model)
    assert (row.codec, row.bits) == ("quantize", 4)
    assert row.numel == pytest.approx(X.numel() * share, rel=0.2)
    assert row.stored_bytes < 0.6 * row.numel  # codes, and statistics of groups


def test_the_gradient_is_unbiased() -> None:
    net = make(lambda: Net(lambda h: _dropout(F.relu(h))))
    exact = train_step(net, X)
    model = gact_graph.wrap(copy.deepcopy(net), bits=2, adaptive=False, min_bytes=0)
    mean = [torch.zeros_like(g) for g in exact]
    draws = 400
    for _ in range(draws):
        for total, g in zip(mean, train_step(model, X), strict=True):
            total += g / draws
    single = distance(train_step(model, X), exact)
    assert single > 0.02 and distance(mean, exact) < 2.5 * single / math.sqrt(draws)


def test_a_tensor_that_changed_after_its_mask_is_stored_whole() -> None:
    def between(h: Tensor) -> Tensor:
        h = _dropout(h)
        with torch.no_grad():
            h += 1  # the node of h stays that of the dropout
        return h

    net = make(lambda: Net(between))
    model = gact_graph.wrap(copy.deepcopy(net), **LOSSLESS)
    assert equal(train_step(model, X), train_step(net, X))
    assert input_of(model).codec == "keep"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_are_not_hidden(value: float) -> None:
    x = X.clone()
    x[7, 3] = value  # after ReLU: NaN, for which the mask has no bit, or Inf
    for settings in (LOSSLESS, FOUR_BITS):
        net = make(lambda: Net(lambda h: F.relu(h)))
        model = gact_graph.wrap(copy.deepcopy(net), **settings)
        mine, stock = train_step(model, x), train_step(net, x)
        for a, b in zip(mine, stock, strict=True):
            assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("model", [GCN, GraphSAGE])
def test_models_of_pyg_without_norms(model: Any, dropout: float) -> None:
    edges = torch.randint(ROWS, (2, 1600), generator=seeded(2))
    net = make(lambda: model(WIDTH, WIDTH, 3, 5, dropout=dropout))
    stored = {}
    for name, settings in (("lossless", LOSSLESS), ("codes", FOUR_BITS)):
        wrapped = gact_graph.wrap(copy.deepcopy(net), blocks=3, **settings)
        for step in range(2):  # the first one traces the layers
            mine, stock = train_step(wrapped, X, edges), train_step(net, X, edges)
            assert distance(mine, stock) < (1e-5 if name == "lossless" else 0.2), step
        stored[name] = gact_graph.report(wrapped).contexts
    # Where SAGE's two linear layers read one tensor, the second is computed again.
    codecs = {row.codec for row in stored["lossless"] if row.slot.endswith("linear.input")}
    assert codecs & {"nonzero", "rebuild"}
    coded = {row.slot: row.numel for row in stored["codes"] if row.codec == "quantize"}
    share = 0.25 if dropout else 0.5
    few = [slot for slot, n in coded.items() if n == pytest.approx(share * X.numel(), rel=0.25)]
    assert len(few) >= 2 and all(slot.endswith("linear.input") for slot in few)


def test_weights_of_rows_apply_to_the_elements_that_remain() -> None:
    """Rows of many zeros and of few, with weights: each group gets the mean of its elements."""
    from gact_graph.codecs.group_widths import _means_by_group

    counts = torch.randint(0, 65, (500,), generator=seeded(3))
    weights = torch.rand(500, generator=seeded(4)) + 0.1
    by_element = weights.repeat_interleave(counts)
    whole = len(by_element) // 256
    expected = by_element[: whole * 256].view(whole, 256).mean(1)
    assert torch.allclose(_means_by_group(weights, counts, whole, 256), expected)


def test_adaptive_bits_measure_and_weigh_the_elements_that_remain() -> None:
    rows = 1 << 14
    x = torch.randn(rows, WIDTH, generator=seeded(5))
    model = make(lambda: Net(lambda h: _dropout(F.relu(h))))
    gact_graph.wrap(model, bits=3, adapt_interval=2, min_bytes=0)
    for _ in range(5):
        train_step(model, x)
    row = input_of(model)
    assert row.sensitivity is not None and row.numel < 0.3 * x.numel()
    report = gact_graph.report(model)
    assert report.average_bits == pytest.approx(3, abs=0.3)


def test_small_tensors_have_no_mask() -> None:
    model = make(lambda: Net(F.relu))
    gact_graph.wrap(model, **LOSSLESS)
    train_step(model, X[:100])
    assert "nonzero" not in {row.codec for row in gact_graph.report(model).contexts}


def test_retained_graphs_and_second_readers() -> None:
    class Two(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.between(self.first(x).cumsum(0))
            return self.second(h).sum() + (self.second(h) * 2).sum()

    net = make(lambda: Two(F.relu))
    model = gact_graph.wrap(copy.deepcopy(net), **LOSSLESS)
    net(X).backward()
    out = model(X)
    for _ in range(2):
        model.zero_grad()
        out.backward(retain_graph=True)
        assert equal(gradients(model), gradients(net))


def test_a_result_that_the_model_returns_needs_no_mask() -> None:
    class Returns(Net):
        def forward(self, x: Tensor) -> Any:
            h = F.relu(self.first(x).cumsum(0))
            return self.second(h), h

    net = make(lambda: Returns(F.relu))
    model = gact_graph.wrap(copy.deepcopy(net), **FOUR_BITS)
    for own in (model, net):
        out, h = own(X)
        (out.sum() + h.square().sum()).backward()
    assert distance(gradients(model), gradients(net)) < 1e-6  # the caller holds the tensor


def test_second_derivatives() -> None:
    net = make(lambda: Net(lambda h: F.relu(h).square()))
    model = gact_graph.wrap(copy.deepcopy(net), **LOSSLESS)
    found = []
    for own in (model, net):
        own.zero_grad()
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(own(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        found.append(gradients(own))
    assert equal(*found)

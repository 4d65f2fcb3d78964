"""Calls that save little are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from samples import (
    GraphNet,
    Mlp,
    distance,
    equal,
    graph,
    make,
    one_thread,  # noqa: F401
    train_step,
)
from torch import nn

import gact_graph

X, EDGES = graph()
STEP = 1 << 20  # more than a step of GraphNet on this graph saves
LEVELS = ["lossless", "L1", "CB2"]


def codecs_of(model):
    return {row.codec for row in gact_graph.report(model).contexts}


@pytest.mark.parametrize("level", LEVELS)
def test_a_small_step_is_that_of_stock(level):
    plain = make(GraphNet)
    model = gact_graph.wrap(make(GraphNet), level=level, bits=2, min_bytes=STEP)
    for step in range(3):
        assert equal(train_step(model, X, EDGES, seed=step), train_step(plain, X, EDGES, seed=step))
        report = gact_graph.report(model)
        assert 0 < report.raw_bytes == report.stored_bytes < STEP
        assert codecs_of(model) == {"keep"}
        assert report.spared_below == STEP
        assert "min_bytes=0" in str(report)
        assert report.to_dict()["spared_below"] == STEP


def test_the_default_leaves_a_small_step_alone():
    model = gact_graph.wrap(make(GraphNet), bits=2)
    assert equal(train_step(model, X, EDGES), train_step(make(GraphNet), X, EDGES))


@pytest.mark.parametrize("level", LEVELS)
def test_a_large_step_is_compressed_from_the_second_on(level):
    options = {"level": level, "bits": 4, "adaptive": False}
    model = gact_graph.wrap(make(GraphNet), min_bytes=1, **options)
    train_step(model, X, EDGES)
    assert gact_graph.report(model).rate > 1.2
    train_step(model, X, EDGES)
    report = gact_graph.report(model)
    assert report.spared_below is None
    whole = gact_graph.wrap(make(GraphNet), min_bytes=0, **options)
    for _ in range(2):
        train_step(whole, X, EDGES)
    assert report.stored_bytes == gact_graph.report(whole).stored_bytes


def test_the_first_call_compresses_after_min_bytes():
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))
    gact_graph.wrap(model, bits=4, min_bytes=3 * X.nbytes)
    model(X).sum().backward()
    rows = gact_graph.report(model).contexts
    kept = [row.codec == "keep" for row in rows[:-1]]  # the last is the result, which is kept
    assert kept == [True] * 2 + [False] * (len(kept) - 2)


def test_the_size_of_the_call_before_counts():
    model = gact_graph.wrap(make(GraphNet), bits=4, min_bytes=STEP)
    large = graph(nodes=4000, edges=20000)
    train_step(model, X, EDGES)
    for inputs, spared in ((large, True), (large, False), ((X, EDGES), False), ((X, EDGES), True)):
        train_step(model, *inputs)
        assert (gact_graph.report(model).spared_below is not None) == spared


def test_a_step_reports_the_small_method_whichever_ran_last():
    class Two(GraphNet):
        def score(self, x, edge_index):
            return torch.tanh(self.convs[0](x, edge_index))

    model = gact_graph.wrap(make(Two), bits=4, methods=("score",), min_bytes=STEP)
    large = graph(nodes=4000, edges=20000)
    for _ in range(3):
        model.score(X, EDGES).sum().backward()
        train_step(model, *large)
    assert codecs_of(model) > {"keep"}
    assert gact_graph.report(model).spared_below == STEP


def test_only_compressed_calls_are_measured():
    model = gact_graph.wrap(make(GraphNet), bits=4, min_bytes=STEP)
    for _ in range(3):
        train_step(model, X, EDGES)
    assert gact_graph.report(model).measurements == 0
    for _ in range(4):
        train_step(model, *graph(nodes=4000, edges=20000))
    assert gact_graph.report(model).measurements > 0
    assert all(row.sensitivity != 0 for row in gact_graph.report(model).contexts)


def test_an_edit_in_place_raises_as_in_stock():
    model = gact_graph.wrap(make(Mlp), min_bytes=STEP)
    for _ in range(2):
        out = torch.exp(model(X))
    out.sum().backward()

    class Editing(Mlp):
        def forward(self, x):
            h = torch.tanh(self.first(x))
            out = self.last(self.second(h))
            h.add_(1)
            return out

    model = gact_graph.wrap(make(Editing), min_bytes=STEP)
    for _ in range(2):
        out = model(X)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_weights_and_caches_do_not_count():
    # 4 MB of weights that linear and its transpose save.
    model = gact_graph.wrap(
        nn.Sequential(nn.Linear(32, 1 << 15), nn.Linear(1 << 15, 4)), bits=4, min_bytes=0
    )
    model(X[:1]).sum().backward()
    other = gact_graph.wrap(gact_graph.unwrap(model), bits=4, min_bytes=STEP)
    for _ in range(3):
        other(X[:1]).sum().backward()
        assert gact_graph.report(other).spared_below == STEP
        assert gact_graph.report(other).raw_bytes < STEP


def test_a_resumed_run_goes_on_alike():
    large = graph(nodes=4000, edges=20000)
    model = gact_graph.wrap(make(GraphNet), bits=2, min_bytes=STEP, adaptive=False)
    for _ in range(2):
        train_step(model, *large)
    twin = gact_graph.wrap(
        copy.deepcopy(gact_graph.unwrap(copy.deepcopy(model))),
        bits=2,
        min_bytes=STEP,
        adaptive=False,
    )
    gact_graph.load_state_dict(twin, gact_graph.state_dict(model))
    assert equal(train_step(twin, *large), train_step(model, *large))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [(-1, ValueError, r"0 or more \(got -1\)"), (1.5, TypeError, r"an int \(got float\)")],
)
def test_a_wrong_threshold_is_refused(value, error, words):
    with pytest.raises(error, match=f"Expected min_bytes to be {words}"):
        gact_graph.wrap(make(Mlp), min_bytes=value)


def test_l0_takes_account_of_small_steps_too():
    model = gact_graph.wrap(make(GraphNet), level="L0", min_bytes=STEP)
    for _ in range(2):
        train_step(model, X, EDGES)
    assert len(gact_graph.report(model).contexts) > 5


def test_an_error_within_a_small_call_leaves_no_trace():
    model = gact_graph.wrap(make(Mlp), min_bytes=STEP, bits=2)
    expected = train_step(model, X)
    with pytest.raises(RuntimeError):
        model(X[:, :5])
    assert equal(train_step(model, X), expected)
    assert distance(expected, train_step(make(Mlp), X)) == 0


class TestWhatThePeakCanFallBy:
    """A tensor is whole while it is encoded, and tensors kept by reference stay."""

    @staticmethod
    def wrapped(layers):
        return gact_graph.wrap(nn.Sequential(*layers), bits=4, min_bytes=2 * X.nbytes)

    def calls(self, model, count=4):
        for _ in range(count):
            model(X).sum().backward()
            yield gact_graph.report(model).spared_below is None

    def test_one_large_tensor_is_left_alone(self):
        wide = nn.Linear(X.size(1), 4 * X.size(1))
        model = self.wrapped([wide, nn.Tanh(), nn.Linear(4 * X.size(1), 1)])
        # The second call shows that the tensor which the first has kept is the only one.
        assert [*self.calls(model)] == [False, True, False, False]

    def test_several_are_not(self):
        layers = [layer for _ in range(5) for layer in (nn.Linear(X.size(1), X.size(1)), nn.Tanh())]
        assert [*self.calls(self.wrapped(layers))] == [False, True, True, True]

    def test_the_size_is_resumed(self):
        layers = [nn.Linear(X.size(1), 4 * X.size(1)), nn.Tanh(), nn.Linear(4 * X.size(1), 1)]
        other, model = self.wrapped(copy.deepcopy(layers)), self.wrapped(layers)
        assert [*self.calls(model)] == [False, True, False, False]
        gact_graph.load_state_dict(other, gact_graph.state_dict(model))
        assert [*self.calls(other)] == [False] * 4

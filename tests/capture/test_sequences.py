"""Forwards whose operations differ from step to step, so that a step predicts nothing of the next.
The oracle is stock PyTorch, and for names a model that saw no other step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from samples import equal, gradients, one_thread, seeded  # noqa: F401
from torch import nn
from torch_geometric.utils import scatter, softmax

import gact_graph

ROWS = 400
INDEX = torch.randint(ROWS, (900,), generator=seeded(1))
X = torch.randn(ROWS, 24, generator=seeded(2))


class Interrupted(Exception):
    pass


def _one_line(x, functions):
    """The same line of code calls any function."""
    for function in functions:
        x = function(x)
    return x


def _loss_of(x):
    return (x.exp() * x).mean(1, keepdim=True) + x


def _own_loss(x):
    return _loss_of(x)


def _selected(x, by_name):
    gathered = x.index_select(dim=0, index=INDEX) if by_name else x.index_select(0, INDEX)
    return scatter(gathered * gathered.sigmoid(), INDEX, 0, ROWS)


def _of_edges(x, whole):
    score = x.index_select(0, INDEX)
    weights = softmax(score, INDEX, num_nodes=ROWS) if whole else (score - score.max()).exp()
    return scatter(weights * score, INDEX, 0, ROWS)


STEPS = {
    "relu": lambda x: _one_line(x, [torch.relu, torch.tanh, lambda y: y * 3.0]),
    "exp": lambda x: _one_line(x, [torch.exp, torch.relu, lambda y: y * y]),
    "clamp": lambda x: _one_line(x, [lambda y: y.clamp(min=0.1), torch.log, torch.sigmoid]),
    "power": lambda x: _one_line(x, [lambda y: y**3, F.gelu, lambda y: y / (1 + y.abs())]),
    "by position": lambda x: _selected(x, by_name=False),
    "by name": lambda x: _selected(x, by_name=True),
    "softmax": lambda x: _of_edges(x, whole=True),
    "parts of one": lambda x: _of_edges(x, whole=False),
    "plain": _loss_of,
    "own loss": _own_loss,
}


class Changing(nn.Module):
    """Takes the named step, and raises after it if ``interrupted``."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.last = nn.Linear(24, 6)
        self.name, self.interrupted = "relu", False
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=seeded(3)) / 5)

    def forward(self, x):
        h = STEPS[self.name](self.first(x))
        if self.interrupted:
            raise Interrupted
        return self.last(h)


def _step(model, name):
    model.name = name
    model.zero_grad()
    model(X).square().mean().backward()
    return gradients(model)


def _slots(model):
    return {(row.slot, row.codec, row.bits) for row in gact_graph.report(model).contexts}


@pytest.mark.parametrize("interrupted", [False, True], ids=["whole", "after one that raised"])
def test_gradients_are_those_of_stock(interrupted):
    stock = Changing()
    model = gact_graph.wrap(copy.deepcopy(stock), bits=32, level="lossless", min_bytes=0)
    order = [*STEPS, *reversed(STEPS), *[*STEPS][::2], *[*STEPS][1::2]]
    for before, name in zip(order[-1:] + order, order, strict=False):
        if interrupted:
            model.name, model.interrupted = before, True
            with pytest.raises(Interrupted):
                model(X)
            model.interrupted = False
        assert equal(_step(model, name), _step(stock, name)), (before, name)


def test_slots_and_codecs_are_those_of_a_model_that_saw_no_other_step():
    options = {"bits": 4, "level": "L1", "blocks": False, "min_bytes": 0, "adaptive": False}
    model = gact_graph.wrap(Changing(), **options)
    for name in [*STEPS, *reversed(STEPS)]:
        alone = gact_graph.wrap(Changing(), **options)
        _step(alone, name)
        _step(model, name)
        assert _slots(model) == _slots(alone), name


def test_the_same_line_counts_as_a_loss_only_where_one_calls_it():
    model = gact_graph.wrap(
        Changing(), bits=4, level="L1", blocks=False, min_bytes=0, adaptive=False
    )
    for name, codec in [("plain", "quantize"), ("own loss", "keep")] * 2:
        _step(model, name)
        rows = {row.slot: row.codec for row in gact_graph.report(model).contexts}
        assert rows["exp.result"] == codec, rows


def test_memory_that_is_used_again_within_a_forward_is_another_context():
    """A side of relu's result is saved, and the result itself is freed: the next result takes its
    memory, and has the same shape and version."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.shifts = nn.Parameter(torch.randn(40, 24, generator=seeded(4)))

        def forward(self, x):
            for shift in self.shifts.unbind():
                x = (shift - x).relu()
            return x

    stock = Chain()
    model = gact_graph.wrap(copy.deepcopy(stock), bits=32, level="lossless", min_bytes=0)
    for net in (stock, model):
        net(X).sum().backward()
    assert torch.equal(model.shifts.grad, stock.shifts.grad)
    assert {row.codec for row in gact_graph.report(model).contexts} == {"mask"}

"""Random states and autocast, had again; others in place of parameters and buffers."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy
import torch
from torch import nn

from gact_graph import heap
from gact_graph.heap import give_back
from gact_graph.stand_ins import learning, stand_ins
from gact_graph.surroundings import Surroundings


def test_random_numbers_come_again_and_go_on_from_here():
    surroundings = Surroundings({"cpu"})
    first, others = torch.rand(5), (random.random(), numpy.random.rand())
    here = torch.get_rng_state()
    with suppress(KeyError), surroundings.again():
        assert torch.equal(torch.rand(5), first)
        assert (random.random(), numpy.random.rand()) == others
        raise KeyError
    assert torch.equal(torch.get_rng_state(), here)
    surroundings.restore_random_state()
    assert torch.equal(torch.rand(5), first)


def test_autocast_and_gradients_are_as_they_were():
    x = torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        surroundings = Surroundings({"cpu"})
    with torch.no_grad(), surroundings.again():
        assert (x @ x).dtype == torch.bfloat16
        assert torch.is_grad_enabled()
    assert (x @ x).dtype == torch.float32


def net():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight  # shared
    model[1].bias.requires_grad_(False)
    return model


def test_stand_ins_share_memory_and_buffers_do_not():
    model = net()
    parameters, buffers = [*model.parameters()], [*model.buffers()]
    with stand_ins(model) as leaves:
        assert len(leaves) == len(learning(model)) == 4
        assert model[2].weight is model[0].weight is not parameters[0]
        assert model[0].weight.data_ptr() == parameters[0].data_ptr()
        before = model[1].running_mean.clone()
        model(torch.randn(8, 4)).sum().backward()
        assert not torch.equal(model[1].running_mean, before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(p.grad is None for p in parameters) and torch.equal(buffers[0], torch.zeros(4))


def test_stand_ins_may_have_values_of_their_own():
    model = net()
    values = [torch.full_like(p, 2.0) for p in learning(model)]
    with suppress(KeyError), stand_ins(model, values) as leaves:
        assert len(leaves) == len(values)
        assert torch.equal(model[0].weight, values[0]) and model[0].weight is leaves[0]
        assert not model[1].bias.requires_grad
        raise KeyError
    assert not torch.equal(model[0].weight, values[0])


def test_the_heap_can_be_given_back_anywhere():
    give_back(torch.device("cpu"))
    give_back(torch.device("meta"))


def test_what_is_free_is_handed_back_where_it_is_much(monkeypatch):
    given = []
    monkeypatch.setattr(heap, "_trim", lambda: given.append)
    monkeypatch.setattr(heap, "_since", 0)
    piece = torch.empty(9 << 20, dtype=torch.uint8)
    for free, count in ((heap._MUCH, 0), (heap._MUCH + 1, 2)):
        monkeypatch.setattr(heap, "_info", lambda free=free: lambda: heap._Info(fordblks=free))
        for _ in range(16):
            heap.give_back_now_and_then(piece)
        assert len(given) == count
    for _ in range(16):
        heap.give_back_now_and_then(piece.to("meta"))
    assert len(given) == 2

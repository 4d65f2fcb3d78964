"""Replicas: what runs on them leaves no trace, and they hold what the module held."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from samples import equal
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from gact_graph.support.replica import CannotReplicate, Snapshot

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Pair = namedtuple("Pair", "one other")


def net():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight  # shared
    model[1].bias.requires_grad_(False)
    return model


def test_statistics_and_gradients_land_in_the_replica():
    model = net()
    held = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in held]
    snapshot = Snapshot(model)
    assert len(snapshot.learning) == 4
    with snapshot.replica(aliases=True) as replica:
        assert replica.module[2].weight is replica.module[0].weight is not held[0]
        assert replica.module[0].weight.data_ptr() == held[0].data_ptr()
        replica.module(X).sum().backward()
        assert not torch.equal(replica.module[1].running_mean, model[1].running_mean)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], held, strict=True))
    assert equal(held, before) and all(p.grad is None for p in model.parameters())


def test_values_of_their_own():
    model = net()
    snapshot = Snapshot(model)
    values = [torch.full_like(p, 2.0) for p in snapshot.learning]
    with snapshot.replica(values) as replica:
        assert torch.equal(replica.module[0].weight, values[0])
        assert replica.module[0].weight is replica.parameters[0]
        assert not replica.module[1].bias.requires_grad
    assert not torch.equal(model[0].weight, values[0])


class Odd(nn.Module):
    """Holds things in every way that there is."""

    __slots__ = ("slot",)

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.hidden = [nn.Linear(4, 4), {"deep": (nn.Linear(4, 4),)}]
        self.weights = [self.lin.weight, nn.Parameter(torch.ones(4))]
        self.bound = self.scaled
        self.partial = functools.partial(self.scaled, by=3.0)
        self.weak = weakref.ref(self.lin)
        self.items = OrderedDict(a=1)
        self.lists = defaultdict(list, a=[1])
        self.queue = deque([1], maxlen=3)
        self.pair = Pair(self.lin, 1)
        self.loop = []
        self.loop.append(self.loop)
        self.number, self.cache, self.memory = 1, None, torch.ones(4)
        self.slot = [1]

    def scaled(self, x, by=2.0):
        self.number += 1
        return x * by

    def forward(self, x):
        self.count += 1
        self.items["b"] = self.lists["a"].append(2)
        self.queue.append(2)
        self.slot.append(2)
        self.cache = self.partial(self.bound(self.weak()(x)))
        self.memory.add_(1)
        hidden = self.hidden[1]["deep"][0](self.hidden[0](self.cache))
        return self.pair.one(hidden) * self.weights[1] + self.lin(x) @ self.weights[0]


def contents(module):
    own = {k: repr(v) for k, v in vars(module).items()}
    return own | {"slot": repr(module.slot), "children": [*map(repr, module.children())]}


def test_no_attribute_of_any_kind_keeps_a_trace():
    model = Odd()
    before, held = contents(model), [*model.parameters(), *model.buffers()]
    expected = Odd()
    expected.load_state_dict(model.state_dict())
    for mine, theirs in zip(Snapshot(model).learning, Snapshot(expected).learning, strict=True):
        theirs.data.copy_(mine)
    with Snapshot(model).replica(own=True, watch=True) as replica:
        assert replica.module.loop[0] is replica.module.loop is not model.loop
        assert equal([replica.module(X)], [expected(X)])
        changed = replica.changes()
    assert contents(model) == before
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], held, strict=True))
    assert {"count", "items", "lists", "queue", "slot", "cache", "memory", "number"} == {*changed}


def test_gradients_of_everything_that_learns():
    model = Odd()
    model(X).sum().backward()
    snapshot = Snapshot(model)
    assert len(snapshot.learning) == 7
    expected = [p.grad.clone() for p in snapshot.learning]
    for values in (None, [p.detach().clone() for p in snapshot.learning]):
        with snapshot.replica(values, own=True) as replica:
            found = torch.autograd.grad(replica.module(X).sum(), replica.parameters)
        assert equal([*found], expected)


def test_hooks_on_parameters_do_not_run():
    model, ran = nn.Linear(4, 4), []
    model.weight.register_hook(lambda gradient: ran.append(1))
    model.bias.register_post_accumulate_grad_hook(lambda parameter: ran.append(2))
    with Snapshot(model).replica() as replica:
        torch.autograd.grad(replica.module(X).sum(), replica.parameters)
    assert ran == []


@pytest.mark.parametrize(
    "normalised",
    [weight_norm, parametrizations.weight_norm, parametrizations.spectral_norm],
    ids=["weight_norm", "parametrized weight_norm", "spectral_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_parametrizations(normalised):
    model = normalised(nn.Linear(4, 4))
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    snapshot = Snapshot(model)
    with snapshot.replica() as replica:
        found = [*torch.autograd.grad(replica.module(X).square().sum(), replica.parameters)]
    assert equal([*model.parameters(), *model.buffers()], before)
    model(X).square().sum().backward()
    assert equal(found, [p.grad for p in snapshot.learning])


def test_a_recurrent_layer():
    model = nn.LSTM(4, 4, batch_first=True)  # holds its weights in a list besides
    model(X[None])[0].sum().backward()
    snapshot = Snapshot(model)
    for values in (None, [p.detach().clone() for p in snapshot.learning]):
        with snapshot.replica(values) as replica:
            found = torch.autograd.grad(replica.module(X[None])[0].sum(), replica.parameters)
        assert equal([*found], [p.grad for p in model.parameters()])


class Guarded(nn.Module):
    """Lets nobody set an attribute, and makes some up."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        object.__setattr__(self, "sealed", True)

    def __setattr__(self, name, value):
        if "sealed" in self.__dict__:
            raise TypeError(name)
        super().__setattr__(name, value)

    def __getattr__(self, name):
        return 3 if name == "three" else super().__getattr__(name)

    def forward(self, x):
        return self.lin(x) * self.three


def test_a_class_with_its_own_rules():
    model = Guarded()
    with Snapshot(model).replica() as replica:
        assert torch.equal(replica.module(X), model(X))


def test_what_an_attribute_held_then_is_seen_later():
    model = Odd()
    snapshot = Snapshot(model)
    model.number, model.training = 5, False
    with snapshot.replica() as replica:
        assert replica.module.number == 1 and replica.module.training


@pytest.mark.parametrize("fate", ["deleted", "changed in place"])
def test_a_tensor_that_is_not_what_it_was_raises_when_it_is_read(fate):
    model = Odd()
    snapshot = Snapshot(model)
    if fate == "deleted":
        model.memory = None
    else:
        model.memory.add_(1)
    with snapshot.replica() as replica:
        memory = replica.module.memory
        for read in (lambda: X * memory, lambda: memory + 1, lambda: memory[0], lambda: memory.T):
            with pytest.raises(RuntimeError, match=f"attribute memory .* was {fate} since"):
                read()
        for read in (lambda: torch.cat([X[0], memory]), lambda: torch.add(input=X, other=memory)):
            with pytest.raises(RuntimeError, match=f"attribute memory .* was {fate} since"):
                read()


def test_a_snapshot_keeps_no_old_cache_alive():
    model = Odd()
    model.memory = [torch.ones(100)]
    memory = weakref.ref(model.memory[0])
    snapshot = Snapshot(model)
    model.memory = None
    assert memory() is None and snapshot.learning


def test_a_replica_is_gone_after_its_use():
    model = Odd()
    gc.disable()
    try:
        with Snapshot(model).replica() as replica:
            gone = weakref.ref(replica.module), weakref.ref(replica.module.lin)
        del replica
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_replicas_of_data_parallel():
    model = nn.Linear(4, 4)
    other = model._replicate_for_data_parallel()
    other._former_parameters = OrderedDict()
    for name, parameter in model.named_parameters():
        copied = parameter * 1
        setattr(other, name, copied)
        other._former_parameters[name] = copied
    snapshot = Snapshot(other)
    with snapshot.replica() as replica:
        found = torch.autograd.grad(replica.module(X).sum(), replica.parameters)
    model(X).sum().backward()
    assert equal([*found], [model.weight.grad, model.bias.grad])


def test_what_cannot_be_replicated():
    with pytest.raises(CannotReplicate, match="first forward initialises"):
        Snapshot(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(CannotReplicate, match="first forward initialises"):
        Snapshot(nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(CannotReplicate, match="scripted"):
        Snapshot(nn.Sequential(torch.jit.script(nn.BatchNorm1d(4))))


def test_a_scripted_module_stands_for_itself():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    snapshot = Snapshot(model)
    with snapshot.replica() as replica:
        found = torch.autograd.grad(replica.module(X).sum(), replica.parameters)
    model(X).sum().backward()
    assert equal([*found], [p.grad for p in model.parameters()])


def test_a_method_of_the_instance_runs_on_the_replica():
    model = nn.Linear(4, 4)
    model.forward = types.MethodType(lambda self, x: x * self.factor, model)
    model.factor = 2
    snapshot = Snapshot(model)
    model.factor = 3
    with snapshot.replica() as replica:
        assert torch.equal(replica.module(X), X * 2)

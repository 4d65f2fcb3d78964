"""Tracing layers and computing them again changes no state of the model, and no gradient."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import os
import sys
import threading
from collections import Counter, OrderedDict

import pytest
import torch
from samples import equal, gradients, graph, make, one_thread  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    SSGConv,
    TransformerConv,
)

import gact_graph
from gact_graph.support.storage import tensors_in

X, EDGES = graph()
EXACT = {
    "lossless in blocks": {"level": "lossless", "blocks": 64},
    "CB2, no blocks": {"level": "CB2", "bits": 32, "adaptive": False, "blocks": False},
    "CB2": {"level": "CB2", "bits": 32, "adaptive": False, "blocks": 64},
}


@pytest.fixture(params=EXACT)
def exact(request):
    return EXACT[request.param]


def close(got, expected):
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, expected, strict=True)
    )


class Net(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.first, self.conv = nn.Linear(32, 32), conv

    def forward(self, x, edges):
        return self.conv(torch.tanh(self.first(x)), edges)


def train(model, steps=2, x=X):
    results = []
    for _ in range(steps):
        model.zero_grad()
        out = model(x, EDGES)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        results += [out.detach(), *gradients(model)]
    return results


class Remembers(MessagePassing):
    """Stores a tensor at its first forward, as caching layers do, and counts."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(32, 32)
        self.seen, self.calls, self.log, self.first = None, 0, [], None

    def forward(self, x, edge_index):
        self.calls += 1
        self.log.append(self.calls)
        h = self.propagate(edge_index, x=self.lin(x))
        if self.seen is None:
            self.seen = {"norm": h.detach().abs().mean(0) + 1.0}
            self.first = h.detach()
        return h / self.seen["norm"] + self.first


CACHES = {
    "SGConv": (lambda: SGConv(32, 16, K=2, cached=True), False),
    "SSGConv": (lambda: SSGConv(32, 16, alpha=0.2, K=2, cached=True), False),
    "GCNConv": (lambda: GCNConv(32, 16, cached=True), True),
    "a module of one's own": (Remembers, True),
}


def state(module):
    """Every attribute of every submodule, as far as it can be compared."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value if isinstance(value, int | float | str | type(None)) else None

    return {
        f"{name}.{key}": plain(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in ("forward", "propagate", "edge_updater")
        and not key.endswith("_hooks")
        and "_hooks_" not in key
        and key not in ("_modules", "_parameters")
    }


def same(left, right):
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.allclose(left, right, rtol=1e-4, atol=1e-5)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


class TestCaches:
    @pytest.mark.parametrize("name", CACHES)
    def test_all_attributes_and_gradients_are_those_of_stock(self, name, exact):
        build, learns_before = CACHES[name]
        nets = [make(lambda: Net(build())) for _ in "ab"]
        if not learns_before:  # else stock itself fails: its cache holds the first graph
            for net in nets:
                net.first.requires_grad_(False)
        expected = train(nets[0], steps=3)
        got = train(gact_graph.wrap(nets[1], min_bytes=0, **exact), steps=3)
        assert close(got, expected)
        stock, wrapped = state(nets[0]), state(nets[1])
        assert [key for key in stock if not same(stock[key], wrapped[key])] == []


class Step(MessagePassing):
    """Reads its own state in ``message``, as set around each call of propagate."""

    def __init__(self, learns):
        super().__init__()
        self.k, self.table, self.lin = 0, {"scale": 1.0}, nn.Linear(32, 32)
        self.gate = nn.Dropout(0.0)
        self.learns = learns

    def forward(self, x, edge_index):
        for k in range(3):
            self.k, self.table["scale"] = k + 1, 1.0 / (k + 1)
            self.lin.training = k == 1
            x = torch.tanh(self.propagate(edge_index, x=x)) * 0.3
        return x

    def message(self, x_j):
        out = torch.sin(self.k * x_j) * self.table["scale"]
        return self.lin(out) * (2.0 if self.lin.training else 1.0) if self.learns else out


class TestPlainState:
    @pytest.mark.parametrize("learns", [False, True])
    def test_a_block_sees_what_it_saw_in_forward(self, exact, learns):
        expected = train(make(lambda: Net(Step(learns))))
        assert close(
            train(gact_graph.wrap(make(lambda: Net(Step(learns))), min_bytes=0, **exact)), expected
        )

    def test_attributes_set_between_forward_and_backward_do_not_count(self, exact):
        def step(model):
            out = model(X, EDGES).square().sum()
            model.conv.k, model.conv.learns = 100, False
            model.eval()
            model.conv.requires_grad_(False)
            out.backward()
            return [p.grad for p in model.first.parameters()]

        model = gact_graph.wrap(make(lambda: Net(Step(True))), min_bytes=0, **exact)
        assert close(step(model), step(make(lambda: Net(Step(True)))))

    def test_a_tensor_changed_in_place_is_an_error(self, exact):
        class Scaled(GCNConv):
            def message(self, x_j, edge_weight):
                return super().message(x_j, edge_weight).sin() * self.scale

        model = gact_graph.wrap(make(lambda: Net(Scaled(32, 16))), min_bytes=0, **exact)
        model.conv.scale = torch.ones(16)
        out = model(X, EDGES)
        model.conv.scale.mul_(2)
        with pytest.raises(RuntimeError, match="is at version 1"):
            out.sum().backward()

    def test_tensors_that_learn_from_elsewhere(self, exact):
        """In a list of the layer's, in a closure, and made by another module."""

        class Elsewhere(MessagePassing):
            def __init__(self, other, closure):
                super().__init__()
                self.others, self.closure = [other], closure

            def forward(self, x, edge_index):
                out = self.propagate(edge_index, x=self.others[0](x))
                return self.closure(out) * self.made

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
                self.conv = Elsewhere(self.first, lambda x: self.second(x))

            def forward(self, x, edges):
                self.conv.made = self.third.weight[0].sin()
                return self.conv(x, edges)

        expected = train(make(Outer))
        assert close(train(gact_graph.wrap(make(Outer), min_bytes=0, **exact)), expected)

    def test_buffers_are_what_they_were(self, exact):
        """A statistic that the layer itself moves in forward, and reads."""

        class Copies(GINConv):  # stock refuses to change in place what backward reads
            def __init__(self):
                super().__init__(nn.Linear(32, 32))
                self.register_buffer("scale", torch.ones(32))

            def forward(self, x, edge_index):
                out = super().forward(x * self.scale.clone(), edge_index)
                self.scale.mul_(0.5)
                return out

        def two_forwards(model):
            (model(X, EDGES).sin().sum() + model(X, EDGES).sin().sum()).backward()
            return [*gradients(model), model.conv.scale.clone()]

        expected = two_forwards(make(lambda: Net(Copies())))
        got = two_forwards(gact_graph.wrap(make(lambda: Net(Copies())), min_bytes=0, **exact))
        assert close(got, expected)


SECOND = {
    "jvp": torch.autograd.functional.jvp,
    "hvp": lambda f, x, v: torch.autograd.functional.hvp(lambda x: f(x).square().sum(), x, v),
    "vhp": lambda f, x, v: torch.autograd.functional.vhp(lambda x: f(x).square().sum(), x, v),
    "hessian": lambda f, x, v: torch.autograd.functional.hessian(
        lambda s: f(x * s).square().sum(), torch.ones(())
    ),
    "a penalty": lambda f, x, v: penalty(lambda x: f(x).square().sum(), x),
    # Its gradient does not depend on what comes before backward.
    "a penalty, of a linear loss": lambda f, x, v: penalty(lambda x: f(x).sum(), x),
}


def penalty(loss, x):
    x = x.clone().requires_grad_()
    [gradient] = torch.autograd.grad(loss(x), x, create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize("build", [lambda: GATConv(32, 8), lambda: GCNConv(32, 8)], ids=["a", "c"])
class TestSecondDerivatives:
    @pytest.mark.parametrize("how", SECOND)
    @pytest.mark.parametrize("level", ["CB2, no blocks", "CB2"])
    def test_are_those_of_stock(self, level, build, how):
        """A layer that runs again in backward can be differentiated twice."""
        stock = make(lambda: Net(build()))
        model = gact_graph.wrap(copy.deepcopy(stock), min_bytes=0, **EXACT[level])
        if how == "hvp" and level == "CB2":  # torch takes it from a third one, which blocks lack
            with pytest.raises(RuntimeError, match="For third derivatives"):
                SECOND[how](lambda x: model(x, EDGES), X, torch.ones_like(X))
            return
        got = SECOND[how](lambda x: model(x, EDGES), X, torch.ones_like(X))
        expected = SECOND[how](lambda x: stock(x, EDGES), X, torch.ones_like(X))
        if got is None:
            got, expected = gradients(model), gradients(stock)
        # In float32, beside the size of the whole.
        for a, b in zip(tensors_in(got), tensors_in(expected), strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()

    @pytest.mark.parametrize(
        "options", [{"level": "L1", "bits": 32}, {"level": "lossless"}, EXACT["lossless in blocks"]]
    )
    def test_of_other_levels(self, options, build):
        model = make(lambda: Net(build()))
        wrapped = gact_graph.wrap(copy.deepcopy(model), adaptive=False, min_bytes=0, **options)
        for net in (model, wrapped):
            penalty(lambda x, net=net: net(x, EDGES).sin().sum(), X)
        assert close(gradients(wrapped), gradients(model))


def in_threads(jobs):
    errors = []

    def run(job):
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


THREADED = EXACT | {
    "adaptive": {"level": "L1", "bits": 8, "adapt_interval": 2},
    "adaptive CB2": {"level": "CB2", "bits": 8, "adapt_interval": 2},
}


@pytest.fixture
def switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
class TestThreads:
    @pytest.mark.parametrize("shared", [True, False], ids=["one model", "a model each"])
    @pytest.mark.parametrize("options", THREADED.values(), ids=THREADED)
    def test_gradients_are_right_and_parameters_stay(self, options, shared):
        def build():
            return Net(TransformerConv(32, 16, heads=2))

        count, steps = 3, 4
        model = gact_graph.wrap(make(build), min_bytes=0, **options)
        models = [
            model if shared else gact_graph.wrap(make(build), min_bytes=0, **options)
            for _ in range(count)
        ]
        held = [[*m.parameters()] for m in models]
        expected = make(build)
        xs = [X * (i + 1) for i in range(count)]
        gradients_of = [[] for _ in range(count)]

        def gradient(model, x):
            out = model(x, EDGES).sin().sum()
            gradients = torch.autograd.grad(out, [*model.parameters()])
            return torch.cat([g.flatten() for g in gradients])

        def job(i):
            gradients_of[i] += [gradient(models[i], xs[i]) for _ in range(steps)]

        in_threads([lambda i=i: job(i) for i in range(count)])
        bound = 0.2 if options.get("bits") == 8 else 1e-5
        for got, x in zip(gradients_of, xs, strict=True):
            stock = gradient(expected, x)
            assert all((result - stock).norm() <= bound * stock.norm() for result in got)
        for m, before in zip(models, held, strict=True):
            assert all(a is b for a, b in zip(m.parameters(), before, strict=True))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale = GATConv(32, 16), 1.0

    def forward(self, x, edges):
        return self.conv(x, edges) * self.scale


COPIES = EXACT | {"L1": {"level": "L1", "bits": 32, "adaptive": False}}


class TestCopies:
    @pytest.mark.parametrize("options", COPIES.values(), ids=COPIES)
    def test_a_shallow_copy_runs_as_itself(self, options):
        model = gact_graph.wrap(make(Scaled), min_bytes=0, **options)
        expected = model(X, EDGES).detach()
        other = copy.copy(model)
        other.scale = 2.0
        assert close([other(X, EDGES)], [2 * expected])
        assert close([model(X, EDGES)], [expected])
        third = copy.copy(other)
        third.scale = 3.0
        assert close([third(X, EDGES)], [3 * expected])
        del model
        gc.collect()
        assert close([other(X, EDGES)], [2 * expected])

    def test_a_copy_that_a_hook_stops_leaves_the_original_alone(self):
        model = gact_graph.wrap(make(Scaled), min_bytes=0, **COPIES["L1"])
        expected = model(X, EDGES).detach()
        other = copy.copy(model)
        other.scale = 2.0

        def stop(module, args):
            if module is other:
                raise KeyError("no")

        hook = other.register_forward_pre_hook(stop)  # of both: copies share their hooks
        with pytest.raises(KeyError, match="no"):
            other(X, EDGES)
        assert close([model(X, EDGES)], [expected])
        hook.remove()
        assert close([other(X, EDGES)], [2 * expected])

    @pytest.mark.parametrize("options", COPIES.values(), ids=COPIES)
    def test_replicas_of_data_parallel_run_their_own_parameters(self, options):
        model, stock = gact_graph.wrap(make(Scaled), min_bytes=0, **options), make(Scaled)
        train(model, steps=1)

        def replicate(module):
            """As torch.nn.parallel.replicate does, which needs several GPUs."""
            made = {m: m._replicate_for_data_parallel() for m in module.modules()}
            for original, replica in made.items():
                replica._former_parameters = OrderedDict()
                for name, child in original._modules.items():
                    replica._modules[name] = None if child is None else made[child]
                for name, parameter in original._parameters.items():
                    if parameter is None:
                        replica._parameters[name] = None
                    else:
                        copied = parameter * 0.5
                        setattr(replica, name, copied)
                        replica._former_parameters[name] = copied
            return made[module]

        results = []
        for net in (model, stock):
            net.zero_grad()
            replicas = [replicate(net) for _ in range(2)]
            outs = [replica(X, EDGES) for replica in replicas]
            sum(out.sin().sum() for out in outs).backward()
            results.append([*(out.detach() for out in outs), *gradients(net)])
        assert close(*results)

    def test_a_method_of_a_deleted_module_says_so(self):
        model = gact_graph.wrap(make(Scaled), level="L1")
        forward = model.forward
        del model
        gc.collect()
        with pytest.raises(RuntimeError, match="deleted module"):
            forward(X, EDGES)


@pytest.mark.parametrize("name", [None, "__exit__"], ids=["any", "exit"])
@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_a_keyboard_interrupt_anywhere_leaves_the_model_alone(options, name):
    """Raised where some functions of ours begin: Python looks for signals there.

    Not at any line: a tracer may raise between the last line of a ``with`` and its ``__exit__``,
    where no signal ever comes, and then no ``with`` is left in order.
    """
    model = gact_graph.wrap(make(lambda: Net(GATConv(32, 16))), min_bytes=0, **options)
    expected = train(model, steps=1)
    parameters, buffers = [*model.parameters()], [*model.buffers()]
    count = 0

    def is_ours(frame):
        if not frame.f_code.co_filename.startswith(os.path.dirname(gact_graph.__file__)):
            return False
        if name not in (None, frame.f_code.co_name):
            return False
        # One that is dropped halfway is closed, and Python drops what it raises then.
        is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        return not is_generator or frame.f_back.f_code.co_filename == contextlib.__file__

    def tracer(at):
        def trace(frame, event, argument):
            nonlocal count
            if is_ours(frame):
                count += 1
                if count == at:
                    raise KeyboardInterrupt

        return trace

    def step(at):
        nonlocal count
        count = 0
        threading.settrace(tracer(at))
        sys.settrace(tracer(at))
        try:
            train(model, steps=1)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            threading.settrace(None)
        return False

    assert not step(-1)
    calls = count
    # The heap is given back now and then, with some calls more.
    raised = 0
    for at in range(7, calls, calls // 40) if name is None else range(1, calls + 1):
        raised += step(at)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert torch._C._len_torch_function_stack() == 0
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert raised > 30 or (name is not None and raised == calls)
    assert equal(train(model, steps=1), expected)


LEVELS = {
    "blocks": {"level": "L1", "blocks": 64},
    "CB2, no blocks": {"level": "CB2", "blocks": False},
    "CB2": {"level": "CB2"},
}


@pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
def test_the_number_of_objects_levels_off(options):
    model = gact_graph.wrap(
        make(lambda: Net(GATConv(32, 16))), adaptive=False, min_bytes=0, **options
    )

    def count(steps):
        for _ in range(steps):
            train(model, steps=1, x=X)
        gc.collect()
        return Counter(type(o).__name__ for o in gc.get_objects())

    count(5)
    before = count(5)
    grown = {k: n - before[k] for k, n in count(12).items() if n - before[k] > 10}
    assert grown == {}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_activation_checkpointing_around_the_model(options, reentrant):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Net(GATConv(32, 32)), Net(SAGEConv(32, 32, aggr="max"))

        def forward(self, x, edges):
            return self.second(self.first(x, edges), edges)

    def steps(model):
        results = []
        for _ in range(3):
            model.zero_grad()
            x = X.clone().requires_grad_()
            checkpoint(model, x, EDGES, use_reentrant=reentrant).sin().sum().backward()
            results += [x.grad, *gradients(model)]
        return results

    expected = steps(make(Stack))
    assert close(steps(gact_graph.wrap(make(Stack), min_bytes=0, **options)), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("min_bytes", [0, 1 << 24])
@pytest.mark.parametrize("level", ["L1", "CB2"])
def test_activation_checkpointing_inside_the_model(level, min_bytes, reentrant):
    """At the library's default too, which leaves calls as small as these alone."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = GATConv(32, 32), SAGEConv(32, 32, aggr="max")

        def forward(self, x, edges):
            h = checkpoint(self.first, x, edges, use_reentrant=reentrant)
            return checkpoint(self.second, h.tanh(), edges, use_reentrant=reentrant)

    def steps(model):
        results = []
        for _ in range(3):
            model.zero_grad()
            x = X.clone().requires_grad_()
            model(x, EDGES).sin().sum().backward()
            results += [x.grad, *gradients(model)]
        return results

    expected = steps(make(Stack))
    options = {"level": level, "bits": 32, "adaptive": False, "min_bytes": min_bytes}
    assert close(steps(gact_graph.wrap(make(Stack), **options)), expected)

"""Many steps, changing batches, reused addresses, other threads: nothing grows, nothing mixes."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import pytest
import torch
from samples import (  # noqa: F401
    FEATURES,
    GraphNet,
    Lambda,
    equal,
    gradients,
    graph,
    make,
    one_thread,
    seeded,
    train_step,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import subgraph

import gact_graph

X, EDGES = graph()
LEVELS = [("lossless", 32), ("L1", 4)]


def sampled(step: int) -> tuple[Tensor, Tensor]:
    """A batch as a neighbor sampler gives it: other nodes and other sizes at each step."""
    x, edges = graph(nodes=600, edges=9000)
    kept = torch.randperm(600, generator=seeded(step))[: 300 + 7 * step % 200]
    edges, _ = subgraph(kept, edges, relabel_nodes=True, num_nodes=600)
    return x[kept], edges


@pytest.mark.parametrize(("level", "bits"), LEVELS)
@pytest.mark.parametrize("kind", ["gat", "gcn", "sage", "gin"])
def test_slots_are_stable_under_changing_batches(kind, level, bits):
    net = make(lambda: GraphNet(kind))
    model = gact_graph.wrap(net, level=level, bits=bits, blocks=False, min_bytes=0)
    slots = []
    for step in range(6):
        train_step(model, *sampled(step))
        rows = gact_graph.report(model).contexts
        slots.append({(row.slot, row.role, row.codec) for row in rows})
    assert slots[0] and all(other == slots[0] for other in slots)


@pytest.mark.long
@pytest.mark.parametrize(("level", "bits"), LEVELS)
def test_nothing_grows_over_200_steps(level, bits):
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), level=level, bits=bits, min_bytes=0)
    x, edges = graph(nodes=120, edges=600)

    def steps(count):
        for _ in range(count):
            train_step(model, x, edges)
        gc.collect()
        return len(gc.get_objects()), sum(type(t) is Tensor for t in gc.get_objects())

    tracemalloc.start()
    try:
        objects, tensors = steps(300)  # until the interpreter's own caches are full
        traced, _ = tracemalloc.get_traced_memory()
        after_objects, after_tensors = steps(210)  # the 500th is held to be measured
        after_traced, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_tensors <= tensors
    assert after_objects - objects < 100
    assert after_traced - traced < 20_000  # a hundred bytes a step


@pytest.mark.parametrize(("level", "bits"), [("lossless", 32), ("L1", 32)])
def test_a_reused_address_is_another_tensor(level, bits):
    """Temporaries one after another in the same memory; each has a form that is no reference."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, memory, step):
            kind = (torch.float32, torch.int32, torch.bool)[step % 3]
            kept = torch.frombuffer(memory, dtype=kind)
            kept.fill_(step + 2)
            if kind == torch.float32:
                kept[::3] = 1
            ctx.save_for_backward(kept)
            ctx.step = step
            return h.clone()

        @staticmethod
        def backward(ctx, grad):
            seen[ctx.step] = ctx.saved_tensors[0].clone()
            return grad, None, None

    def forward(module, x):
        h = module.weight.sum()
        for step in range(12):
            h = Keep.apply(h, memory, step)
        return h

    seen = {}
    memory = bytearray(16_384)
    model = gact_graph.wrap(Lambda(forward), level=level, bits=bits, min_bytes=0)
    model(X).backward()
    for step, tensor in seen.items():
        expected = torch.full((1,), step + 2).to(tensor.dtype)
        assert tensor[1] == expected and tensor[-2] == expected
        assert tensor[0] == (1 if tensor.dtype == torch.float32 else expected)


def test_gathers_and_masks_of_one_size_are_told_apart():
    def forward(module, x):
        h, total = x @ module.weight, 0.0
        for step in range(30):  # in the wrapped model each is freed before the next is made
            gathered = h[(torch.arange(2000) * (step + 3)) % 300]
            total = total + (gathered.sin() * torch.relu(gathered - step / 30)).sum()
        return total

    stock = Lambda(forward)
    stock(X).backward()
    model = gact_graph.wrap(Lambda(forward), level="lossless", bits=32, min_bytes=0)
    model(X).backward()
    assert torch.equal(model.weight.grad, stock.weight.grad)


class TestGraphs:
    def wrapped(self):
        model = make(lambda: GraphNet("gat", dropout=0.0))
        return gact_graph.wrap(model, level="lossless", bits=32, min_bytes=0)

    def test_backward_twice_and_on_another_thread(self):
        model = self.wrapped()
        parameters = [*model.parameters()]
        stock = make(lambda: GraphNet("gat", dropout=0.0))
        expected = torch.autograd.grad(stock(X, EDGES).sum(), [*stock.parameters()])
        loss = model(X, EDGES).sum()
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        there = []
        thread = threading.Thread(
            target=lambda: there.extend(torch.autograd.grad(loss, parameters))
        )
        thread.start()
        thread.join()
        assert equal([*first], [*expected]) and equal(there, [*expected])

    def test_double_backward(self):
        def penalty(model):
            x = X.clone().requires_grad_()
            (grad,) = torch.autograd.grad(model(x, EDGES).sum(), x, create_graph=True)
            grad.square().sum().backward()
            return gradients(model)

        stock = make(lambda: GraphNet("gat", dropout=0.0))
        assert equal(penalty(self.wrapped()), penalty(stock))

    def test_checkpoint_around_a_conv(self):
        class Checkpointed(GraphNet):
            def forward(self, x, edge_index):
                h = checkpoint(self.convs[0], x, edge_index, use_reentrant=False)
                return self.convs[1](self.norm(h).relu(), edge_index)

        stock = train_step(make(lambda: Checkpointed("gat")), X.requires_grad_(), EDGES)
        model = gact_graph.wrap(
            make(lambda: Checkpointed("gat")), level="lossless", bits=32, min_bytes=0
        )
        assert equal(train_step(model, X, EDGES), stock)
        X.requires_grad_(False)
        slots = {row.slot for row in gact_graph.report(model).contexts}
        assert not any(slot.startswith("convs.0") for slot in slots)

    def test_several_forwards_before_one_backward(self):
        def siamese(model):
            model.zero_grad()
            outs = [model(*graph(seed=s)) for s in (0, 1)]
            (outs[0] * outs[1]).sum().backward()
            return gradients(model)

        stock = make(lambda: GraphNet("gat", dropout=0.0))
        assert equal(siamese(self.wrapped()), siamese(stock))

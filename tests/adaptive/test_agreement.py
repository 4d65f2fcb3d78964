"""Ranks of DistributedDataParallel: the same bits, and nobody waits for a rank without batches."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import run_ranks

from gact_graph.adaptive.agreement import PATIENCE, Agreement
from gact_graph.adaptive.sensitivity import Measured

NET = """
import pytest
from samples import GraphNet, make, graph, labels
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def built(kind, place, **options):
    net = make(lambda: GraphNet(kind))
    if place == "inside":
        return DistributedDataParallel(gact_graph.wrap(net, min_bytes=0, **options)), net
    model = gact_graph.wrap(DistributedDataParallel(net), min_bytes=0, **options)
    return model, model

def scheme(wrapped):
    return wrapped.forward.controller.methods["forward"].scheme

def train(model, steps, first=0):
    for step in range(first, first + steps):
        x, edges = graph(seed=100 * step + rank)
        model.zero_grad()
        torch.manual_seed(step)
        F.cross_entropy(model(x, edges), labels()).backward()
        yield step
"""

EVEN = """
for kind, place in (("gat", "inside"), ("gcn", "outside")):
    # A fraction of a bit on average: whoever has measured has several widths.
    model, wrapped = built(kind, place, bits=3.5, adapt_interval=4)
    seen = []
    for step in train(model, 13):
        seen.append((dict(scheme(wrapped)._bits), scheme(wrapped).gradient_error))
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        both = [torch.empty_like(gradients) for _ in range(world)]
        dist.all_gather(both, gradients)
        assert torch.equal(*both)
    one, other = gathered(seen)
    assert one == other, (one, other)
    assert len({error for _, error in seen}) >= 3  # none, then two measurements at least
    assert len(set(seen[-1][0].values())) > 1, seen[-1]
    one, other = gathered(scheme(wrapped)._sensitivities)
    assert one == other and one

    # Saved on rank 0, resumed on all.
    state = [gact_graph.state_dict(wrapped)]
    dist.broadcast_object_list(state)
    model, wrapped = built(kind, place, bits=3.5, adapt_interval=4)
    gact_graph.load_state_dict(wrapped, state[0])
    for step in train(model, 2, first=13):
        one, other = gathered(dict(scheme(wrapped)._bits))
        assert one == other and one

    stock = DistributedDataParallel(make(lambda: GraphNet(kind)))
    model, wrapped = built(kind, place, bits=32, level="lossless")
    for _ in zip(train(stock, 2), train(model, 2)):
        for p, q in zip(stock.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)

# A rank that alone has nothing to measure: the other does not wait for it in a collective.
for place in ("inside", "outside"):
    model, wrapped = built("gcn", place)
    for step in range(4):
        x, edges = graph(seed=step + 10 * rank)
        model.zero_grad()
        out = model(x, edges)
        if rank == 1 and step == 1:
            wrapped.forward.controller.methods["forward"].adaptation._measuring = None
        out.square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    left, right = gathered(gradients)
    assert torch.equal(left, right)
    assert gact_graph.report(wrapped).measurements > 0

# FSDP2 trains with equal bits, and says why it does not measure.
def sharded(**options):
    net = make(lambda: GraphNet("gcn"))
    fully_shard(net.convs[1])
    fully_shard(net)
    if options:
        gact_graph.wrap(net, min_bytes=0, **options)
    for _ in train(net, 2):
        pass
    return net

stock, model = sharded(), sharded(level="lossless", bits=32)
for p, q in zip(stock.parameters(), model.parameters(), strict=True):
    assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    model = sharded(bits=4)
assert "parameters are sharded (FSDP)" in str(told[0].message)
widths = {row.bits for row in gact_graph.report(model).contexts} - {None}
assert widths <= {4, 16} and 4 in widths, widths
slots = [row.slot for row in gact_graph.report(model).contexts]
assert not any("mat2" in slot for slot in slots), slots  # a weight of its own memory
with pytest.raises(ValueError, match="sharded by FSDP.*then fully_shard"):
    sharded(memory="1 GB")
net = make(lambda: GraphNet("gcn"))
gact_graph.wrap(net, plan=gact_graph.plan(net, *graph(), memory="1 GB"))
fully_shard(net.convs[1])
assert len([*train(fully_shard(net), 2)]) == 2
"""


def test_ranks_have_the_same_bits_at_every_step(tmp_path):
    """They resume from one state, at lossless have the gradients of stock, and do not wait."""
    run_ranks(NET + EVEN, tmp_path)


UNEVEN = """
model, wrapped = built("gcn", "inside", bits=3.5, adapt_interval=4)
counts = [(3, 12), (12, 0), (1, 9), (14, 14)]
for epoch, count in enumerate(counts):
    with model.join():
        for _ in train(model, count[rank], first=100 * epoch):
            pass
for step in train(model, 6, first=999):  # one may take an outcome over a step later
    one, other = gathered(scheme(wrapped)._bits)
    if one == other:
        break
assert one == other and one

# Ranks run apart where gradients are accumulated.
model, wrapped = built("gcn", "inside", bits=3.5, adapt_interval=4)
seen = []
for step in range(7):
    for part in range(3):
        x, edges = graph(seed=100 * step + 10 * part + rank)
        if rank == 0 and part == 0:
            time.sleep(0.05)
        with model.no_sync() if part < 2 else contextlib.nullcontext():
            F.cross_entropy(model(x, edges), labels()).backward()
        seen.append((step, part, dict(scheme(wrapped)._bits)))
one, other = gathered(seen)
assert one == other and one[-1][2]
"""


@pytest.mark.long
def test_ranks_with_fewer_or_no_batches_stop_nobody(tmp_path):
    run_ranks("import contextlib, time" + NET + UNEVEN, tmp_path)


def decide(measured):
    return {"mean": None if measured is None else list(measured)}


def measured(value):
    return Measured({"a": value}, value, value)


class TestRounds:
    def agreements(self, count=2):
        store = dist.HashStore()
        return [Agreement(store, "name", rank, count) for rank in range(count)]

    def test_the_mean_is_taken_over_by_all_at_the_same_step(self):
        first, second = self.agreements()
        first.publish(measured(1.0))
        assert first.next_step(decide) is None and second.next_step(decide) is None
        second.publish(Measured({"a": 2.0, "b": 4.0}, 3.0, 5.0))
        outcome = {"mean": [{"a": 1.5, "b": 4.0}, 2.0, 3.0]}
        outcomes = [[first.next_step(decide), second.next_step(decide)] for _ in range(4)]
        assert outcomes == [[None, None], [None, None], [outcome, outcome], [None, None]]
        assert not first.waits and not second.waits

    def test_after_a_while_a_rank_goes_on_without_the_others(self):
        first, second = self.agreements()
        first.publish(measured(1.0))
        outcomes = [first.next_step(decide) for _ in range(PATIENCE + 3)]
        assert outcomes[PATIENCE + 1] == {"mean": [{"a": 1.0}, 1.0, 1.0]}
        # The other comes back with another number of steps.
        assert [second.next_step(decide) for _ in range(3)] == [None, None, outcomes[PATIENCE + 1]]

    def test_of_two_outcomes_the_first_counts(self):
        first, second = self.agreements()
        for agreement, value in ((first, 1.0), (second, 3.0)):
            agreement.publish(measured(value))

        def late(_):  # while this one takes the mean, the other has written its outcome
            first.next_step(lambda _: {"mean": "of one"})
            return {"mean": "of other"}

        assert second.next_step(late) is None
        outcomes = [agreement.next_step(decide) for agreement in (first, second) for _ in range(2)]
        assert [outcome for outcome in outcomes if outcome] == [{"mean": "of one"}] * 2

    def test_a_store_that_is_gone_ends_no_training(self):
        [agreement] = self.agreements(1)

        class Gone:
            def check(self, keys):
                raise dist.DistNetworkError("connection reset")

        agreement._store = Gone()
        with pytest.warns(RuntimeWarning, match="can no longer agree with the other ranks"):
            assert agreement.next_step(decide) is None
        assert agreement.next_step(decide) is None and agreement.waits

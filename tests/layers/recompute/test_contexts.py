"""Codes of the tensors that a layer saves while it is computed again in backward."""

from __future__ import annotations

import copy

import pytest
import torch
from samples import distance, equal, graph, make, one_thread, train_step  # noqa: F401
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv

import gact_graph
from gact_graph.codecs.quantize import Quantized
from gact_graph.layers.recompute import contexts, runs

X, EDGES = graph()


class Net(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(32, 64), conv, nn.Linear(64, 5)

    def forward(self, x, edge_index):
        return self.last(torch.tanh(self.conv(torch.tanh(self.first(x)), edge_index)))


CONVS = {
    "gat": lambda: GATConv(64, 32, heads=2),
    "gatv2": lambda: GATv2Conv(64, 32, heads=2),
    "transformer": lambda: TransformerConv(64, 32, heads=2),
    "sage": lambda: SAGEConv(64, 64, aggr="max"),
}


@pytest.fixture
def packed(monkeypatch):
    """The form of each tensor that a layer saves while it runs again."""
    packed = []
    pack = contexts.Waiting.pack

    def watch(self, tensor, for_blocks):
        saved = pack(self, tensor, for_blocks)
        packed.append((tensor.shape, saved))
        return saved

    monkeypatch.setattr(contexts.Waiting, "pack", watch)
    return packed


@pytest.mark.parametrize("blocks", [False, "auto"])
@pytest.mark.parametrize("kind", CONVS)
def test_inputs_stay_in_their_codes_and_change_nothing(kind, blocks, packed, monkeypatch):
    options = {"level": "CB2", "bits": 3, "adaptive": False, "blocks": blocks}
    net = make(lambda: Net(CONVS[kind]()))
    other = copy.deepcopy(net)
    in_codes = train_step(gact_graph.wrap(net, min_bytes=0, **options), X, EDGES)
    count = len(packed)
    packed.clear()
    monkeypatch.setattr(runs, "geometry", lambda tensor: object())
    assert equal(train_step(gact_graph.wrap(other, min_bytes=0, **options), X, EDGES), in_codes)
    assert len(packed) > count


def test_float64_beyond_float32_does_not_wait_in_codes(packed, monkeypatch):
    monkeypatch.setattr(contexts, "_LEAST_BYTES", 0)
    waiting = contexts.Waiting((8, 256, 0))
    rows = torch.linspace(-1, 1, 64 * 64, dtype=torch.float64).view(64, 64)
    for value, in_codes in ((rows, True), (rows * 1e-50, False), (rows + 1e12, False)):
        saved = waiting.pack(value, for_blocks=True)
        assert isinstance(saved.context.encoded, Quantized) == in_codes
        assert (saved.tensor() - value).norm() < 0.1 * (value - value.mean()).norm()


@pytest.mark.parametrize("kind", ["gat", "gatv2", "transformer"])
def test_what_blocks_read_waits_in_codes_of_little_noise(kind, packed, monkeypatch):
    def steps(least, bits):
        monkeypatch.setattr(contexts, "_LEAST_BYTES", least)
        packed.clear()
        net = make(lambda: Net(CONVS[kind]()))
        gact_graph.wrap(net, level="CB2", bits=bits, adaptive=False, blocks=200, min_bytes=0)
        return [train_step(net, X, EDGES, seed=seed) for seed in range(2)]

    exact = steps(1 << 40, 4)  # the least that tanh takes
    noisy = steps(0, 4)
    codes = {id(s): s for _, s in packed if s.context.encoded.bits == contexts.BITS}
    assert codes
    # One for each tensor, though edge_update and propagate may both save it; new in each step.
    assert len(codes) == 2 * {"gat": 1, "gatv2": 2, "transformer": 3}[kind]
    assert not equal(noisy[0], exact[0])
    coarse = make(lambda: Net(CONVS[kind]()))
    gact_graph.wrap(coarse, level="CB2", bits=5, adaptive=False, blocks=200, min_bytes=0)
    other = train_step(coarse, X, EDGES, seed=0)
    assert distance(noisy[0], exact[0]) < 0.3 * distance(other, exact[0])
    # With no quantization asked for there is none.
    steps(0, 32)
    assert all(s.context.encoded.bits is None for _, s in packed)
    # And never less than the rest has.
    steps(0, 11)
    assert {s.context.encoded.bits for _, s in packed} <= {None, 11}


def test_a_replay_has_the_same_noise(monkeypatch):
    monkeypatch.setattr(contexts, "_LEAST_BYTES", 0)
    seeds, start = [], contexts.Waiting.__init__

    def watch(self, coding):
        seeds.extend([] if coding is None else [coding.seed])
        start(self, coding)

    monkeypatch.setattr(contexts.Waiting, "__init__", watch)
    net = make(lambda: Net(CONVS["transformer"]()))
    gact_graph.wrap(net, level="CB2", bits=3, blocks=200, min_bytes=0)
    train_step(net, X, EDGES, seed=0)
    assert gact_graph.report(net).measurements > 0
    assert len(seeds) > 1 and len({*seeds}) == 1


def test_hooks_of_others_around_the_layer():
    """They hold what the layer saves, so that there are no codes to be had."""
    net = gact_graph.wrap(
        make(lambda: Net(CONVS["gatv2"]())), level="CB2", bits=32, adaptive=False, min_bytes=0
    )
    plain = make(lambda: Net(CONVS["gatv2"]()))
    forward = net.conv.forward

    def hooked(*args):
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            return forward(*args)

    net.conv.forward = hooked
    assert distance(train_step(net, X, EDGES), train_step(plain, X, EDGES)) < 1e-5


class Changing(nn.Module):
    """Changes its input in place, which the operation before it does not save."""

    def __init__(self):
        super().__init__()
        self.first, self.conv = nn.Linear(32, 64), ChangesInput(64, 64)

    def forward(self, x, edge_index):
        return self.conv(self.first(x), edge_index)


class ChangesInput(SAGEConv):
    def forward(self, x, edge_index):
        return super().forward(x.mul_(3), edge_index)


def test_an_input_changed_inside_is_saved_after_the_change():
    plain = make(Changing)
    net = gact_graph.wrap(
        copy.deepcopy(plain), bits=8, level="CB2", adaptive=False, blocks=False, min_bytes=0
    )
    assert distance(train_step(net, X, EDGES), train_step(plain, X, EDGES)) < 0.1

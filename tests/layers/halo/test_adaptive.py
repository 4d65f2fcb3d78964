"""Adaptive bits on parts of a graph: each process measures alone, and all take the same bits."""

from __future__ import annotations

import pytest
from partitioned import PARTS
from ranks import run_ranks

ADAPTIVE = """
import math

calls = {"rows": 0, "norm": 0}
exchange, gather, reduce = dist.all_to_all_single, dist.all_gather, dist.all_reduce

def counting(name, function):
    def counted(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)
    return counted

dist.all_to_all_single = counting("rows", exchange)
dist.all_gather = counting("norm", gather)

class Normed(Net):
    def __init__(self, make):
        super().__init__(make)
        self.norms = nn.ModuleList([nn.BatchNorm1d(W), nn.BatchNorm1d(W)])
    def forward(self, graph):
        x = graph.x
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, graph.edge_index)).relu()
        return self.last(x)

# In float64, tensors of a part are large enough to be quantized.
data.x, part.x = data.x.double(), part.x.double()

def made(make, **options):
    torch.manual_seed(1)
    model = Normed(make).double()
    return gact_graph.wrap(model, min_bytes=0, bits=3.5, adapt_interval=4, **options)

def scheme(model):
    return model.forward.controller.methods["forward"].scheme

for make in (lambda: pyg.GATConv(W, W), lambda: pyg.GCNConv(W, W)):
    for blocks in (False, 150):
        model, alone = made(make, partition=part, blocks=blocks), made(make, blocks=blocks)
        seen, counts = [], []
        for number in range(13):
            before = dict(calls)
            step(model, part)
            sum_gradients(model)
            counts.append({name: calls[name] - before[name] for name in calls})
            seen.append((dict(scheme(model)._bits), scheme(model).gradient_error))
            step(alone, data)
        # A step that measures fetches no more than another, and gives no more back.
        assert all(one == counts[0] for one in counts), counts
        assert counts[0]["norm"] == 2, counts
        one, other = gathered(seen)
        assert one == other, (one, other)
        assert len({error for _, error in seen}) >= 3  # none, then two measurements at least
        assert len(set(seen[-1][0].values())) > 1, seen[-1]
        assert gact_graph.report(model).measurements >= 2
        # What parts measure is near what the whole graph measures. Slots differ: a part's norm is
        # no operation that backward computes again, so more tensors have codes of their own.
        found, whole = scheme(model)._sensitivities, scheme(alone)._sensitivities
        assert len(found.keys() & whole.keys()) > 1, (found, whole)
        ratio = math.log2(sum(found.values()) / sum(whole.values()))
        print("ratio", ratio, flush=True)
        assert abs(ratio) < 2, (found, whole)

# A process that cannot measure stops nobody.
warnings.filterwarnings("ignore", message="gact_graph could not measure")
model = made(lambda: pyg.GATConv(W, W), partition=part)
for number in range(16):
    graph = part.clone()
    model.zero_grad()
    out = model(graph)
    F.cross_entropy(out, graph.y, reduction="sum").backward()
    if rank == 1:
        graph.x.add_(0)  # changed in place since: this process cannot run the step again
bits = dict(scheme(model)._bits)
one, other = gathered(bits)
assert one == other and len(set(bits.values())) > 1, (one, other)
"""


@pytest.mark.long
def test_two_processes_have_the_same_bits(tmp_path):
    run_ranks(PARTS + ADAPTIVE, tmp_path)

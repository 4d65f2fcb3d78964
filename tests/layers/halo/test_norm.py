"""Batch norm over the nodes, or the edges, of all parts is that of a single process."""

from __future__ import annotations

import pytest
from partitioned import PARTS
from ranks import run_ranks

NORMS = """
import copy
from gact_graph.layers.halo.norm import WholeBatchNorm, batch_norm

torch.manual_seed(3)
rows = [7, 0, 90][:world] if world == 3 else [7, 90]
own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))

def compared(norm, x, rtol, training=True):
    norm.zero_grad()
    # torch's own SyncBatchNorm runs on no CPU.
    is_sync = isinstance(norm, nn.SyncBatchNorm)
    whole = (nn.BatchNorm1d(5).to(x) if is_sync else copy.deepcopy(norm)).train(training)
    x = x.requires_grad_()
    mine = x.detach()[own].clone().requires_grad_()
    weights = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)
    patch = WholeBatchNorm(norm.train(training))
    found, expected = norm(mine), whole(x)
    (expected * expected * weights).sum().backward()
    (found * found * weights[own]).sum().backward()
    sum_gradients(norm)
    patch.remove()
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    close(found, expected[own])
    # Gradients of the input are small differences of large ones.
    scale = x.grad.abs().max()
    close(mine.grad / scale, x.grad[own] / scale)
    for got, want in zip(norm.parameters(), whole.parameters()):
        close(got.grad / want.grad.abs().max(), want.grad / want.grad.abs().max())
    for got, want in zip(norm.buffers(), whole.buffers(), strict=True):
        close(got, want)

n = sum(rows)
# With a mean of 30 deviations, differences from it have 30 times the rounding of a number, and both
# sides have theirs.
for kind, rtol in ((torch.float64, 1e-11), (torch.float32, 3e-4)):
    for options in ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}):
        norm = nn.BatchNorm1d(5, **options).to(kind)
        for step in range(2):
            compared(norm, torch.randn(n, 5, dtype=kind) * torch.arange(1, 6) + 30, rtol)
        compared(norm, torch.randn(n, 5, dtype=kind) + 30, rtol, training=False)
    compared(nn.BatchNorm1d(5).to(kind), torch.randn(n, 5, 3, dtype=kind), rtol)
    compared(nn.BatchNorm2d(5).to(kind), torch.randn(n, 5, 3, 2, dtype=kind), rtol)
    compared(nn.SyncBatchNorm(5).to(kind), torch.randn(n, 5, dtype=kind), rtol)

# The variance exceeds the largest number of float16.
for affine in (True, False):
    norm = nn.BatchNorm1d(5, affine=affine, track_running_stats=False).half()
    wide = 1000 * torch.randn(n, 5)
    patch = WholeBatchNorm(norm)
    found = norm(wide[own].half().requires_grad_(not affine))
    patch.remove()
    expected = F.batch_norm(wide, None, None, training=True)[own]
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    found.sum().backward()

# Inputs without a gradient, as the first layer has them, and no more than one row anywhere.
out = batch_norm(torch.randn(rows[rank], 5), None, None, None, None, 0.1, 1e-5)
assert not out.requires_grad
try:
    batch_norm(torch.randn(int(rank == 0), 5), None, None, None, None, 0.1, 1e-5)
except ValueError as error:
    assert "Expected at least two rows in all processes together" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.long
def test_a_part_may_have_many_rows_few_or_none(tmp_path):
    run_ranks("from gact_graph.distributed import sum_gradients\n" + NORMS, tmp_path, world=3)


NETS = """
class Normed(Net):
    def __init__(self, make, norm):
        super().__init__(make)
        self.norms = nn.ModuleList([norm(), norm()])
    def forward(self, graph):
        x = graph.x
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, graph.edge_index)).relu()
        return self.last(x)

def made(make, norm, **options):
    torch.manual_seed(1)
    model = Normed(make, norm)
    return gact_graph.wrap(model, min_bytes=0, **options) if options else model

batch = lambda: nn.BatchNorm1d(W)
NETS = {
    "GCN": (lambda: pyg.GCNConv(W, W), batch),
    "GAT": (lambda: pyg.GATConv(W, W), batch),
    "PyG's": (lambda: pyg.GATConv(W, W), lambda: pyg.BatchNorm(W)),
    "DiffGroupNorm": (lambda: pyg.GATConv(W, W), lambda: pyg.DiffGroupNorm(W, 3)),
    "by node": (lambda: pyg.GATConv(W, W), lambda: pyg.LayerNorm(W, mode="node")),
    "GIN with an MLP": (lambda: pyg.GINConv(pyg.MLP([W, W, W])), nn.Identity),
    "GEN with its MLP": (lambda: pyg.GENConv(W, W), nn.Identity),
    "over edges": (lambda: pyg.EdgeConv(pyg.MLP([2 * W, W, W])), nn.Identity),
}
for name, (make, norm) in NETS.items():
    for options in (dict(level="lossless", bits=32), dict(bits=32, blocks=150)):
        stock, model = made(make, norm), made(make, norm, partition=part, **options)
        expected, out = step(stock, data), step(model, part)
        sum_gradients(model)
        for got, want in ((out, expected[part.nodes]), (gradients(model), gradients(stock))):
            error = float((got - want).norm() / want.norm())
            assert error < 2e-5, (name, options, error)
        for got, want in zip(model.buffers(), stock.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(
                model.eval()(part), stock.eval()(data)[part.nodes], rtol=1e-4, atol=1e-5
            )

# Its input is kept as that of torch's own is, under the same name. In float64 it is large enough.
data.x, part.x = data.x.double(), part.x.double()
alone, model = made(*NETS["GAT"], bits=4), made(*NETS["GAT"], partition=part, bits=4)
step(alone.double(), data), step(model.double(), part)
kept = [
    {row.slot: row.codec for row in gact_graph.report(one).contexts if "norms" in row.slot}
    for one in (alone, model)
]
assert kept[0].items() <= kept[1].items(), kept
assert kept[1]["norms.0/batch_norm.input"] == "quantize", kept
assert all("forward" not in vars(m) for m in gact_graph.unwrap(model).modules())
"""


def test_two_processes_give_what_one_gives(tmp_path):
    run_ranks(PARTS + NETS, tmp_path)

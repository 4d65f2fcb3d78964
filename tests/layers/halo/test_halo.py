"""One graph over two processes: output and gradients are those of a single process."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from partitioned import PARTS
from ranks import ROOT, run_ranks, start_ranks
from torch import nn
from torch_geometric.data import Data, HeteroData

import gact_graph
from gact_graph.layers.halo.exchange import _Fetch
from gact_graph.layers.halo.supported import LOCAL, NOT_LOCAL

partition = gact_graph.distributed.partition

EDGES = torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(0))


def whole():
    weight = torch.arange(300.0)
    return Data(x=torch.arange(80.0).view(40, 2), edge_index=EDGES, weight=weight, name="a graph")


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_edge_is_in_the_part_of_its_destination(parts):
    data, seen = whole(), []
    found = partition(data, parts)
    assert torch.equal(torch.cat([one.nodes for one in found]).sort().values, torch.arange(40))
    for one in found:
        assert torch.equal(one.x, data.x[one.nodes]) and one.num_nodes == len(one.nodes)
        known = torch.cat([one.nodes, one.halo])
        source, destination = known[one.edge_index[0]], one.nodes[one.edge_index[1]]
        seen += zip(source.tolist(), destination.tolist(), one.weight.tolist(), strict=True)
    expected = zip(*EDGES.tolist(), data.weight.tolist(), strict=True)
    assert sorted(seen) == sorted(expected)


def test_what_is_sent_is_what_is_read():
    found = partition(whole(), 3)
    sent = [one.nodes[one.send].split(one.send_counts.tolist()) for one in found]
    for part, one in enumerate(found):
        assert torch.equal(torch.cat([rows[part] for rows in sent]), one.halo)
        assert one.halo_counts.tolist() == [len(rows[part]) for rows in sent]


def test_parts_have_about_the_same_work():
    pytest.importorskip("pymetis")
    generator = torch.Generator().manual_seed(0)
    # Nine of ten edges lead to one of ten nodes, and these lie together.
    near = torch.randint(100, (2, 9000), generator=generator)
    far = torch.randint(1000, (2, 1000), generator=generator)
    data = Data(edge_index=torch.cat([near, far], dim=1), num_nodes=1000)
    work = torch.tensor([p.edge_index.size(1) + 10.0 * len(p.nodes) for p in partition(data, 4)])
    assert work.max() < 1.2 * work.mean()


def test_parts_may_be_chosen():
    owner = torch.arange(40) % 3
    found = partition(whole(), 3, owner)
    assert all(
        torch.equal(owner[one.nodes], torch.full_like(one.nodes, i)) for i, one in enumerate(found)
    )
    for wrong in (owner[1:], owner * 2):
        with pytest.raises(ValueError, match=r"Expected owner to name parts 0 to 2 for 40 nodes"):
            partition(whole(), 3, wrong)


def test_only_tensors_with_a_row_for_each_node_or_edge_are_cut():
    data = whole()
    data.names, data.pairs = list(range(40)), (0,) * 300
    data.edge_label_index, data.index = EDGES.flip(0), torch.arange(40)
    for one in partition(data, 2):
        assert not {"names", "pairs", "edge_label_index"} & {*one.keys()}
        assert torch.equal(one.index, one.nodes)


def test_what_cannot_be_cut():
    with pytest.raises(TypeError, match=r"Expected data with one type of nodes and of edges \(got"):
        partition(HeteroData(), 1)
    with pytest.raises(
        ValueError, match=r"Expected 1 to 40 parts with a node or more each \(got 0"
    ):
        partition(whole(), 0)
    with pytest.raises(TypeError, match=r"Expected parts to be an int \(got str\)"):
        partition(whole(), "2")
    with pytest.raises(TypeError, match=r"Expected owner to be a tensor \[N\] \(got list\)"):
        partition(whole(), 1, [0] * 40)
    with pytest.raises(TypeError, match=r"Expected data with an edge_index \[2, E\] as a tensor"):
        partition(Data(x=torch.ones(3, 1)), 1)


def one_process(model, **options):
    [part] = partition(whole(), 1)
    return gact_graph.wrap(model, partition=part, **options), part


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index) if isinstance(layer, pyg.MessagePassing) else layer(x)
        return x


def test_one_process_needs_no_group_and_can_be_unwrapped():
    torch.manual_seed(0)
    model, data = Net(pyg.GCNConv(2, 4), nn.ReLU(), pyg.GATConv(4, 3)), whole()
    before = model(data.x, data.edge_index)
    model, part = one_process(model, bits=32, min_bytes=0)
    found = model(part.x, part.edge_index)
    torch.testing.assert_close(found, before)
    found.sum().backward()
    assert gact_graph.report(model).halo_bytes == 0
    assert torch.equal(gact_graph.unwrap(model)(data.x, data.edge_index), before)
    assert gact_graph.report(gact_graph.wrap(model, min_bytes=0)).halo_bytes is None


def test_a_layer_may_be_the_model():
    torch.manual_seed(0)
    layer, data = pyg.GCN2Conv(2, 0.1), whole()
    before = layer(data.x, data.x, data.edge_index)
    wrapped, part = one_process(layer, bits=32, min_bytes=0)
    found = wrapped(part.x, part.x, part.edge_index)
    torch.testing.assert_close(found, before)
    found.sum().backward()
    assert gact_graph.report(wrapped).raw_bytes > 0
    assert not {"forward", "propagate"} & vars(gact_graph.unwrap(wrapped)).keys()


def test_each_conv_of_pyg_is_known_and_in_the_documentation():
    known = {kind.__name__ for kind in LOCAL} | {*NOT_LOCAL} | {"AntiSymmetricConv"}
    others = {"MessagePassing", "CuGraphSAGEConv", "CuGraphGATConv", "CuGraphRGCNConv"}
    assert {*pyg.conv.__all__} - known <= others | {"FusedGATConv"}
    text = (ROOT / "docs" / "distributed.md").read_text()
    assert [kind.__name__ for kind in LOCAL if kind.__name__ not in text] == []


class Statistics(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (pyg.ChebConv(2, 4, K=2), "its Laplacian counts the edges that leave a node, which are in"),
        (pyg.FastRGCNConv(2, 4, 2), "its messages may read the indices of nodes; RGCNConv comput"),
        (pyg.SuperGATConv(2, 4), "in training it samples pairs of nodes without an edge from all"),
        (pyg.DirGNNConv(pyg.SAGEConv(2, 4)), "it also reads the edges that leave a node, which"),
        (pyg.WLConv(), "each process would number the colors separately"),
        (pyg.EGConv(2, 4, ["mean"], 2), "its self-loops end with the last node that an edge names"),
        (pyg.GINConv(pyg.MLP([2, 4, 4], norm="graph_norm")), "GraphNorm may depend on all nodes"),
        (pyg.GATConv(2, 4, flow="target_to_source"), "its messages flow from target to source"),
        (pyg.GCNConv(2, 4, cached=True), "cached=True keeps the normalization of one process"),
        (nn.SyncBatchNorm(4, process_group=3), "it normalizes over its own process group"),
        (Statistics(4), "Statistics may normalize in another way than torch's"),
        (pyg.GCNConv(-1, 4), "each process would initialize it separately"),
        (nn.LazyBatchNorm1d(), "each process would initialize it separately"),
        (pyg.BatchNorm(4, allow_single_element=True), "it does not normalize a single row of a"),
        (pyg.GraphNorm(4), "GraphNorm may depend on all nodes, and a process has a"),
        (pyg.InstanceNorm(4), "InstanceNorm may depend on all nodes"),
        (pyg.LayerNorm(4), "LayerNorm may depend on all nodes"),
        (pyg.PairNorm(), "PairNorm may depend on all nodes"),
        (pyg.MeanSubtractionNorm(), "MeanSubtractionNorm may depend on all nodes"),
        (pyg.HeteroBatchNorm(4, 2), "HeteroBatchNorm may depend on all nodes"),
        (pyg.SumAggregation(), "SumAggregation may depend on all nodes"),
        (pyg.TopKPooling(4), "TopKPooling may depend on all nodes"),
        (pyg.GPSConv(4, None), "each node attends to all nodes, and a process has a part"),
        (pyg.MetaLayer(), "MetaLayer may read more than the edges to a node"),
    ],
)
def test_other_layers_refuse(layer, words):
    with pytest.raises(ValueError, match=f"Expected a model that can run on a part.*{words}"):
        one_process(Net(nn.Linear(2, 2), layer))


class Reversal:
    """Stands for an exchange."""

    def fetch(self, x, bits):
        return x.flip(0)

    give_back = fetch


def test_second_derivatives_of_rows_of_the_halo_raise_an_error():
    x = torch.ones(3, 2, requires_grad=True)
    halo = _Fetch.apply(x, Reversal(), 32)
    [gradient] = torch.autograd.grad(halo.square().sum(), x, create_graph=True)
    assert torch.equal(gradient, 2 * torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        gradient.sum().backward()


def test_relations_are_read_in_the_same_way_by_all(monkeypatch):
    monkeypatch.setattr("torch_geometric.typing.WITH_SEGMM", True)
    model = Net(pyg.RGCNConv(2, 4, 2))
    with pytest.raises(ValueError, match=r"each process would choose separately whether"):
        one_process(model)
    monkeypatch.setattr("torch_geometric.backend.use_segment_matmul", False)
    one_process(model)


def test_what_does_not_go_with_it():
    model = Net(pyg.GATConv(2, 4))
    with pytest.raises(ValueError, match=r"Expected level 'L0', 'lossless', 'L1' or 'L2' with par"):
        one_process(model, level="CB2")
    with pytest.raises(ValueError, match=r"Expected bits rather than memory with partition"):
        one_process(model, memory="1 GB")
    with pytest.raises(ValueError, match=r"Expected one part for each of 1 processes \(got one of"):
        gact_graph.wrap(model, partition=partition(whole(), 2)[0])
    with pytest.raises(ValueError, match=r"Expected halo_bits to be 1 to 16, or 32"):
        one_process(model, halo_bits=0)
    with pytest.raises(TypeError, match=r"Expected partition to be one of the parts"):
        gact_graph.wrap(model, partition=2)
    model, part = one_process(model)
    with pytest.raises(ValueError, match=r"Expected a tensor with a row for each of the part's 40"):
        model(part.x[:7], part.edge_index)
    with pytest.raises(
        TypeError, match=r"Expected the edges of a part as edge_index \[2, E\] \(got Ten"
    ):
        one_process(Net(pyg.SAGEConv(2, 4)))[0](part.x, torch.eye(40).to_sparse())


SAME = """
CONVS = [
    (lambda: pyg.GCNConv(W, W), None),
    (lambda: pyg.GCNConv(W, W, improved=True), "weight"),
    (lambda: pyg.SAGEConv(W, W, aggr="max", project=True), None),
    (lambda: pyg.GATConv(W, W // 2, heads=2), None),
    (lambda: pyg.GATConv(W, W, edge_dim=3), "attr"),
    (lambda: pyg.TransformerConv(W, W), None),
    (lambda: pyg.EdgeConv(mlp(2 * W)), None),
    (lambda: pyg.GENConv(W, W, norm=None, learn_t=True), None),
]
for make, extra in CONVS:
    for stock, model in as_the_whole(make, extra):
        assert gact_graph.report(model).halo_bytes > 0
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(part), stock.eval()(data)[part.nodes], rtol=1e-4,
                                       atol=1e-5)

# In few bits: fewer bytes, and right on average.
make = lambda: pyg.GATConv(W, W)
exact = built(make, partition=part, level="lossless", bits=32)
step(exact, part)
sum_gradients(exact)
want = gradients(exact)
for bits, most in ((8, 0.1), (4, 0.3)):  # ReLUs flip
    model = built(make, partition=part, level="lossless", bits=32, halo_bits=bits)
    step(model, part)
    sum_gradients(model)
    error = float((gradients(model) - want).norm() / want.norm())
    assert most / 100 < error < most, (bits, error)
rate = gact_graph.report(exact).halo_bytes / gact_graph.report(model).halo_bytes
assert 5 < rate < 8, rate

# Without bias, there and back.
exchange, halo = Exchange(part, 4, 0), torch.randn(len(part.halo), W)
for trade, given in ((exchange.fetch, part.x), (exchange.give_back, halo)):
    exact_rows = trade(given, 32)
    drawn = torch.stack([trade(given, 4) for _ in range(100)]) - exact_rows
    single, mean = drawn.norm(dim=(1, 2)).mean(), drawn.mean(0).norm()
    assert 0.01 * exact_rows.norm() < single < 0.3 * exact_rows.norm()
    assert mean < 0.15 * single, (mean, single)

# A checkpoint of two processes loads on one.
state = {key: value.clone() for key, value in model.state_dict().items()}
saved = gact_graph.state_dict(model)
alone = built(make)
alone.load_state_dict(state)
gact_graph.load_state_dict(gact_graph.wrap(alone, level="lossless", bits=32, adaptive=False), saved)
compressed = built(make, partition=part, bits=4, halo_bits=8)
for _ in range(3):
    step(compressed, part)
sum_gradients(compressed)
one, other = gathered(gradients(compressed))
assert torch.equal(one, other)
assert float((one - want).norm() / want.norm()) < 0.5
"""


def test_two_processes_give_what_one_gives(tmp_path):
    run_ranks(PARTS + SAME, tmp_path)


ENDS = """
import signal

dist.destroy_process_group()
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[3]}2", rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=10 if arguments[0] == "stalls" else 60),
)
how, where = arguments
model = built(lambda: pyg.GATConv(W, W), partition=part)
loss = model(part).square().sum()
_, other = gathered(os.getpid())
if rank == 1:
    if how == "fails":
        raise KeyError("of rank 1")
    os.kill(other, {"is killed": signal.SIGKILL, "stalls": signal.SIGSTOP}[how])
try:
    sum_gradients(model) if where == "sum gradients" else loss.backward()
finally:
    if how == "stalls":
        os.kill(other, signal.SIGKILL)
"""


@pytest.mark.parametrize("where", ["exchange rows of the halo", "sum gradients"])
@pytest.mark.parametrize("how", ["fails", "is killed", "stalls"])
def test_a_process_that_ends_or_stalls_ends_all(how, where, tmp_path):
    (first, _, said), (second, _, told) = start_ranks(PARTS + ENDS, tmp_path, how, where)
    assert first != 0 and second != 0
    assert f"RuntimeError: Expected all 2 processes to {where} (got " in said, said
    assert how != "fails" or "KeyError: 'of rank 1'" in told


def test_a_layer_that_is_replaced_after_wrap():
    model, _ = one_process(Net(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model.layers[1] = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match=r"layers that were there at wrap.*new BatchNorm1d"):
        model(whole().x, EDGES)

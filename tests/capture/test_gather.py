"""A gathered tensor is kept as its source and the index."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from samples import FEATURES, Lambda, distance, graph, one_thread, seeded  # noqa: F401
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from zoo import csr

import gact_graph
from gact_graph.capture.recipes import Recipes
from gact_graph.capture.trace import Call

X, EDGES = graph()
INDEX = EDGES[0].clone()
REPEATS = torch.arange(300) % 13
GATHERED = 2000 * 64 * 4

FORMS = {
    "method": lambda h: h.index_select(0, INDEX),
    "function": lambda h: torch.index_select(h, 0, INDEX),
    "keywords": lambda h: torch.index_select(input=h, dim=0, index=INDEX),
    "last dim": lambda h: h.t().contiguous().index_select(-1, INDEX).t(),
    "item": lambda h: h[INDEX],
    "item behind a slice": lambda h: h.t().contiguous()[:, INDEX].t(),
    "item behind an ellipsis": lambda h: h.t().contiguous()[..., INDEX].t(),
    "item of two dims": lambda h: h[INDEX.view(40, 50)].view(2000, 64),
    "item of int32": lambda h: h[INDEX.int()],
    "repeat": lambda h: h.repeat_interleave(torch.full((300,), 7), dim=0),
    "repeat some": lambda h: h.repeat_interleave(REPEATS, dim=0, output_size=int(REPEATS.sum())),
    "twice": lambda h: h[INDEX][INDEX],
    "bool": lambda h: h.repeat(2, 1)[torch.arange(600) % 7 > -1],
}

VIEWS = {
    "itself": lambda g: g,
    "view": lambda g: g.view(-1, 4, 16),
    "unsqueeze": lambda g: g.unsqueeze(1),
    "squeeze": lambda g: g.unsqueeze(-1).squeeze(),
    "expand": lambda g: g[:, None].expand(-1, 3, -1),
    "transposed": lambda g: g.t(),
    "rows": lambda g: g[100:700],
    "columns": lambda g: g[:, 3:40:2],
    "one": lambda g: g[5, 7],
    "detached": lambda g: g.detach(),
    "chunk": lambda g: g.chunk(2, 1)[1],
}


def run(function, **options):
    model = Lambda(lambda module, x: function(x @ module.weight))
    if options:
        gact_graph.wrap(model, min_bytes=0, **options)
    out = model(X)
    out.backward(torch.randn(out.shape, generator=seeded(2)))
    return model.weight.grad, gact_graph.report(model).contexts if options else []


def squared(gathered):
    """Saves its input twice."""
    return gathered.sin() * gathered


class TestForms:
    @pytest.mark.parametrize("name", FORMS)
    def test_are_rebuilt_bit_by_bit(self, name):
        def function(h):
            return squared(FORMS[name](h))

        got, rows = run(function, level="lossless", bits=32)
        assert torch.equal(got, run(function)[0])
        assert [row.codec for row in rows if row.slot == "sin.input"] == ["gather"]

    @pytest.mark.parametrize("name", FORMS)
    def test_hold_no_copy(self, name):
        _, rows = run(lambda h: FORMS[name](h).sin(), level="lossless", bits=32)
        node = 300 * 64 * 4 * (2 if name == "bool" else 1)
        assert sum(row.stored_bytes for row in rows) <= node + 2000 * 4 + 4000

    @pytest.mark.parametrize("name", VIEWS)
    def test_are_seen_through_views(self, name):
        def function(h):
            return VIEWS[name](h[INDEX]) * (h.sum() + VIEWS[name](h[INDEX]))

        got, rows = run(function, level="lossless", bits=32)
        assert torch.equal(got, run(function)[0])
        [first] = [row for row in rows if row.slot == "mul.input"]
        assert (first.codec, first.stored_bytes) == ("gather", 0)
        coarse, _ = run(function, bits=8)
        assert distance([coarse], [run(function)[0]]) < 0.05

    def test_a_larger_source_is_not_kept_for_a_few_rows(self):
        few = INDEX[:40]
        got, rows = run(lambda h: h[few].sin(), level="lossless", bits=32)
        assert torch.equal(got, run(lambda h: h[few].sin())[0])
        assert [row.stored_bytes for row in rows if row.slot == "sin.input"] == [40 * 64 * 4]

    def test_at_l1_the_source_is_quantized_once(self):
        def function(h):
            h = h.cumsum(0)  # no operation that is computed again
            return h.cos().sum() + h[INDEX] * h.neg()[INDEX]

        _, rows = run(function, bits=4)
        by_codec = {}
        for row in rows:
            by_codec.setdefault(row.codec, []).append(row)
        assert sum(row.raw_bytes for row in by_codec["gather"]) == 2 * GATHERED
        assert {row.shape for row in by_codec["quantize"]} == {(300, 64)}

    @pytest.mark.parametrize("source", ["input", "parameter"])
    def test_from_a_tensor_that_is_held_anyway(self, source):
        class Table(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.randn(300, FEATURES, generator=seeded(1)))
                self.scale = nn.Parameter(torch.ones(FEATURES))

            def forward(self, x):
                rows = x[INDEX] if source == "input" else self.table[INDEX]
                return rows * self.scale

        model = gact_graph.wrap(Table(), level="lossless", bits=32, min_bytes=0)
        stock = Table()
        for net in (model, stock):
            net(X).backward(torch.ones(2000, FEATURES))
        assert torch.equal(model.scale.grad, stock.scale.grad)
        rows = gact_graph.report(model).contexts
        assert {row.codec for row in rows} == {"gather", "index"}
        # The index in 16 bits, and a sample of the elements to compare in backward.
        assert 2000 * 2 < sum(row.stored_bytes for row in rows) <= 2000 * 2 + 1024 * 4


class Stack(nn.Module):
    """Three layers over the same edges."""

    def __init__(self, conv):
        super().__init__()
        self.convs = nn.ModuleList(conv(FEATURES, FEATURES) for _ in range(3))

    def forward(self, x, edges):
        for conv in self.convs:
            x = conv(x, edges)
        return x


class TestLift:
    @pytest.mark.parametrize("form", ["tensor", "EdgeIndex", "csr"])
    def test_of_gat(self, form):
        adjacency = {
            "tensor": lambda: EDGES,
            "EdgeIndex": lambda: EdgeIndex(EDGES, sparse_size=(300, 300)),
            "csr": csr,
        }[form]()
        model = gact_graph.wrap(
            GATConv(FEATURES, 32, heads=2), level="lossless", bits=32, min_bytes=0
        )
        model(X, adjacency).sum().backward()
        rows = {row.slot: row for row in gact_graph.report(model).contexts}
        assert rows["message/mul.other"].codec == "gather"
        assert rows["message/mul.other"].role == "edge"
        assert rows["edge_update/softmax.div.other"].codec == "gather"
        assert rows["edge_update/leaky_relu.input"].codec == "mask"
        assert rows["mul.input"].role == "node"

    def test_equal_self_loops_are_stored_once(self):
        model = gact_graph.wrap(Stack(GATConv), level="lossless", bits=32, min_bytes=0)
        model(X, EDGES).sum().backward()
        rows = [row for row in gact_graph.report(model).contexts if row.role == "index"]
        loops = int((EDGES[0] == EDGES[1]).sum())
        assert sum(row.stored_bytes for row in rows) == 2 * 2 * (2000 - loops + 300)
        assert sum(row.raw_bytes for row in rows) >= 3 * 2 * 8 * (2000 - loops + 300)

    def test_equal_weights_of_gcn_are_stored_once(self):
        model = gact_graph.wrap(Stack(GCNConv), level="lossless", bits=32, min_bytes=0)
        model(X, EDGES).sum().backward()
        rows = [r for r in gact_graph.report(model).contexts if "message/mul" in r.slot]
        assert len(rows) == 3
        assert sum(row.stored_bytes for row in rows) == rows[0].stored_bytes > 8000


class TestInPlaceChanges:
    @pytest.mark.parametrize("level", ["lossless", "L1"])
    def test_between_gathering_and_saving(self, level):
        def source_first(h):
            h = h * 1
            gathered = h[INDEX]
            with torch.no_grad():
                h.mul_(3)
            return squared(gathered)

        def gathered_first(h):
            gathered = h[INDEX]
            gathered.mul_(3)
            return squared(gathered)

        for function in (source_first, gathered_first):
            got, rows = run(function, level=level, bits=32)
            assert torch.equal(got, run(function)[0])
            assert "gather" not in {row.codec for row in rows}

    def test_of_a_kept_source_raises(self):
        sources = []

        def function(h):
            sources.append(h.detach())
            return h[INDEX].sin()

        model = gact_graph.wrap(
            Lambda(lambda module, x: function((x @ module.weight).cumsum(0))),
            level="lossless",
            bits=32,
            min_bytes=0,
        )
        out = model(X)
        sources[-1].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_of_a_kept_source_behind_autograd_raises(self):
        model = Lambda(lambda module, x: (x @ module.weight)[INDEX].sum(1, True) * x[INDEX])
        gact_graph.wrap(model, level="lossless", bits=32, min_bytes=0)
        x = X.clone()
        out = model(x)
        x.data.mul_(2)
        with pytest.raises(RuntimeError, match="has other values than in forward"):
            out.sum().backward()

    @pytest.mark.parametrize("level", ["lossless", "L1"])
    def test_of_a_buffer_after_forward_is_no_matter(self, level):
        """A memory of nodes is updated between forward and backward, as in PyG's TGN."""

        class Memory(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("table", torch.randn(300, FEATURES, generator=seeded(1)))
                self.scale = nn.Parameter(torch.ones(FEATURES))

            def forward(self, index):
                return self.table[index] * self.scale

        model, stock = Memory(), Memory()
        gact_graph.wrap(model, bits=8, level=level, min_bytes=0)
        for net in (model, stock):
            out = net(INDEX)
            net.table.copy_(torch.zeros(300, FEATURES))
            out.backward(torch.ones(2000, FEATURES))
        assert (
            distance([model.scale.grad], [stock.scale.grad]) < {"lossless": 1e-9, "L1": 0.1}[level]
        )

    def test_of_a_kept_index_behind_autograd_raises(self):
        index = INDEX.clone()
        model = Lambda(lambda module, x, i: (x @ module.weight)[i].sin())
        gact_graph.wrap(model, level="lossless", bits=32, min_bytes=0)
        out = model(X, index)
        index.numpy()[:] = 0
        with pytest.raises(RuntimeError, match="has other values than in forward"):
            out.sum().backward()

    def test_of_a_kept_index_raises(self):
        index = INDEX.clone()
        model = Lambda(lambda module, x, i: (x @ module.weight)[i].sin())
        gact_graph.wrap(model, level="lossless", bits=32, min_bytes=0)
        out = model(X, index)
        index.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_of_a_quantized_source_is_no_matter(self):
        sources = []

        def function(h):
            sources.append(h.detach())
            return h[INDEX].sin()

        expected, _ = run(function)
        # A product with an input would be computed again, exactly; its copy has codes.
        model = gact_graph.wrap(
            Lambda(lambda module, x: function((x @ module.weight).clone())), bits=8, min_bytes=0
        )
        out = model(X)
        sources[-1].zero_()
        out.backward(torch.randn(out.shape, generator=seeded(2)))
        assert 0 < distance([model.weight.grad], [expected]) < 0.05

    def test_a_twin_that_changes_spoils_nobody(self):
        """The second of two equal indices is changed after it was saved; the first one stands."""
        late = []

        def function(h):
            first, second = INDEX + 0, INDEX + 0
            late.append(second)
            return h[first].sin() + h[second].cos()

        expected, _ = run(function)
        model = gact_graph.wrap(
            Lambda(lambda module, x: function(x @ module.weight)),
            level="lossless",
            bits=32,
            min_bytes=0,
        )
        out = model(X)
        late[-1].zero_()
        out.backward(torch.randn(out.shape, generator=seeded(2)))
        assert torch.equal(model.weight.grad, expected)


class TestRecords:
    def test_live_as_long_as_the_gathered_tensor(self):
        gc.disable()
        try:
            gathers = Recipes(lambda tensor: None, lambda tensor: False, bits=32, products=True)
            source, index = torch.randn(10, 4), torch.arange(20) % 10
            result = source[index]
            gathers.see(Call(torch.Tensor.__getitem__, (source, index), {}), result)
            alive = weakref.ref(gathers.find(result))
            view = result.view(-1)
            del result
            assert gathers.find(view) is alive()
            del view
            gathers._forget()
            assert alive() is None
        finally:
            gc.enable()

    def test_the_peak_holds_no_gathered_tensor(self):
        seen = []

        def function(h):
            for _ in range(3):
                gathered = h[INDEX]
                seen.append(weakref.ref(gathered.untyped_storage()))
                h = h + gathered.sin().sum()
            return h

        run(function, level="lossless", bits=32)
        assert [reference() for reference in seen] == [None] * 3


def test_max_aggregation_compares_exact_values():
    """The gathered source and the maximum must agree bit by bit, also where others are coarse."""
    torch.manual_seed(0)
    conv = SAGEConv(FEATURES, 8, aggr="max")
    first = nn.Linear(FEATURES, FEATURES)
    model = nn.ModuleList([first, conv])
    model.forward = lambda x, edges: conv(first(x), edges)
    stock = [g.clone() for g in torch.autograd.grad(model(X, EDGES).sum(), model.parameters())]
    gact_graph.wrap(model, bits=2, blocks=False, min_bytes=0)
    got = torch.autograd.grad(model(X, EDGES).sum(), model.parameters())
    assert torch.equal(got[0], stock[0])

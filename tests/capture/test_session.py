"""Contexts in place of saved tensors: ownership, and the account of bytes."""

import dataclasses
import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from samples import (  # noqa: F401
    FEATURES,
    GraphNet,
    Lambda,
    Mlp,
    distance,
    equal,
    gradients,
    graph,
    labels,
    make,
    one_thread,
    seeded,
    train_step,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv

import gact_graph
from gact_graph.codecs import Saved

X, EDGES = graph()


@pytest.fixture(autouse=True, scope="module")
def _quiet_sparse():
    # torch warns once that CSR is beta, and once that it does not check the indices.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        csr()


def csr():
    degree = 7
    starts = torch.arange(301) * degree
    values = torch.ones(300 * degree)
    columns = torch.randint(300, (300, degree), generator=seeded(5)).sort().values.flatten()
    return torch.sparse_csr_tensor(starts, columns, values, (300, 300), check_invariants=False)


def wrapped(function, bits=4, **options):
    return gact_graph.wrap(Lambda(function), bits=bits, min_bytes=0, **options)


def rows(model):
    return {row.slot: row for row in gact_graph.report(model).contexts}


class Unique:
    """An independent count: the storages that stock autograd saves, beside those of ``owned``."""

    def __init__(self, *owned):
        self.owned = {t.untyped_storage().data_ptr() for t in owned}
        self.alive = weakref.WeakSet()

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(self, tensor):
        box = self.Box(tensor.detach())
        self.alive.add(box)
        return box

    def hooks(self):
        return saved_tensors_hooks(self.pack, lambda box: box.tensor)

    @property
    def nbytes(self):
        storages = {}
        for box in self.alive:
            storage = box.tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(n for pointer, n in storages.items() if pointer not in self.owned)


def stored_tensors():
    """Return every plain tensor that a context of gact_graph holds."""
    tensors, seen, queue = [], set(), [t for t in gc.get_objects() if type(t) is Saved]
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            tensors.append(thing)
        elif isinstance(thing, Saved):
            queue.append(thing.context)
        elif isinstance(thing, tuple):
            queue += thing
        elif type(thing).__module__.startswith("gact_graph."):
            queue += getattr(thing, "__dict__", {}).values()
    return tensors


class TestAccount:
    @pytest.mark.parametrize("kind", ["gcn", "gat", "sage", "gin"])
    def test_raw_bytes_are_those_of_stock_autograd(self, kind):
        plain = make(lambda: GraphNet(kind))
        count = Unique(X, EDGES, *plain.parameters(), *plain.buffers())
        torch.manual_seed(0)
        with count.hooks():
            out = plain(X, EDGES)
        expected = count.nbytes
        del out
        model = gact_graph.wrap(make(lambda: GraphNet(kind)), blocks=False, min_bytes=0)
        torch.manual_seed(0)
        model(X, EDGES)
        assert gact_graph.report(model).raw_bytes == expected > 100_000

    @pytest.mark.parametrize(
        ("kind", "options"),
        grid(
            ["gcn", "gat", "sage", "gin"],
            [{"bits": 2}, {"bits": 32}, {"level": "lossless", "bits": 32}],
        ),
    )
    def test_stored_bytes_are_those_of_live_tensors(self, kind, options):
        gc.collect()
        others = stored_tensors()
        before = {t.untyped_storage().data_ptr() for t in others}
        net = make(lambda: GraphNet(kind))
        model = gact_graph.wrap(net, blocks=False, adaptive=False, min_bytes=0, **options)
        owned = {t.untyped_storage().data_ptr() for t in [X, EDGES, *model.parameters()]}
        owned |= before | {t.untyped_storage().data_ptr() for t in model.buffers()}
        out = model(X, EDGES)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in stored_tensors()}
        alive = sum(s.nbytes() for pointer, s in held.items() if pointer not in owned)
        assert gact_graph.report(model).stored_bytes == alive > 10_000
        del out

    def test_level_l0_stores_the_raw_bytes(self):
        model = gact_graph.wrap(make(lambda: GraphNet("gat")), level="L0", min_bytes=0)
        train_step(model, X, EDGES)
        report = gact_graph.report(model)
        assert report.raw_bytes == report.stored_bytes > 0
        assert report.rate == 1

    def test_a_branch_that_led_nowhere_is_not_counted(self):
        def forward(module, x, extra):
            h = torch.tanh(x @ module.weight)
            if extra:
                torch.exp(2 * h).sin()
            return h.sum()

        totals = []
        for extra in (False, True):
            model = wrapped(forward)
            model(X, extra).backward()
            report = gact_graph.report(model).to_dict()
            totals.append((report["raw_bytes"], report["stored_bytes"], report["contexts"]))
        assert totals[0] == totals[1]

    def test_a_storage_outlives_its_first_record(self):
        def forward(module, x):
            h = (x @ module.weight).roll(1)  # no operation that is computed again
            h.exp()  # a leaf of the graph that nobody holds: it saves its own result
            (h * h).sum()  # saves h, and is gone
            return (h * h).sum()

        model = wrapped(forward)
        out = model(X)
        [row] = gact_graph.report(model).contexts
        assert (row.raw_bytes, row.codec) == (300 * 64 * 4, "quantize")
        out.backward()

    def test_same_elements_are_stored_once(self):
        def forward(module, x):
            h = x @ module.weight
            flat, back = h.view(-1), h.t()
            return (
                (h * h).sum()
                + flat.square().sum()
                + (back * back).sum()
                + h.view(4, -1).exp().sum()
            )

        model = wrapped(forward, bits=8)
        exact = train(Lambda(forward), X)
        assert distance(train(model, X), exact) < 0.05
        of_h = [row for row in rows(model).values() if "exp" not in row.slot]
        assert len(of_h) == 1
        assert of_h[0].stored_bytes < of_h[0].raw_bytes / 3

    def test_slices_of_one_storage_count_it_once(self):
        def forward(module, x):
            h = (x @ module.weight).roll(1)  # no operation that is computed again
            left, right = h.chunk(2, dim=1)
            return (left * right).sum()

        model = wrapped(forward, bits=8)
        exact = train(Lambda(forward), X)
        assert distance(train(model, X), exact) < 0.05
        report = gact_graph.report(model)
        assert [row.raw_bytes for row in report.contexts] == [300 * 64 * 4, 0]
        assert all(row.stored_bytes > 0 for row in report.contexts)

    def test_a_reused_address_is_another_storage(self):
        class Keeper(torch.autograd.Function):
            @staticmethod
            def forward(ctx, h, step):
                ctx.save_for_backward(torch.full((4096,), float(step)))
                return h.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.saved_tensors[0].mean(), None

        def forward(module, x):
            h = module.weight.sum()
            for step in range(1, 9):  # each temporary is freed before the next is made
                h = Keeper.apply(h, step)
            return h

        model = wrapped(forward, bits=2)
        model(X).backward()
        # 8! = 40320; a group of equal elements is exact.
        assert torch.equal(model.weight.grad, torch.full_like(model.weight, 40320.0))

    def test_a_negated_view_is_not_its_base(self):
        def forward(module, x):
            z = torch.complex(x @ module.weight, x @ module.weight + 1)
            return (z.imag * 2).mul(z.imag).sum() + (z.conj().imag * z.real.detach()).sum()

        # z.imag and z.conj().imag show the same elements with the other sign.
        assert equal(train(wrapped(forward, bits=32), X), train(Lambda(forward), X))
        exact = train(Lambda(forward), X)
        assert distance(train(wrapped(forward, bits=12), X), exact) < 0.02


def train(model, *inputs):
    model.zero_grad()
    out = model(*inputs)
    out.backward()
    return gradients(model)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("x",)
    x: torch.Tensor


def in_hetero(x):
    data = HeteroData()
    data["paper"].x = x
    data["paper", "cites", "paper"].edge_index = EDGES
    return data


CARRIERS = {
    "tensor": (lambda x: x, lambda v: v),
    "view": (lambda x: x[:, :], lambda v: v),
    "tuple": (lambda x: (1, (x, "a")), lambda v: v[1][0]),
    "list": (lambda x: [None, x], lambda v: v[1]),
    "dict": (lambda x: {"a": {"b": x}}, lambda v: v["a"]["b"]),
    "Data": (lambda x: Data(x=x, edge_index=EDGES), lambda v: v.x),
    "HeteroData": (in_hetero, lambda v: v["paper"].x),
    "dataclass": (Batch, lambda v: v.x),
    "slots": (Slotted, lambda v: v.x),
    "parameter": (nn.Parameter, lambda v: v),
}


class TestOwnership:
    @pytest.mark.parametrize("bits", [2, 32])
    @pytest.mark.parametrize("carrier", CARRIERS)
    def test_inputs_are_kept_and_not_counted(self, carrier, bits):
        put, take = CARRIERS[carrier]

        def forward(module, value):
            x = take(value)
            return (x @ module.weight).sum() + (x.t() @ x @ module.weight).mean()

        model = wrapped(forward, bits=bits)
        assert equal(train(model, put(X)), train(Lambda(forward), put(X)))
        assert gact_graph.report(model).raw_bytes < 10_000  # no row of x

    def test_keyword_inputs(self):
        model = wrapped(lambda module, *, x: (x @ module.weight).sum())
        model(x=X).backward()
        assert gact_graph.report(model).contexts == []

    def test_parameters_and_their_views(self):
        def forward(module, x):
            h = (x @ module.weight) @ module.weight.t()
            return (h @ module.weight[:, ::2]).sum()

        model = wrapped(forward)
        train(model, X)
        assert {row.shape for row in rows(model).values()} == {(300, 64), (300, 32)}

    def test_buffers(self):
        class Buffered(Lambda):
            def __init__(self, function):
                super().__init__(function)
                self.register_buffer("scale", torch.randn(300, 64))

        def forward(module, x):
            return ((x @ module.weight) * module.scale).sum()

        model = gact_graph.wrap(make(lambda: Buffered(forward)), bits=2, min_bytes=0)
        plain = make(lambda: Buffered(forward))
        plain.load_state_dict(model.state_dict())
        assert equal(train(model, X), train(plain, X))
        assert gact_graph.report(model).contexts == []

    @pytest.mark.parametrize("level", ["L0", "lossless", "L1", "CB2"])
    def test_coo_adjacency(self, level):
        adjacency = torch.sparse_coo_tensor(
            EDGES, torch.rand(EDGES.size(1)), (300, 300), check_invariants=False
        )
        for matrix in (adjacency, adjacency.coalesce()):

            def forward(module, x, matrix=matrix):
                return torch.sparse.mm(matrix, x @ module.weight)

            stock, model = (
                Lambda(forward),
                gact_graph.wrap(Lambda(forward), level=level, min_bytes=0),
            )
            stock(X).sum().backward()
            model(X).sum().backward()
            assert torch.equal(model.weight.grad, stock.weight.grad)

    def test_sparse_adjacency(self):
        adjacency = csr()

        def forward(module, adj, x):
            return (adj @ (x @ module.weight)).sum()

        model = wrapped(forward)
        assert equal(train(model, adjacency, X), train(Lambda(forward), adjacency, X))
        assert gact_graph.report(model).contexts == []

    @pytest.mark.parametrize("steps", [1, 2])
    def test_caches_of_a_layer(self, steps):
        class Cached(nn.Module):
            def __init__(self, cached):
                super().__init__()
                self.conv = GCNConv(FEATURES, 64, cached=cached)

            def forward(self, x, edge_index):
                return self.conv(x, edge_index).tanh().sum()

        _, edges = graph(edges=5000)
        model = gact_graph.wrap(make(lambda: Cached(True)), bits=4, blocks=False, min_bytes=0)
        for _ in range(steps):
            train(model, X, edges)
        shapes = [row.shape for row in rows(model).values()]
        assert shapes == [(300, 64)]  # tanh alone: neither the weights of the edges nor their index
        other = gact_graph.wrap(make(lambda: Cached(False)), bits=4, blocks=False, min_bytes=0)
        train(other, X, edges)
        assert len(rows(other)) > 1

    def test_outputs(self):
        model = wrapped(lambda module, x: torch.tanh(x @ module.weight), bits=2)
        plain = Lambda(model.function)
        model(X).sum().backward()
        plain(X).sum().backward()
        assert torch.equal(model.weight.grad, plain.weight.grad)
        [row] = gact_graph.report(model).contexts
        assert (row.codec, row.bits) == ("keep", None)
        assert row.stored_bytes == row.raw_bytes == 300 * 64 * 4

    def test_outputs_within_a_dict(self):
        model = wrapped(lambda module, x: {"h": [torch.tanh(x @ module.weight)]}, bits=2)
        model(X)["h"][0].sum().backward()
        assert [row.codec for row in gact_graph.report(model).contexts] == ["keep"]

    def test_tiny_tensors(self):
        def forward(module, x):
            return torch.tanh(x[:2] @ module.weight).sum()

        model = wrapped(forward, bits=2)
        assert equal(train(model, X), train(Lambda(forward), X))
        [row] = gact_graph.report(model).contexts
        assert (row.codec, row.stored_bytes) == ("keep", 2 * 64 * 4)

    def test_integers_and_losses(self):
        def forward(module, x):
            h = x @ module.weight
            return F.cross_entropy(h, labels()) + h[torch.arange(2000) % 300].mean()

        model = wrapped(forward, bits=2)
        assert equal(train(model, X), train(Lambda(forward), X))
        assert {row.codec for row in rows(model).values()} == {"keep", "index"}
        assert "index" in {row.role for row in rows(model).values()}


class TestInPlaceChanges:
    WORDS = "modified by an inplace operation"

    @pytest.mark.parametrize("what", ["input", "parameter", "output", "tiny"])
    def test_of_a_kept_tensor_raises(self, what):
        def forward(module, x):
            tiny = torch.tanh(x[:2] @ module.weight)
            out = torch.tanh(torch.tanh(x @ module.weight) @ module.weight.t()) + tiny.sum()
            hidden.append(tiny)
            return torch.sigmoid(out)

        hidden = []
        x = X.clone()
        model = wrapped(forward, bits=8)
        out = model(x)
        victim = {"input": x, "parameter": model.weight, "output": out, "tiny": hidden[0]}[what]
        with torch.no_grad():
            victim.mul_(2)
        with pytest.raises(RuntimeError, match=self.WORDS) as caught:
            torch.autograd.backward(out, torch.ones(300, 32))
        assert "saved at" in str(caught.value)

    def test_of_a_quantized_one_is_no_matter(self):
        hidden = []

        def forward(module, x):
            h = torch.tanh(x @ module.weight)
            hidden.append(h.detach())
            return (h * 2).sum()

        expected = train(Lambda(forward), X)
        model = wrapped(forward, bits=8)
        out = model(X)
        hidden[-1].zero_()
        out.backward()
        assert distance([model.weight.grad], expected) < 0.05

    def test_inside_forward_each_version_is_its_own(self):
        def forward(module, x):
            h = x @ module.weight
            a = h * module.weight[0]  # saves h
            h = h.detach()
            h.mul_(3)
            return (a + h * module.weight[1]).sum()  # saves 3 h

        model = wrapped(forward, bits=12)
        out = model(X)
        out.backward()
        h = (X @ model.weight).detach()
        grad = X.t() @ model.weight[0].detach().expand(300, 64)
        grad[0] += h.sum(0)
        grad[1] += 3 * h.sum(0)
        assert distance([model.weight.grad], [grad]) < 0.01


class TestGraphs:
    def test_retain_graph_gives_the_same_twice(self):
        model = gact_graph.wrap(make(GraphNet), bits=2, min_bytes=0)
        loss = model(X, EDGES).sum()
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        assert equal(list(first), list(torch.autograd.grad(loss, parameters)))

    @pytest.mark.parametrize("bits", [12, 32])
    def test_several_forwards_before_one_backward(self, bits):
        def siamese(model):
            model.zero_grad()
            outs = [model(graph(seed=s)[0], graph(seed=s)[1]) for s in (0, 1)]
            (outs[0] * outs[1].detach() + outs[1]).sum().backward()
            return gradients(model)

        expected = siamese(make(lambda: GraphNet(dropout=0.0)))
        model = make(lambda: GraphNet(dropout=0.0))
        got = siamese(gact_graph.wrap(model, bits=bits, blocks=False, min_bytes=0))
        assert equal(got, expected) if bits == 32 else distance(got, expected) < 0.02

    def test_double_backward(self):
        def penalty(model):
            x = X.clone().requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            grad.square().sum().backward()
            return gradients(model)

        expected = penalty(make(Mlp))
        assert equal(penalty(gact_graph.wrap(make(Mlp), bits=32, min_bytes=0)), expected)
        assert distance(penalty(gact_graph.wrap(make(Mlp), bits=12, min_bytes=0)), expected) < 0.02
        assert all(
            g.isfinite().all() for g in penalty(gact_graph.wrap(make(Mlp), bits=4, min_bytes=0))
        )

    def test_a_gradient_within_forward(self):
        def forward(module, x):
            x = x.clone().requires_grad_()
            energy = torch.tanh(x @ module.weight).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0].square().sum()

        exact = train(Lambda(forward), X)
        assert equal(train(wrapped(forward, bits=32), X), exact)
        assert distance(train(wrapped(forward, bits=12), X), exact) < 0.02

    def test_backward_on_another_thread(self):
        model = gact_graph.wrap(make(Mlp), bits=2, min_bytes=0)
        loss = model(X).sum()
        parameters = list(model.parameters())
        here = torch.autograd.grad(loss, parameters, retain_graph=True)
        there = []
        thread = threading.Thread(
            target=lambda: there.extend(torch.autograd.grad(loss, parameters))
        )
        thread.start()
        thread.join()
        assert equal(there, list(here))

    def test_forward_on_two_threads_at_once(self):
        models = [gact_graph.wrap(make(Mlp), bits=2, seed=s, min_bytes=0) for s in (0, 1)]
        expected = [
            train_step(gact_graph.wrap(make(Mlp), bits=2, seed=s, min_bytes=0), X) for s in (0, 1)
        ]
        got = [None, None]

        def work(i):
            F.cross_entropy(models[i](X), labels()).backward()
            got[i] = gradients(models[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(equal(g, e) for g, e in zip(got, expected, strict=True))

    def test_dtypes(self):
        for dtype in (torch.float64, torch.bfloat16):
            model = gact_graph.wrap(make(Mlp).to(dtype), bits=6, min_bytes=0)
            got = train_step(model, X.to(dtype))
            assert {g.dtype for g in got} == {dtype}
            assert distance(got, train_step(make(Mlp).to(dtype), X.to(dtype))) < 0.2
            assert gact_graph.report(model).rate > 1.5


def views(h):
    """Saved values of every kind of layout."""
    return {
        "plain": h,
        "transpose": h.t(),
        "columns": h[:, 1::3],
        "rows": h[10:200],
        "one column": h[:, 3],
        "3d permuted": h.view(300, 8, 8).permute(2, 0, 1),
        "expanded": h[:, None, :].expand(300, 3, 64),
        "expanded column": h[:, :1].expand(300, 64),
        "unfold": h.view(-1).unfold(0, 100, 50),
        "empty": h[:0],
        "empty columns": h[:, 5:5],
        "scalar": h[7, 7],
    }


class TestUnpacked:
    @pytest.mark.parametrize("bits", [8, 32])
    @pytest.mark.parametrize("kind", views(torch.zeros(300, 64)))
    def test_has_the_same_shape_dtype_and_strides(self, kind, bits):
        class Save(torch.autograd.Function):
            @staticmethod
            def forward(ctx, h):
                view = views(h.detach())[kind]
                seen.append((view.clone(), view.shape, view.dtype, view.stride()))
                ctx.save_for_backward(view)
                return h.sum()

            @staticmethod
            def backward(ctx, grad):
                got.extend(ctx.saved_tensors)
                return grad.expand(300, 64)

        seen, got = [], []
        model = wrapped(lambda module, x: Save.apply(x @ module.weight), bits=bits)
        model(X).backward()
        [(value, *layout)], [tensor] = seen, got
        assert [tensor.shape, tensor.dtype, tensor.stride()] == layout
        # A step is 1/255 of a group's range, which lies within [-10, 10]; stats round up in bf16.
        torch.testing.assert_close(tensor, value, rtol=0, atol=0.0 if bits == 32 else 0.1)


class TestNothingLeaks:
    @pytest.mark.parametrize("backward", [False, True])
    @pytest.mark.parametrize("kind", ["gcn", "gat"])
    def test_after_the_output_is_gone(self, kind, backward):
        gc.collect()
        gc.disable()
        try:
            before = {id(t) for t in stored_tensors()}
            model = gact_graph.wrap(make(lambda: GraphNet(kind)), bits=2, min_bytes=0)
            out = model(X, EDGES)
            fresh = [weakref.ref(t) for t in stored_tensors() if id(t) not in before]
            assert len(fresh) > 5
            if backward:
                out.sum().backward()
            del out
            assert [r for r in fresh if r() is not None] == []
        finally:
            gc.enable()

    def test_the_report_holds_no_tensor(self):
        model = gact_graph.wrap(make(Mlp), bits=2, min_bytes=0)
        model(X)
        fields = [v for row in gact_graph.report(model).contexts for v in vars(row).values()]
        assert not any(isinstance(v, torch.Tensor) for v in fields)


class TestTensorsThatCannotBeCompared:
    """Quantized, meta, float8 and complex32 tensors of a custom function are kept by reference."""

    KINDS = {  # noqa: RUF012
        "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "by channel": lambda x: torch.quantize_per_channel(
            x, torch.full((x.size(1),), 0.1), torch.zeros(x.size(1)), 1, torch.qint8
        ),
        "meta": lambda x: x.to("meta"),
        "float8": lambda x: (x * 0).to(torch.float8_e4m3fn),
        "complex32": lambda x: x.to(torch.complex32),
    }

    @pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:.*quantized tensor creation")
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("level", ["lossless", "L1"])
    def test_forward_and_backward_run(self, kind, level):
        convert = self.KINDS[kind]

        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(convert(x), convert(x))
                return 2 * x

            @staticmethod
            def backward(ctx, gradient):
                assert [t.shape for t in ctx.saved_tensors] == [gradient.shape] * 2
                return 2 * gradient

        model = gact_graph.wrap(
            make(lambda: Lambda(lambda _, x: Doubled.apply(x))), level=level, min_bytes=0
        )
        x = torch.randn(300, 64, generator=seeded(0)).requires_grad_()
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_model_on_the_meta_device_runs_as_stock():
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(300, FEATURES)
    out = gact_graph.wrap(model, min_bytes=0)(x)
    out.sum().backward()
    assert out.is_meta and all(p.grad is not None for p in model.parameters())


def test_weak_dictionaries_of_a_model_are_looked_into():
    class Key:
        pass

    key, model = Key(), Lambda(lambda m, x: ((x @ m.weight) * m.cache[key]).sum())
    model.cache = weakref.WeakKeyDictionary({key: torch.rand(300, 64)})
    model.views = weakref.WeakValueDictionary({"key": key})
    train(gact_graph.wrap(model, min_bytes=0), X)
    assert gact_graph.report(model).contexts == []  # the model holds the factor itself

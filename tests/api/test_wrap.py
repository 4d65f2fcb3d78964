"""wrap, unwrap, report and compress, as a user meets them."""

import copy
import functools
import gc
import io
import pickle
import pydoc
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from samples import (
    GraphNet,
    Lambda,
    Mlp,
    distance,
    equal,
    graph,
    make,
    one_thread,  # noqa: F401
    train_step,
)
from torch import nn
from torch.fx import symbolic_trace
from torch.utils.checkpoint import checkpoint

import gact_graph

KINDS = ["gcn", "gat", "sage", "gin"]


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class TestWrap:
    def test_its_help_fits_on_two_screens_of_80_columns(self):
        _, *lines = pydoc.plain(pydoc.render_doc(gact_graph.wrap)).splitlines()
        assert all(len(line) <= 80 for line in lines if not line.startswith("wrap(model"))
        assert sum(-(-max(len(line), 1) // 80) for line in lines) <= 100

    def test_unknown_arguments_raise_as_in_python(self):
        with pytest.raises(TypeError, match=r"wrap\(\) got an unexpected .* 'bit'"):
            gact_graph.wrap(GraphNet(), bit=4)

    def test_gives_the_same_object_class_and_state(self):
        model = GraphNet()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        wrapped = gact_graph.wrap(model)
        after = wrapped.state_dict()
        assert wrapped is model
        assert type(wrapped) is GraphNet
        assert list(after) == list(before)
        assert all(torch.equal(after[key], before[key]) for key in before)
        assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in GraphNet().named_modules()]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("options", [{"bits": 32, "blocks": False}, {"level": "L0"}], ids=str)
    def test_without_quantization_gradients_are_bit_identical(self, kind, options):
        plain = make(lambda: GraphNet(kind))
        wrapped = gact_graph.wrap(make(lambda: GraphNet(kind)), min_bytes=0, **options)
        for step in range(2):
            expected = train_step(plain, *graph(), seed=step)
            assert equal(train_step(wrapped, *graph(), seed=step), expected)
        assert all(map(torch.equal, plain.buffers(), wrapped.buffers()))

    @pytest.mark.parametrize("kind", KINDS)
    def test_l1_gradients_are_near_and_differ(self, kind):
        plain = make(lambda: GraphNet(kind))
        wrapped = gact_graph.wrap(make(lambda: GraphNet(kind)), bits=12, min_bytes=0)
        expected, got = train_step(plain, *graph()), train_step(wrapped, *graph())
        # 12 bits err by less than 1/4095 of a group's range, but leaky_relu's rare changes of sign
        # count fully.
        assert 0 < distance(got, expected) < 0.03
        assert gact_graph.report(wrapped).rate > 1.2

    def test_l1_gradients_are_unbiased(self):
        expected = train_step(make(Mlp), graph()[0])
        single, total = 0.0, None
        steps = 32
        for seed in range(steps):
            model = gact_graph.wrap(make(Mlp), bits=2, seed=seed, adaptive=False, min_bytes=0)
            got = train_step(model, graph()[0])
            single += distance(got, expected) / steps
            total = got if total is None else [a + b for a, b in zip(total, got, strict=True)]
        mean = distance([t / steps for t in total], expected)
        # The error of a mean of 32 falls by 5.6. tanh's gradient 1 - y^2 is of second order in the
        # quantized y, so a bias of about Var(y) stays: unbiased to first order, as GACT has it.
        assert single > 0.1
        assert mean < single / 2.5

    def test_a_linear_net_is_unbiased(self):
        def net():
            return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 5))

        expected = train_step(make(net), graph()[0])
        got = [
            train_step(gact_graph.wrap(make(net), bits=2, seed=s, min_bytes=0), graph()[0])
            for s in range(32)
        ]
        mean = [torch.stack(parts).mean(0) for parts in zip(*got, strict=True)]
        # Here the gradient is linear in the context: the error falls as 1/sqrt(32), with a margin.
        assert distance(mean, expected) < distance(got[0], expected) / 4

    def test_the_seed_decides(self):
        runs = [
            train_step(gact_graph.wrap(make(GraphNet), bits=2, seed=s, min_bytes=0), *graph())
            for s in (1, 1, 2)
        ]
        assert equal(runs[0], runs[1])
        assert not equal(runs[0], runs[2])

    def test_each_step_has_its_own_noise(self):
        # Not adaptive: other bits would make other gradients, too.
        model = gact_graph.wrap(make(Mlp), bits=2, adaptive=False, min_bytes=0)
        assert not equal(train_step(model, graph()[0]), train_step(model, graph()[0]))

    def test_leaves_the_random_state_alone(self):
        def state_after(model):
            torch.manual_seed(0)
            out = model(*graph())
            out.sum().backward()
            return out.detach(), torch.get_rng_state()

        (plain, plain_state), (out, state) = (
            state_after(m)
            for m in (
                make(GraphNet),
                gact_graph.wrap(make(GraphNet), bits=2, blocks=False, min_bytes=0),
            )
        )
        assert torch.equal(plain, out)
        assert torch.equal(plain_state, state)

    def test_keyword_arguments_and_signature(self):
        import inspect

        model = gact_graph.wrap(GraphNet(), min_bytes=0)
        x, edge_index = graph()
        model(edge_index=edge_index, x=x).sum().backward()
        assert [*inspect.signature(model.forward).parameters] == ["x", "edge_index"]

    def test_lazy_modules(self):
        from torch_geometric.nn import SAGEConv

        model = gact_graph.wrap(SAGEConv(-1, 64), min_bytes=0)
        optimizer_sees = len(list(model.parameters()))
        model(*graph()).sum().backward()
        assert optimizer_sees == len(list(model.parameters()))
        slots = {row["slot"]: row for row in gact_graph.report(model).to_dict()["contexts"]}
        assert slots and not any("weight" in slot for slot in slots)


class TestFewBits:
    WORDS = r"With bits={} many elements have one bit, .* Take bits=2 or more"

    @pytest.mark.parametrize(
        "options", [{"bits": 1}, {"bits": 1.5}, {"bits": 1, "adaptive": False}], ids=str
    )
    def test_wrap_warns_before_the_first_step(self, options):
        with pytest.warns(RuntimeWarning, match=self.WORDS.format(options["bits"])) as warnings:
            model = gact_graph.wrap(Mlp(), **options, min_bytes=0)
        assert [w.filename for w in warnings] == [__file__]
        train_step(model, graph()[0])  # and not again: a warning is an error here

    def test_a_warning_that_is_an_error_leaves_the_model_unwrapped(self):
        model = Mlp()
        with pytest.raises(RuntimeWarning, match=self.WORDS.format(1)):
            gact_graph.wrap(model, bits=1)
        gact_graph.wrap(model, bits=2)

    @pytest.mark.parametrize(
        "options", [{"bits": 2}, {"bits": 1, "level": "lossless"}, {"memory": "1 GB"}], ids=str
    )
    def test_no_warning_where_none_is_due(self, options):
        gact_graph.wrap(Mlp(), min_bytes=0, **options)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"bits": 0}, ValueError, r"Expected bits to be from 1 to 16, or 32 .*\(got 0\)"),
            ({"bits": -1}, ValueError, r"\(got -1\)"),
            ({"level": "l1"}, ValueError, r"\(got 'l1'\); did you mean 'L1'\?"),
            ({"level": "Lossless"}, ValueError, r"\(got 'Lossless'\); did you mean 'lossless'\?"),
            ({"level": "L3"}, ValueError, r"\(got 'L3'\)$"),
            ({"bits": 17}, ValueError, r"Expected bits to be from 1 to 16, or 32 .*\(got 17\)"),
            ({"bits": 33}, ValueError, r"\(got 33\)"),
            ({"bits": True}, TypeError, r"Expected bits to be a number \(got bool\)"),
            ({"bits": "4"}, TypeError, r"Expected bits to be a number \(got str\)"),
            (
                {"level": "L9"},
                ValueError,
                r"Expected level to be one of 'L0', 'lossless', 'L1', 'L2', 'CB2' "
                r"\(got 'L9'\)",
            ),
            ({"level": ["L1"]}, TypeError, r"Expected level to be a str \(got list\)"),
            ({"group_size": 100}, ValueError, r"Expected group_size .* 64 \(got 100\)"),
            ({"group_size": 0}, ValueError, r"Expected group_size .* 64 \(got 0\)"),
            ({"group_size": 64.0}, TypeError, r"Expected group_size to be an int \(got float\)"),
            ({"seed": 1.5}, TypeError, r"Expected seed to be an int \(got float\)"),
            (
                {"bits": 2.5, "adaptive": False},
                TypeError,
                r"Expected bits to be an int \(got float\)",
            ),
        ],
        ids=str,
    )
    def test_options(self, options, error, words):
        model = Mlp()
        with pytest.raises(error, match=words):
            gact_graph.wrap(model, **options)
        assert hooks_on(model) == 0
        assert "forward" not in vars(model)

    @pytest.mark.parametrize("call", ["wrap", "unwrap", "report", "compress"])
    def test_no_module(self, call):
        with pytest.raises(TypeError, match=r"Expected model to be a torch.nn.Module \(got str\)"):
            with_enter(getattr(gact_graph, call)("net"))

    @pytest.mark.parametrize("call", ["unwrap", "report", "compress"])
    def test_plain_model(self, call):
        with pytest.raises(ValueError, match=r"Expected a wrapped model \(got a plain Mlp\)"):
            with_enter(getattr(gact_graph, call)(Mlp()))

    def test_no_parameters(self):
        words = r"Expected a model with parameters \(got Identity with none\)"
        with pytest.raises(ValueError, match=words):
            gact_graph.wrap(nn.Identity())

    def test_wrapped_twice(self):
        model = gact_graph.wrap(Mlp(), min_bytes=0)
        words = r"Expected a model that is not wrapped \(got Mlp: it is wrapped already\)"
        with pytest.raises(ValueError, match=words):
            gact_graph.wrap(model)
        assert len(train_step(model, graph()[0])) == 6

    def test_wrapped_submodule(self):
        model = GraphNet()
        gact_graph.wrap(model.convs[1])
        words = r"\(got GraphNet: its submodule 'convs.1' is wrapped\); call gact_graph.unwrap"
        with pytest.raises(ValueError, match=words):
            gact_graph.wrap(model)

    @pytest.mark.parametrize("options", [{}, {"memory": "8 GB"}], ids=str)
    def test_a_submodule_of_a_wrapped_model(self, options):
        model = gact_graph.wrap(GraphNet(), min_bytes=0, **options)
        words = (
            r"\(got \w+: it is the submodule 'convs.0' of a wrapped GraphNet\); "
            "call gact_graph.unwrap on the wrapped module first"
        )
        for whole in (model, by_pickle(model), copy.deepcopy(model)):
            with pytest.raises(ValueError, match=words):
                gact_graph.wrap(whole.convs[0], bits=2)
        part = copy.deepcopy(model.convs[0])
        assert gact_graph.wrap(part, min_bytes=0) is part
        gact_graph.unwrap(model)
        assert gact_graph.wrap(model.convs[0], min_bytes=0) is model.convs[0]


def with_enter(manager):
    with manager:
        pass


class TestUnwrap:
    def test_leaves_nothing_behind(self):
        model = GraphNet("gat")
        before = {name: sorted(vars(part)) for name, part in model.named_modules()}
        hooks = hooks_on(model)
        gact_graph.wrap(model, min_bytes=0)
        assert hooks_on(model) > hooks
        assert gact_graph.unwrap(model) is model
        assert hooks_on(model) == hooks
        assert {name: sorted(vars(part)) for name, part in model.named_modules()} == before
        for part in model.modules():
            for table in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
                assert not getattr(part, table)
        plain = make(Mlp)
        again = gact_graph.unwrap(gact_graph.wrap(make(Mlp), bits=2, min_bytes=0))
        assert equal(train_step(again, graph()[0]), train_step(plain, graph()[0]))

    def test_restores_a_forward_of_the_instance(self):
        model = make(Mlp)
        original = model.forward
        model.forward = mine = lambda x: 2 * original(x)
        gact_graph.wrap(model, min_bytes=0)
        x, _ = graph()
        assert torch.equal(model(x), 2 * original(x))
        assert gact_graph.unwrap(model).forward is mine

    def test_a_graph_made_before_still_backpropagates(self):
        model = gact_graph.wrap(make(Mlp), bits=8, min_bytes=0)
        out = model(graph()[0])
        gact_graph.unwrap(model)
        F.cross_entropy(out, torch.arange(len(out)) % 5).backward()
        got = [p.grad for p in model.parameters()]
        assert distance(got, train_step(make(Mlp), graph()[0])) < 0.05

    def test_wraps_again(self):
        model = gact_graph.unwrap(gact_graph.wrap(Mlp(), min_bytes=0))
        assert len(train_step(gact_graph.wrap(model, bits=8, min_bytes=0), graph()[0])) == 6
        assert gact_graph.report(model).rate > 2

    def test_hooks_of_others_stay(self):
        model = Mlp()
        calls = []
        model.first.register_forward_hook(lambda *_: calls.append("hook"))
        gact_graph.unwrap(gact_graph.wrap(model))(graph()[0])
        assert calls == ["hook"]


def by_method(model):
    """Decorates the function of a method, as accelerate does for mixed precision."""
    forward = decorated(model.forward.__func__)
    model.forward = types.MethodType(forward, model)


def by_function(model):
    model.forward = decorated(model.forward)


def decorated(function):
    @functools.wraps(function)
    def doubled(*args):
        return 2 * function(*args)

    return doubled


@pytest.mark.parametrize("decorate", [by_method, by_function])
class TestDecorated:
    """Another library decorates the forward of a wrapped model."""

    def test_is_wrapped(self, decorate):
        model = gact_graph.wrap(make(Mlp), bits=8, min_bytes=0)
        decorate(model)
        stock = make(Mlp)
        decorate(stock)
        x, _ = graph()
        assert distance(train_step(model, x), train_step(stock, x)) < 0.05
        assert gact_graph.report(model).rate > 2
        gact_graph.load_state_dict(model, gact_graph.state_dict(model))
        with pytest.raises(ValueError, match="it is wrapped already"):
            gact_graph.wrap(model)

    def test_unwrap_leaves_the_decorator(self, decorate):
        model = gact_graph.wrap(make(Mlp), bits=2, min_bytes=0)
        decorate(model)
        gact_graph.unwrap(model)
        stock = make(Mlp)
        decorate(stock)
        x, _ = graph()
        assert equal(train_step(model, x), train_step(stock, x))
        with pytest.raises(ValueError, match="Expected a wrapped model"):
            gact_graph.report(model)
        gact_graph.wrap(model, bits=8, min_bytes=0)
        train_step(model, x)
        assert gact_graph.report(model).rate > 2


def test_a_deep_copy_of_a_decorated_model_trains_alone():
    model = gact_graph.wrap(make(Mlp), min_bytes=0)
    by_method(model)
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match="Expected a wrapped model"):
        gact_graph.report(copied)
    with pytest.warns(RuntimeWarning, match="nothing was compressed"):
        assert len(train_step(copied, graph()[0])) == 6
    assert all(p.grad is None for p in model.parameters())


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_file])
class TestCopies:
    def test_are_independent(self, copied):
        model = gact_graph.wrap(make(GraphNet), bits=2, blocks=False, min_bytes=0)
        twin = copied(model)
        assert gact_graph.report(twin).empty
        got = train_step(twin, *graph())
        assert gact_graph.report(model).empty
        assert not gact_graph.report(twin).empty
        assert equal(got, train_step(model, *graph()))
        before = gact_graph.report(model)
        train_step(twin, *graph(100))
        assert gact_graph.report(model).contexts is before.contexts
        gact_graph.unwrap(twin)
        assert hooks_on(twin) == 0
        assert hooks_on(model) > 0
        slots = [row.slot for row in before.contexts]
        train_step(model, *graph())
        assert [row.slot for row in gact_graph.report(model).contexts] == slots
        assert any(slot.startswith("convs.0/") for slot in slots)

    def test_continue_with_the_same_noise(self, copied):
        model, x = gact_graph.wrap(make(Mlp), bits=2, min_bytes=0), graph()[0]
        train_step(model, x)
        twin = copied(model)
        assert equal(train_step(twin, x), train_step(model, x))

    def test_within_a_forward_of_the_original(self, copied):
        model = gact_graph.wrap(make(Mlp), bits=2, min_bytes=0)
        twin = copied(model)
        with gact_graph.compress(model):
            twin(graph()[0])
        assert not gact_graph.report(twin).empty

    def test_a_submodule_alone(self, copied):
        model = gact_graph.wrap(make(GraphNet), min_bytes=0)
        part = copied(model.convs[0])
        x, edge_index = graph()
        with pytest.warns(RuntimeWarning, match="copied out of a wrapped model"):
            part(x, edge_index).sum().backward()
        assert part.lin.weight.grad is not None


def test_a_deleted_model_is_free_at_once():
    gc.collect()
    gc.disable()
    try:
        model = gact_graph.wrap(GraphNet(), min_bytes=0)
        train_step(model, *graph())
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


class TestNoTraining:
    @pytest.mark.parametrize("how", ["eval", "no_grad", "inference"])
    def test_compresses_nothing(self, how):
        model = gact_graph.wrap(make(GraphNet), bits=2, blocks=False, min_bytes=0)
        if how == "eval":
            expected = train_step(make(GraphNet).eval(), *graph())
            assert equal(train_step(model.eval(), *graph()), expected)
        else:
            with torch.no_grad() if how == "no_grad" else torch.inference_mode():
                model(*graph())
        assert gact_graph.report(model).empty

    def test_the_report_of_training_stays(self):
        model = gact_graph.wrap(make(GraphNet), bits=2, min_bytes=0)
        train_step(model, *graph())
        before = gact_graph.report(model)
        model.eval()(*graph())
        with gact_graph.compress(model):
            model.convs[0](*graph())
        assert gact_graph.report(model).contexts is before.contexts


class TestCompress:
    def test_parts_of_a_model(self):
        model = gact_graph.wrap(make(GraphNet), bits=4, min_bytes=0)
        x, edge_index = graph()
        with gact_graph.compress(model):
            h = torch.tanh(model.convs[0](x, edge_index))
            out = model.convs[1](h, edge_index)
        out.sum().backward()
        slots = {row.slot: row for row in gact_graph.report(model).contexts}
        assert slots["tanh.result"].codec == "quantize"
        assert "convs.0/lin/linear.input" not in slots  # x came from the caller
        assert any(slot.startswith("convs.1/") for slot in slots)
        assert equal([x], [graph()[0]])

    def test_whole_model_inside(self):
        model = gact_graph.wrap(make(Mlp), bits=4, seed=3, adaptive=False, min_bytes=0)
        alone = train_step(model, graph()[0])
        expected = [row.slot for row in gact_graph.report(model).contexts]
        again = gact_graph.wrap(make(Mlp), bits=4, seed=3, adaptive=False, min_bytes=0)
        with gact_graph.compress(again):
            out = again(graph()[0])
        F.cross_entropy(out, torch.arange(len(out)) % 5).backward()
        assert equal([p.grad for p in again.parameters()], alone)
        assert [row.slot for row in gact_graph.report(again).contexts] == expected

    def test_backward_inside_is_still_reported(self):
        model = gact_graph.wrap(make(Mlp), bits=4, min_bytes=0)
        with gact_graph.compress(model):
            model(graph()[0]).sum().backward()
        assert gact_graph.report(model).rate > 2
        assert model.first.weight.grad is not None

    def test_a_block_within_a_block(self):
        model = gact_graph.wrap(make(Mlp), bits=4, min_bytes=0)
        with gact_graph.compress(model), gact_graph.compress(model):
            out = model(graph()[0])
        out.sum().backward()
        assert gact_graph.report(model).rate > 2

    def test_an_exception_leaves_no_report(self):
        model = gact_graph.wrap(make(Mlp), bits=4, min_bytes=0)
        with pytest.raises(RuntimeError, match="shapes"), gact_graph.compress(model):
            model.last(model.first(graph()[0])[:, :7])
        assert gact_graph.report(model).empty


class TestWithOthers:
    def test_autocast(self):
        def step(model):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(*graph())
            F.cross_entropy(out.float(), torch.arange(len(out)) % 5).backward()
            return [p.grad for p in model.parameters()]

        expected = step(make(lambda: GraphNet(dropout=0.0)))
        model = gact_graph.wrap(make(lambda: GraphNet(dropout=0.0)), bits=8, min_bytes=0)
        # bfloat16 itself keeps 8 bits.
        assert distance(step(model), expected) < 0.05
        exact = gact_graph.wrap(make(lambda: GraphNet(dropout=0.0)), bits=32, min_bytes=0)
        assert equal(step(exact), expected)

    @pytest.mark.parametrize("bits", [8, 32])
    def test_checkpoint_inside_the_model(self, bits):
        class Checkpointed(Mlp):
            def forward(self, x):
                h = torch.tanh(self.first(x))
                h = checkpoint(self.middle, h, use_reentrant=False)
                return self.last(h)

            def middle(self, h):
                return F.dropout(torch.tanh(self.second(h)), 0.5, self.training)

        expected = train_step(make(Checkpointed), graph()[0])
        model = gact_graph.wrap(make(Checkpointed), bits=bits, min_bytes=0)
        got = train_step(model, graph()[0])
        assert distance(got, expected) < (0.05 if bits == 8 else 1e-12)
        # The checkpoint still works: what it will recompute is not saved.
        assert not any("second" in row.slot for row in gact_graph.report(model).contexts)


def test_arguments_of_any_name():
    def forward(_, x, *, module, function):
        return function(x @ module.weight)

    model = gact_graph.wrap(Lambda(forward), level="lossless", min_bytes=0)
    for compiles in (False, True):
        if compiles:
            model.compile(backend="eager")
        model(graph()[0], module=model, function=torch.tanh).sum().backward()
        assert not gact_graph.report(model).empty


def test_a_copy_of_a_graph_of_torch_fx_is_plain():
    model = gact_graph.wrap(symbolic_trace(make(Mlp)), bits=2, min_bytes=0)
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="got a plain GraphModule"):
        gact_graph.report(twin)
    gact_graph.wrap(twin, bits=2, min_bytes=0)
    assert equal(train_step(twin, graph()[0]), train_step(model, graph()[0]))


class TestDecisionsOfOneCall:
    """They do not switch compression off for later calls, with the default min_bytes."""

    @staticmethod
    def compressed(model, x):
        model(x).square().mean().backward()
        return gact_graph.report(model).rate > 1.5

    @staticmethod
    def net():
        layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return gact_graph.wrap(nn.Sequential(*layers), adaptive=False, min_bytes=1 << 20)

    def test_a_tiny_batch(self):
        model, x = self.net(), torch.randn(3000, 32)
        assert [self.compressed(model, x) for _ in range(2)][-1]
        self.compressed(model, x[:4].clone())
        assert [self.compressed(model, x) for _ in range(2)][-1]

    def test_an_input_that_once_needs_a_gradient(self):
        model, x = self.net(), torch.randn(3000, 32)
        assert [self.compressed(model, x) for _ in range(2)][-1]
        self.compressed(model, x.clone().requires_grad_())
        assert [self.compressed(model, x) for _ in range(2)][-1]


@pytest.mark.parametrize("first", [0, 1])
def test_models_that_share_a_layer_are_unwrapped_in_any_order(first):
    shared = make(GraphNet)
    models = [nn.ModuleList([shared]), nn.ModuleList([shared])]
    before = {name: {*vars(module)} for name, module in shared.named_modules()}
    for model in models:
        gact_graph.wrap(model, blocks=200, min_bytes=0)
    for model in (models[first], models[1 - first]):
        gact_graph.unwrap(model)
    assert {name: {*vars(module)} for name, module in shared.named_modules()} == before


def test_patches_go_with_their_model():
    shared = make(GraphNet)
    before = {name: {*vars(module)} for name, module in shared.named_modules()}
    model = gact_graph.wrap(nn.ModuleList([shared]), blocks=200, min_bytes=0)
    assert {name: {*vars(module)} for name, module in shared.named_modules()} != before
    del model
    gc.collect()
    assert {name: {*vars(module)} for name, module in shared.named_modules()} == before


def test_a_pin_of_a_part_that_runs_in_a_later_context():
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    gact_graph.wrap(model, pin={"2/*": 8}, min_bytes=0)
    with gact_graph.compress(model):
        h = model[1](model[0](graph()[0]))
    with gact_graph.compress(model):
        out = model[3](model[2](h))
    out.sum().backward()
    assert 8 in [row.bits for row in gact_graph.report(model).contexts]

"""Other uses of a wrapped model in training scripts: the rows of docs/compatibility.md."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from samples import (
    FEATURES,
    GraphNet,
    Mlp,
    distance,
    equal,
    gradients,
    graph,
    make,
    one_thread,  # noqa: F401
    train_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCNConv

import gact_graph

X, EDGES = graph()
EXACT = {"level": "lossless", "min_bytes": 0}
LEVELS = ["lossless", "L1", "CB2"]
ROOT = Path(__file__).parent.parent


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 5))


def hooks_on(model):
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks)
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)
    )


# Dynamo looks at the gradient of a tensor that has none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
class TestCompile:
    def test_before_wrap(self, backend):
        expected = train_step(torch.compile(make(GraphNet), backend="aot_eager"), X, EDGES)
        model = gact_graph.wrap(torch.compile(make(GraphNet), backend=backend), memory="1 GB")
        assert distance(train_step(model, X, EDGES), expected) < 1e-6
        assert backend.frame_count > 0
        assert gact_graph.report(model).planned_bytes < 10**9

    @pytest.mark.parametrize("in_place", [False, True])
    def test_of_a_layer(self, backend, in_place):
        model = make(GraphNet)
        if in_place:
            model.convs[1].compile(backend=backend)
        else:
            model.convs[1] = torch.compile(model.convs[1], backend=backend)
        gact_graph.wrap(model, **EXACT)
        for _ in range(2):
            got = train_step(model, X, EDGES)
        assert backend.frame_count > 0
        assert distance(got, train_step(make(GraphNet), X, EDGES)) < 1e-6
        slots = [row.slot for row in gact_graph.report(model).contexts]
        assert any(slot.startswith("convs.0/") for slot in slots)

    @pytest.mark.parametrize("way", ["after", "after, in place", "before, in place", "fullgraph"])
    def test_after_wrap_is_that_of_before(self, backend, way):
        options = {"bits": 4, "min_bytes": 0}
        before = gact_graph.wrap(torch.compile(make(plain), backend="aot_eager"), **options)
        expected = train_step(before, X)
        model = make(plain)
        if way == "before, in place":
            model.compile(backend=backend)
        compiled = gact_graph.wrap(model, **options)
        if way == "after, in place":
            model.compile(backend=backend)
        elif way != "before, in place":
            compiled = torch.compile(model, backend=backend, fullgraph=way == "fullgraph")
        assert equal(train_step(compiled, X), expected)
        stored = gact_graph.report(model).stored_bytes
        assert stored == gact_graph.report(before).stored_bytes
        assert backend.frame_count == 1

    def test_after_wrap_at_level_0_trains_uncompiled_and_says_so(self, backend):
        model = gact_graph.wrap(make(GraphNet), level="L0", min_bytes=0)
        compiled = torch.compile(model, backend=backend)
        with pytest.warns(RuntimeWarning, match=r"gact_graph.wrap\(torch.compile\(model\)\)"):
            train_step(compiled, X, EDGES)
        train_step(compiled, X, EDGES)  # says it once
        assert backend.frame_count == 0

    def test_of_a_function_around_starts_a_graph(self, backend):
        model = gact_graph.wrap(make(plain), bits=4, min_bytes=0)

        def doubled(x):
            return model(2 * x) * 2

        torch.compile(doubled, backend=backend)(X).sum().backward()
        assert backend.frame_count == 3
        assert [row.slot for row in gact_graph.report(model).contexts] == ["graphs"]
        torch.compiler.reset()
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"gact_graph.wrap\(torch.compile\(model\)\)"
        ):
            torch.compile(doubled, backend=backend, fullgraph=True)(X)

    @pytest.mark.parametrize("blocks", [pytest.param(False, marks=pytest.mark.long), 64])
    def test_after_wrap_evaluates_with_graph_breaks(self, backend, blocks):
        """There the graph breaks, and the methods that are replaced go on as Python."""

        class Breaks(GraphNet):
            def forward(self, x, edge_index):
                torch._dynamo.graph_break()
                return super().forward(x, edge_index)

        compiled = torch.compile(gact_graph.wrap(make(Breaks), blocks=blocks), backend=backend)
        expected = make(Breaks).eval()(X, EDGES)
        assert torch.allclose(compiled.eval()(X, EDGES), expected, atol=1e-6)

    def test_after_wrap_evaluates_compiled(self, backend):
        compiled = torch.compile(gact_graph.wrap(make(GraphNet)), backend=backend, fullgraph=True)
        expected = make(GraphNet).eval()(X, EDGES)
        assert torch.allclose(compiled.eval()(X, EDGES), expected, atol=1e-6)
        assert backend.frame_count == 1


class TestExport:
    @pytest.mark.parametrize("strict", [False, True])
    def test_in_eval(self, strict):
        model = gact_graph.wrap(make(GraphNet), min_bytes=0).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it deprecates in itself
            program = torch.export.export(model, (X, EDGES), strict=strict)
        assert torch.allclose(program.module()(X, EDGES), model(X, EDGES), atol=1e-6)

    def test_script_names_the_remedy(self):
        model = gact_graph.wrap(make(plain), min_bytes=0)
        with pytest.raises(AttributeError, match=r"script gact_graph.unwrap\(model\)"):
            script(model)
        scripted = script(gact_graph.unwrap(model))
        assert torch.equal(scripted(X), model(X))

    @pytest.mark.parametrize("training", [False, True])
    def test_trace(self, training):
        model = gact_graph.wrap(make(Mlp), min_bytes=0).train(training)
        assert torch.allclose(trace(model, X)(X), model(X))

    def test_a_scripted_layer_trains_inside(self):
        def net(kind):
            model = make(plain)
            model[1] = kind(nn.Sequential(nn.Tanh(), nn.Linear(64, 64)))
            return model

        model = gact_graph.wrap(make(lambda: net(script)), **EXACT)
        # The scripted part adds up in another order once it was profiled.
        assert distance(train_step(model, X), train_step(make(lambda: net(script)), X)) < 1e-6
        assert hooks_on(gact_graph.unwrap(model)) == 0

    def test_a_wrap_that_fails_leaves_no_hooks(self, monkeypatch):
        model = make(GraphNet)
        before = hooks_on(model)

        def fails(*args, **kwargs):
            raise RuntimeError("on purpose")

        monkeypatch.setattr(model.convs[1], "register_forward_hook", fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            gact_graph.wrap(model)
        assert hooks_on(model) == before
        assert "forward" not in vars(model)

    @pytest.mark.parametrize("how", ["script", "trace"])
    def test_a_scripted_model_is_refused(self, how):
        model = make(plain)
        made = script(model) if how == "script" else trace(model, X)
        with pytest.raises(ValueError, match="wrap the original model"):
            gact_graph.wrap(made)


class TestChangesAfterWrap:
    """At the exact level, so that the results are those of stock."""

    @pytest.mark.parametrize("options", [EXACT, {"level": "lossless", "blocks": 512}], ids=str)
    def test_a_layer_that_was_replaced(self, options):
        def changed(model):
            model.convs[1] = make(lambda: GCNConv(32, 5), seed=1)
            return model

        model = gact_graph.wrap(make(GraphNet), **{"min_bytes": 0} | options)
        train_step(model, X, EDGES)
        changed(model)
        got = train_step(model, X, EDGES)
        assert distance(got, train_step(changed(make(GraphNet)), X, EDGES)) < 1e-6
        report = gact_graph.report(model)
        slots = [row.slot for row in report.contexts]
        assert any(slot.startswith("convs.1/") for slot in slots)
        assert {row.way for row in report.layers} == ({"blocks"} if "blocks" in options else set())
        assert hooks_on(gact_graph.unwrap(model)) == 0

    @pytest.mark.parametrize("blocks", [False, "auto"])
    def test_a_layer_that_was_added(self, blocks):
        class Growing(GraphNet):
            def forward(self, x, edge_index):
                x = self.norm(self.convs[0](x, edge_index))
                for conv in self.convs[1:]:
                    x = conv(x, edge_index)
                return x

        def grown(model):
            model.convs.append(make(lambda: GCNConv(5, 5), seed=1))
            return model

        model = gact_graph.wrap(make(Growing), level="CB2", blocks=blocks, bits=32, min_bytes=0)
        train_step(model, X, EDGES)
        got = train_step(grown(model), X, EDGES)
        assert distance(got, train_step(grown(make(Growing)), X, EDGES)) < 1e-6
        recomputed = [r.slot for r in gact_graph.report(model).layers if r.way == "recomputed"]
        assert len(recomputed) == 3

    @pytest.mark.parametrize("level", LEVELS)
    def test_requires_grad(self, level):
        plain, model = (
            make(GraphNet),
            gact_graph.wrap(make(GraphNet), level=level, bits=32, min_bytes=0),
        )
        for learns in (True, False, True):
            for net in (plain, model):
                net.convs[0].requires_grad_(learns)
            got, expected = train_step(model, X, EDGES), train_step(plain, X, EDGES)
            assert len(got) == len(expected)
            assert distance(got, expected) < 1e-6

    @pytest.mark.parametrize("level", LEVELS)
    def test_dtype(self, level):
        plain, model = (
            make(GraphNet),
            gact_graph.wrap(make(GraphNet), level=level, bits=32, min_bytes=0),
        )
        for dtype in (torch.float64, torch.float32):
            expected = train_step(plain.to(dtype), X.to(dtype), EDGES)
            got = train_step(model.to(dtype), X.to(dtype), EDGES)
            assert got[0].dtype == dtype
            assert distance(got, expected) < 1e-6

    def test_dtype_with_adaptive_bits(self):
        model = gact_graph.wrap(make(GraphNet), bits=8, min_bytes=0)
        for dtype in (torch.float32, torch.float64, torch.float64, torch.float32, torch.float32):
            expected = train_step(make(GraphNet).to(dtype), X.to(dtype), EDGES)
            assert distance(train_step(model.to(dtype), X.to(dtype), EDGES), expected) < 0.05

    @pytest.mark.parametrize("level", LEVELS)
    def test_reset_parameters(self, level):
        plain, model = (
            make(GraphNet),
            gact_graph.wrap(make(GraphNet), level=level, bits=32, min_bytes=0),
        )
        train_step(model, X, EDGES)
        for net in (plain, model):
            torch.manual_seed(5)
            for conv in net.convs:
                conv.reset_parameters()
            net.norm.reset_running_stats()
        assert distance(train_step(model, X, EDGES), train_step(plain, X, EDGES)) < 1e-6


class Checkpointed(GraphNet):
    reentrant = False

    def forward(self, x, edge_index):
        h = self.norm(self.convs[0](x, edge_index)).relu()
        return checkpoint(self.convs[1], h, edge_index, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class TestCheckpoint:
    @pytest.mark.parametrize("net", [Checkpointed, Reentrant])
    @pytest.mark.parametrize(
        "options", [*({"level": level} for level in LEVELS), {"blocks": 512}], ids=str
    )
    def test_inside(self, net, options):
        model = gact_graph.wrap(make(net), bits=8, adaptive=False, **{"min_bytes": 0} | options)
        expected = train_step(make(net), X, EDGES)
        for _ in range(2):
            assert distance(train_step(model, X, EDGES), expected) < 0.05
        # What is computed again is not saved.
        slots = [row.slot for row in gact_graph.report(model).contexts]
        assert not any(slot.startswith("convs.1/aggregate") for slot in slots)

    @pytest.mark.parametrize("level", LEVELS)
    def test_around_a_norm(self, level):
        class Normed(GraphNet):
            def __init__(self):
                super().__init__("gcn")
                self.norm = nn.BatchNorm1d(self.convs[0].out_channels)

            def part(self, x, edge_index):
                return self.norm(self.convs[0](x, edge_index)).relu()

            def forward(self, x, edge_index):
                hidden = checkpoint(self.part, x, edge_index, use_reentrant=False)
                return self.convs[1](hidden, edge_index)

        model = gact_graph.wrap(make(Normed), bits=8, adaptive=False, level=level, min_bytes=0)
        expected = train_step(make(Normed), X, EDGES)
        for _ in range(2):
            assert distance(train_step(model, X, EDGES), expected) < 0.05

    def test_inside_with_adaptive_bits(self):
        model = gact_graph.wrap(make(Checkpointed), bits=8, min_bytes=0)
        expected = train_step(make(Checkpointed), X, EDGES)
        for _ in range(4):
            assert distance(train_step(model, X, EDGES), expected) < 0.05
        assert gact_graph.report(model).measurements > 0

    def test_reentrant_inside_is_measured_around(self):
        model = gact_graph.wrap(make(Reentrant), bits=8, min_bytes=0)
        expected = train_step(make(Reentrant), X, EDGES)
        got = [train_step(model, X, EDGES) for _ in range(4)]
        assert all(distance(gradient, expected) < 0.05 for gradient in got)
        assert gact_graph.report(model).measurements > 0

    @pytest.mark.parametrize("level", LEVELS)
    def test_around_compresses_in_its_place(self, level):
        def step(model):
            model.zero_grad()
            torch.manual_seed(0)
            x = X.clone().requires_grad_()
            out = checkpoint(lambda x: model(x, EDGES).tanh() * 2, x, use_reentrant=False)
            out.square().mean().backward()
            return [x.grad, *gradients(model)]

        model = gact_graph.wrap(make(GraphNet), level=level, bits=8, min_bytes=0)
        expected = step(make(GraphNet))
        for _ in range(3):
            assert distance(step(model), expected) < 0.05
        assert gact_graph.report(model).rate > 1.2


class TestPrecision:
    def test_grad_scaler(self):
        def steps(model):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                torch.manual_seed(step)
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(model(X, EDGES), torch.arange(len(X)) % 5)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return [p.detach().clone() for p in model.parameters()]

        expected = steps(make(GraphNet))
        assert equal(steps(gact_graph.wrap(make(GraphNet), **EXACT)), expected)
        assert (
            distance(steps(gact_graph.wrap(make(GraphNet), bits=8, min_bytes=0)), expected) < 0.01
        )

    def test_accumulation(self):
        def steps(model):
            model.zero_grad()
            for step in range(4):
                torch.manual_seed(step)
                loss = F.cross_entropy(model(X * (1 + step), EDGES), torch.arange(len(X)) % 5)
                (loss / 4).backward()
            return gradients(model)

        expected = steps(make(GraphNet))
        assert equal(steps(gact_graph.wrap(make(GraphNet), **EXACT)), expected)
        assert (
            distance(steps(gact_graph.wrap(make(GraphNet), bits=8, min_bytes=0)), expected) < 0.05
        )


class TestExplainer:
    @pytest.mark.parametrize("blocks", [None, "auto"])
    def test_explains_as_it_does_a_plain_model(self, blocks):
        def explain(model):
            torch.manual_seed(0)
            config = {"mode": "multiclass_classification", "task_level": "node"}
            explainer = Explainer(
                model,
                GNNExplainer(epochs=5),
                explanation_type="model",
                node_mask_type="attributes",
                edge_mask_type="object",
                model_config={**config, "return_type": "raw"},
            )
            explanation = explainer(X, EDGES, index=3)
            return [explanation.node_mask, explanation.edge_mask]

        model = gact_graph.wrap(make(GraphNet), bits=2, blocks=blocks, min_bytes=0)
        train_step(model, X, EDGES)
        before = gact_graph.report(model)
        expected = make(GraphNet)
        train_step(expected, X, EDGES)
        assert distance(explain(model), explain(expected)) < 1e-5
        assert gact_graph.report(model).contexts is before.contexts


class TestLightning:
    def test_bf16_with_accumulation(self, tmp_path):
        lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.gnn = GraphNet(dropout=0.0)
                self.head = nn.Linear(5, 5)

            def training_step(self, batch, index):
                # Lightning asks for this in place of a direct call.
                loss = F.cross_entropy(self.head(self.gnn(X, EDGES)), torch.arange(len(X)) % 5)
                self.log("loss", loss, batch_size=1)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        def train(model):
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="cpu",
                precision="bf16-mixed",
                accumulate_grad_batches=2,
                default_root_dir=tmp_path,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(model, torch.utils.data.DataLoader(torch.arange(6), batch_size=1))
            return [p.detach().clone() for p in model.parameters()]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Lightning, on workers, cores and its own imports
            warnings.filterwarnings("error", module="gact_graph")
            expected = train(make(Module))
            exact = train(gact_graph.wrap(make(Module), **EXACT))
            model = gact_graph.wrap(make(Module), bits=8, min_bytes=0)
            near = train(model)
        assert equal(exact, expected)
        assert 0 < distance(near, expected) < 0.01
        report = gact_graph.report(model)
        assert report.rate > 1.5
        assert any(row.slot.startswith("gnn/convs.0/") for row in report.contexts)


TRAIN = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch and PyG, while they are imported
    import torch, torch_geometric.nn
import gact_graph
torch.manual_seed(0)
x, edges = torch.randn(300, 32), torch.randint(300, (2, 2000))
for kind in ("GCN", "GAT"):
    for level in ("L0", "lossless", "L1", "L2", "CB2"):
        for min_bytes in (0, 16 << 20):
            model = getattr(torch_geometric.nn, kind)(32, 32, 2, 5)
            gact_graph.wrap(model, bits=4, level=level, min_bytes=min_bytes)
            for _ in range(3):
                model(x, edges).square().mean().backward()
            print(gact_graph.report(model).raw_bytes > 0)
"""


@pytest.mark.long
def test_python_with_warnings_as_errors_trains():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRAIN],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 20


def script(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def trace(module, *inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, inputs)

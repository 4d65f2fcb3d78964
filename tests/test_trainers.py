"""Other people's training code, around a wrapped model: rows of docs/compatibility.md."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from samples import (
    GraphNet,
    distance,
    equal,
    graph,
    labels,
    make,
    one_thread,  # noqa: F401
    train_step,
)
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_geometric import profile
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import (
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    ShaDowKHopSampler,
)
from torch_geometric.nn import HeteroConv, SAGEConv, summary
from torch_geometric.profile.profiler import Profiler

import gact_graph

X, EDGES = graph()
EXACT = {"level": "lossless", "min_bytes": 0}


def results(train: Callable[[nn.Module], Any], net: Callable[[], nn.Module] = GraphNet) -> None:
    """Check that training gives the parameters of stock PyG at lossless, and near ones at L1."""

    def parameters(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        train(model)
        return [p.detach().clone() for p in model.parameters()]

    expected = parameters(make(net))
    assert equal(parameters(gact_graph.wrap(make(net), **EXACT)), expected)
    model = gact_graph.wrap(make(net), bits=8, min_bytes=0)
    assert 0 < distance(parameters(model), expected) < 0.01
    assert gact_graph.report(model).rate > 1.5


def steps(model: nn.Module, losses: Iterator[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.skipif(
    importlib.util.find_spec("torch_sparse") is None, reason="PyG samples with torch-sparse"
)
@pytest.mark.filterwarnings("ignore:.*pyg-lib")
@pytest.mark.parametrize("kind", ["saint", "shadow", "link"])
def test_loaders(kind: str) -> None:
    data = Data(x=X, edge_index=EDGES, y=labels())

    def loader() -> Any:
        if kind == "saint":
            return GraphSAINTRandomWalkSampler(data, 100, 2, num_steps=3)
        if kind == "shadow":
            return ShaDowKHopSampler(data, depth=2, num_neighbors=4, batch_size=100)
        return LinkNeighborLoader(data, [4, 4], batch_size=700, neg_sampling_ratio=1.0)

    def losses(model: nn.Module) -> Iterator[Tensor]:
        for batch in loader():
            out = model(batch.x, batch.edge_index)
            if kind == "link":
                source, target = batch.edge_label_index
                score = (out[source] * out[target]).sum(-1)
                yield F.binary_cross_entropy_with_logits(score, batch.edge_label)
            else:
                yield F.cross_entropy(out[batch.root_n_id] if kind == "shadow" else out, batch.y)

    results(lambda model: steps(model, losses(model)))


@pytest.mark.skipif(
    importlib.util.find_spec("torch_sparse") is None, reason="PyG samples with torch-sparse"
)
@pytest.mark.filterwarnings("ignore:.*pyg-lib")
@pytest.mark.parametrize("kind", [NeighborLoader, HGTLoader])
def test_hetero_loaders(kind: Any) -> None:
    data = HeteroData()
    data["a"].x, data["b"].x, data["a"].y = X, X.flip(0), labels()
    data["a", "to", "b"].edge_index, data["b", "to", "a"].edge_index = EDGES, EDGES.flip(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = ((32, 32), (32, 5))
            self.convs = nn.ModuleList(
                HeteroConv({kind: SAGEConv(*width) for kind in data.edge_types}) for width in widths
            )

        def forward(self, x: dict[str, Tensor], edge_index: Any) -> Tensor:
            hidden = {kind: h.tanh() for kind, h in self.convs[0](x, edge_index).items()}
            out: Tensor = self.convs[1](hidden, edge_index)["a"]
            return out

    def losses(model: nn.Module) -> Iterator[Tensor]:
        for batch in kind(data, [64, 64], input_nodes="a", batch_size=100):
            seeds = batch["a"].batch_size
            out = model(batch.x_dict, batch.edge_index_dict)[:seeds]
            yield F.cross_entropy(out, batch["a"].y[:seeds])

    results(lambda model: steps(model, losses(model)), Net)


# Since torch 2.15: tensors that a policy saves may pass hooks in a later version.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
def test_selective_checkpoint() -> None:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = operation == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    class Net(GraphNet):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            conv, last = self.convs
            x = checkpoint(conv, x, edge_index, use_reentrant=False, context_fn=contexts)
            out: Tensor = last(self.norm(x).relu(), edge_index)
            return out

    def losses(model: nn.Module) -> Iterator[Tensor]:
        for _ in range(3):
            yield F.cross_entropy(model(X, EDGES), labels())

    results(lambda model: steps(model, losses(model)), Net)


@pytest.mark.parametrize("options", [EXACT, {"bits": 4, "min_bytes": 0}])
def test_summary(options: dict[str, Any]) -> None:
    pytest.importorskip("tabulate")
    model, stock = gact_graph.wrap(make(GraphNet), **options), make(GraphNet)
    assert summary(model, X, EDGES) == summary(stock, X, EDGES)
    assert gact_graph.report(model).empty
    train_step(model, X, EDGES)
    assert summary(model, X, EDGES) == summary(stock, X, EDGES)


@pytest.mark.parametrize("options", [EXACT, {"bits": 4, "min_bytes": 0}])
def test_profile(options: dict[str, Any]) -> None:
    model, stock = gact_graph.wrap(make(GraphNet), **options), make(GraphNet)
    assert profile.count_parameters(model) == profile.count_parameters(stock)
    expected = train_step(make(GraphNet), X, EDGES)
    with profile.timeit(log=False) as time, Profiler(model) as profiler:
        found = train_step(model, X, EDGES)
    assert time.duration > 0
    assert "convs" in str(profiler.get_trace())
    assert equal(found, expected) if options is EXACT else distance(found, expected) < 0.5
    assert len(train_step(model, X, EDGES)) == len(expected)  # the profiler has restored forward
    assert gact_graph.report(model).rate > 1.2


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(model: nn.Module) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        prepared, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(prepared(X, EDGES), labels()))
            optimizer.step()
        alone = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert alone is model and alone(X, EDGES).shape == (300, 5)

    results(train)


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_of_transformers(
    bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # The folder datasets of this repository is not the package that the Trainer looks for.
    monkeypatch.setattr(transformers.trainer, "is_datasets_available", lambda: False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gnn = GraphNet()

        def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.gnn(x, edge_index)
            return {"loss": F.cross_entropy(out, labels), "logits": out}

    def train(model: nn.Module) -> None:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=3,
            per_device_train_batch_size=1,
            learning_rate=0.01,
            use_cpu=True,
            bf16=bf16,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            save_strategy="no",
        )
        data = [{"x": X, "edge_index": EDGES, "labels": labels()}]
        transformers.Trainer(
            model, arguments, train_dataset=data, data_collator=lambda rows: rows[0]
        ).train()

    results(train, Net)


STATIC_GRAPH = """
from samples import GraphNet, distance, equal, graph, gradients, labels, make
from torch.nn.parallel import DistributedDataParallel

def train(**options):
    model = make(GraphNet)
    if options:
        gact_graph.wrap(model, min_bytes=0, **options)
    parallel = DistributedDataParallel(model, static_graph=True)
    for step in range(4):
        x, edges = graph(seed=step + 10 * rank)
        parallel.zero_grad()
        torch.manual_seed(step)
        F.cross_entropy(parallel(x, edges), labels()).backward()
    return gradients(model)

expected = train()
assert equal(train(level="lossless"), expected)
assert 0 < distance(train(bits=8), expected) < 0.05
"""


def test_data_parallel_with_a_static_graph(tmp_path: Path) -> None:
    run_ranks(STATIC_GRAPH, tmp_path)

"""GCN, GAT and GCNII: shapes, normalization, residuals, and the recipe that they are built from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experiments_samples import small_graph
from torch import nn
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv

from experiments.helpers.data import layout_of, prepare
from experiments.helpers.recipes import MODELS, Recipe
from experiments.models.nets import GCNII, attention, build

RECIPE = Recipe(layers=3, hidden=8, dropout=0.5, lr=0.01, epochs=1, heads=2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_logits_and_gradients(model: str, layers: int) -> None:
    task = prepare(small_graph(), layout_of(model))
    network = build(model, replace(RECIPE, layers=layers), 3, 5)
    assert len(network.convs) == layers
    logits = network(task.x, task.adjacency)
    assert logits.shape == (60, 5)
    logits.square().sum().backward()
    without = [name for name, weight in network.named_parameters() if weight.grad is None]
    assert without == []


def test_gat_concatenates_hidden_heads_and_averages_the_last() -> None:
    network = attention(replace(RECIPE, attention_dropout=0.1), 3, 5)
    assert [conv.in_channels for conv in network.convs] == [3, 16, 16]
    assert [conv.concat for conv in network.convs] == [True, True, False]
    assert [conv.dropout for conv in network.convs] == [0.1] * 3


def test_build_passes_the_whole_recipe_on() -> None:
    recipe = replace(
        RECIPE, input_dropout=0.25, attention_dropout=0.1, alpha=0.3, theta=None, residual=True
    )
    gat = build("gat", recipe, 3, 5)
    assert (gat.input_dropout.p, gat.dropout.p, gat.convs[0].dropout) == (0.25, 0.5, 0.1)
    gcnii = build("gcnii", recipe, 3, 5)
    assert (gcnii.convs[2].alpha, gcnii.convs[2].beta, gcnii.residual) == (0.3, 1.0, True)
    for model in MODELS:
        plain = build(model, replace(recipe, batch_norm=False), 3, 5)
        assert not any(isinstance(module, nn.BatchNorm1d) for module in plain.modules())
        assert any(isinstance(m, nn.BatchNorm1d) for m in build(model, recipe, 3, 5).modules())


@pytest.mark.parametrize("model", ["gcn", "gcnii"])
def test_agreement_with_a_normalization_in_every_layer(model: str) -> None:
    """The adjacency that is normalized once is the one PyG makes in every layer."""
    graph = small_graph()
    once = build(model, RECIPE, 3, 5)
    anew = build(model, RECIPE, 3, 5, normalize=True)
    anew.load_state_dict(once.state_dict())
    csr, edges = prepare(graph, "csr"), prepare(graph, "edge_index")
    once.eval(), anew.eval()
    torch.testing.assert_close(once(csr.x, csr.adjacency), anew(edges.x, edges.adjacency))


def test_gcnii_weakens_its_weights_with_depth_and_adds_the_residual() -> None:
    network = GCNII(RECIPE, 3, 5)
    betas = [conv.beta for conv in network.convs]
    assert betas == pytest.approx([0.4055, 0.2231, 0.1542], abs=1e-4)
    task = prepare(small_graph(), "csr")
    network.eval()
    plain = network(task.x, task.adjacency)
    network.residual = True
    assert not torch.allclose(plain, network(task.x, task.adjacency))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gcn", ["dropout"] + ["conv", "norm", "relu", "dropout"] * 2 + ["conv"]),
        ("gat", ["dropout"] + ["conv", "norm", "relu", "dropout"] * 2 + ["conv"]),
        (
            "gcnii",
            ["linear", "relu", "dropout"] + ["conv", "norm", "relu", "dropout"] * 3 + ["linear"],
        ),
    ],
)
def test_order_of_operations(model: str, expected: list[str]) -> None:
    names = {
        nn.BatchNorm1d: "norm",
        nn.ReLU: "relu",
        nn.Dropout: "dropout",
        nn.Linear: "linear",
        GATConv: "conv",
        GCNConv: "conv",
        GCN2Conv: "conv",
    }
    ran: list[str] = []
    network = build(model, RECIPE, 3, 5)
    for module in network.modules():
        if type(module) in names:
            module.register_forward_hook(lambda m, args, out: ran.append(names[type(m)]))
    task = prepare(small_graph(), layout_of(model))
    network(task.x, task.adjacency)
    assert ran == expected


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match=r"Expected model 'gcn', 'gat' or 'gcnii' \(got 'gin'\)"):
        build("gin", RECIPE, 3, 5)

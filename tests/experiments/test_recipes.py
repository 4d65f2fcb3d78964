"""The hyperparameters of each model and data set."""

from __future__ import annotations

import pytest

from experiments.helpers.recipes import MODELS, Recipe, base_name, has_foreign_features, recipe_for

# As published: layers / hidden / dropout / lr / epochs
PUBLISHED = {
    "gcn": {
        "ogbn-arxiv": (3, 128, 0.5, 0.01, 500),
        "flickr": (2, 256, 0.3, 0.01, 400),
        "reddit": (2, 256, 0.5, 0.01, 400),
        "yelp": (2, 512, 0.1, 0.01, 500),
    },
    "gcnii": {
        "ogbn-arxiv": (16, 256, 0.1, 0.001, 1000),
        "flickr": (8, 256, 0.5, 0.01, 400),
        "reddit": (4, 256, 0.5, 0.01, 400),
        "yelp": (4, 512, 0.0, 0.01, 500),
    },
    "gat": {
        "ogbn-arxiv": (3, 128, 0.5, 0.01, 500),
        "flickr": (2, 64, 0.3, 0.01, 400),
        "reddit": (2, 64, 0.5, 0.01, 400),
        "yelp": (2, 128, 0.1, 0.01, 500),
    },
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dataset", ["ogbn-arxiv", "flickr", "reddit", "yelp"])
def test_published_recipes(model: str, dataset: str) -> None:
    recipe = recipe_for(model, dataset)
    found = (recipe.layers, recipe.hidden, recipe.dropout, recipe.lr, recipe.epochs)
    assert found == PUBLISHED[model][dataset]
    assert recipe.standardize == (dataset == "yelp")
    assert recipe.batch_norm


def test_what_one_model_alone_has() -> None:
    gcnii = {name: recipe_for("gcnii", name) for name in PUBLISHED["gcnii"]}
    assert {name: (r.alpha, r.theta, r.residual) for name, r in gcnii.items()} == {
        "ogbn-arxiv": (0.5, None, True),
        "flickr": (0.1, 0.5, False),
        "reddit": (0.1, 0.5, False),
        "yelp": (0.2, 0.5, False),
    }
    gat = {name: recipe_for("gat", name) for name in PUBLISHED["gat"]}
    assert {name: r.heads for name, r in gat.items()} == {
        "ogbn-arxiv": 3,
        "flickr": 4,
        "reddit": 4,
        "yelp": 4,
    }
    assert (gat["ogbn-arxiv"].input_dropout, gat["ogbn-arxiv"].attention_dropout) == (0.25, 0.1)


@pytest.mark.parametrize("model", MODELS)
def test_any_other_graph_has_a_recipe(model: str) -> None:
    assert recipe_for(model, "digits") == recipe_for(model, "some/where/mine.npz")
    assert recipe_for(model, "digits").weight_decay == 5e-4
    assert not recipe_for(model, "data/cora.npz").batch_norm
    assert recipe_for(model, "digits").batch_norm


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("flickr", "flickr"),
        ("synthetic:reddit", "reddit"),
        ("synthetic:reddit@0.1", "reddit"),
        ("../x/arxiv_graph.npz", "ogbn-arxiv"),
        ("flickr_graph.npz", "flickr"),
        ("/x/cora.npz", "cora"),
    ],
)
def test_base_name(dataset: str, name: str) -> None:
    assert base_name(dataset) == name


def test_foreign_features() -> None:
    assert has_foreign_features("x/arxiv_graph.npz")
    assert not has_foreign_features("x/cora.npz")
    assert not has_foreign_features("ogbn-arxiv")


def test_overrides_leave_the_table_alone() -> None:
    before = recipe_for("gcn", "flickr")
    changed = recipe_for("gcn", "flickr", hidden=8, dropout=0.0, lr=None)
    assert changed == Recipe(2, 8, 0.0, 0.01, 400)
    assert recipe_for("gcn", "flickr") == before


def test_unknown_model() -> None:
    with pytest.raises(KeyError, match="gin"):
        recipe_for("gin", "digits")

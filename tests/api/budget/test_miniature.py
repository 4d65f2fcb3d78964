"""Smaller graphs with the proportions of the given one."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature

N, E = 100, 700
EDGES = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(0))
EDGES[:, 0] = N - 1


def shapes(value):
    return [tuple(t.shape) for t in value]


def test_nodes_and_edges_shrink_by_their_shares_and_the_rest_stays():
    args = torch.randn(N, 8), EDGES, torch.randn(E, 3), torch.randn(5, 4), torch.tensor(2.0)
    mini = Miniature(args, {"batch": torch.arange(N)})
    assert mini.size == GraphSize(N, E)
    small, named = mini.shrunk(0.25, 0.5)
    assert shapes(small) == [(25, 8), (2, 350), (350, 3), (5, 4), ()]
    assert named["batch"].shape == (25,)
    assert int(small[1].max()) < 25 and torch.equal(small[0], args[0][:25])


def test_features_that_are_classes():
    """Of atoms, say; the last ones have no bonds."""
    atoms, bonds, batch = torch.zeros(N + 3, 1).long(), torch.zeros(E).long(), torch.arange(N + 3)
    mini = Miniature((atoms, EDGES, bonds, batch, torch.zeros(7).long()), {})
    assert mini.size == GraphSize(N + 3, E)
    (atoms, edges, bonds, batch, of_graphs), _ = mini.shrunk(0.5, 0.1)
    assert shapes([atoms, edges, bonds, batch, of_graphs]) == [(52, 1), (2, 70), (70,), (52,), (7,)]


def test_inputs_are_cut_off_from_what_made_them():
    x, edges = torch.randn(N, 8, requires_grad=True), EDGES
    mini = Miniature((x * 2, Data(x=x, edge_index=edges)), {})
    (cut, data), _ = mini.shrunk(0.5, 0.5)
    for tensor in (cut, data.x):
        assert tensor is not x and tensor.is_leaf and tensor.requires_grad


def test_an_edge_keeps_its_features():
    features = EDGES.t().float()
    (edges, attr), _ = Miniature((EDGES, features), {}).shrunk(0.5, 0.1)
    assert torch.equal(edges, attr.t().long() * 50 // 100)


def test_a_graph_may_also_grow():
    (x, edges), _ = Miniature((torch.randn(N, 8), EDGES), {}).shrunk(3.0, 2.0)
    assert x.shape == (3 * N, 8) and edges.shape == (2, 2 * E) and int(edges.max()) < 3 * N


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, None])
def test_sparse_matrices(layout):
    if layout is None and not WITH_TORCH_SPARSE:
        pytest.skip("torch-sparse is not installed")
    dense = torch.zeros(N, N)
    dense[EDGES[1], EDGES[0]] = 1.0
    given = SparseTensor.from_dense(dense) if layout is None else dense.to_sparse(layout=layout)
    mini = Miniature((torch.randn(N, 8), given), {})
    assert mini.size == GraphSize(N, int(dense.sum()))
    (x, small), _ = mini.shrunk(0.5, 0.5)
    assert x.size(0) == 50 and tuple(small.sizes() if layout is None else small.shape) == (50, 50)
    assert type(small) is type(given)
    assert layout is None or small.layout == layout


USERS_LIKE = ("user", "likes", "item")


def test_a_list_of_indices_is_not_taken_for_classes_of_nodes():
    ids, pairs, labels = torch.arange(N), torch.zeros(2, 300).long(), torch.zeros(300).long()
    assert Miniature((ids, EDGES, pairs, labels), {}).size == GraphSize(N, E)


def test_types_without_nodes_or_edges():
    """As in a sampled batch."""
    x = {"user": torch.randn(40, 4), "item": torch.randn(0, 5)}
    edges = {USERS_LIKE: torch.zeros(2, 0).long(), ("user", "knows", "user"): EDGES % 40}
    mini = Miniature((x, edges), {})
    assert mini.size == GraphSize(40, E)
    (x, edges), _ = mini.shrunk(0.5, 0.1)
    assert shapes([*x.values(), *edges.values()]) == [(20, 4), (0, 5), (2, 0), (2, 70)]


def test_by_type_in_dicts_however_they_are_passed():
    x = {"user": torch.randn(40, 4), "item": torch.randn(60, 5)}
    edges = {USERS_LIKE: torch.stack([torch.arange(200) % 40, torch.arange(200) % 60])}
    for args, kwargs in (((x, edges), {}), ((), {"x_dict": x, "edge_index_dict": edges})):
        mini = Miniature(args, kwargs)
        assert mini.size == GraphSize(100, 200)
        args, kwargs = mini.shrunk(0.5, 0.25)
        nodes, links = args or kwargs.values()
        assert shapes(nodes.values()) == [(20, 4), (30, 5)]
        assert links[USERS_LIKE].shape == (2, 50)
        assert links[USERS_LIKE].amax(dim=1).tolist() <= [19, 29]


def test_data_objects_are_copied():
    data = Data(x=torch.randn(N, 8), edge_index=EDGES, edge_attr=torch.randn(E, 2), name="cora")
    (small,), _ = Miniature((data,), {}).shrunk(0.5, 0.5)
    assert (small.x.size(0), small.edge_index.size(1), small.edge_attr.size(0)) == (50, 350, 350)
    assert small.name == "cora" and data.x.size(0) == N
    hetero = HeteroData()
    hetero["user"].x, hetero["item"].x = torch.randn(40, 4), torch.randn(60, 5)
    hetero[USERS_LIKE].edge_index = torch.stack([torch.arange(200) % 40, torch.arange(200) % 60])
    (small,), _ = Miniature((hetero,), {}).shrunk(0.5, 0.5)
    assert small["item"].x.size(0) == 30 and small[USERS_LIKE].edge_index.size(1) == 100


def test_without_a_graph_it_says_so():
    with pytest.raises(CannotShrink, match="no edge_index and no sparse matrix"):
        Miniature((torch.randn(5, 3),), {})

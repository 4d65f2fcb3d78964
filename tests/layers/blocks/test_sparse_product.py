"""Products with sparse matrices that run as sums over sorted edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCN2Conv, GCNConv, SAGEConv
from torch_geometric.utils import spmm, to_torch_csr_tensor

import gact_graph
from gact_graph.layers.blocks.order import Orders
from gact_graph.layers.blocks.sparse_product import sparse_product

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # beta state, invariants

ROWS, COLUMNS, ENTRIES, WIDTH = 700, 500, 4000, 32


def matrix(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a matrix with empty rows and columns, and some entries twice as large as others."""
    generator = seeded(seed)
    where = torch.randperm((ROWS - 50) * (COLUMNS - 30), generator=generator)[:ENTRIES]
    entries = torch.randn(ENTRIES, generator=generator, dtype=dtype)
    index = torch.stack([where // (COLUMNS - 30), where % (COLUMNS - 30)])
    return torch.sparse_coo_tensor(index, entries, (ROWS, COLUMNS)).coalesce().to_sparse_csr()


def features(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(COLUMNS, WIDTH, generator=seeded(1), dtype=dtype, requires_grad=True)


class Times(nn.Module):
    """A linear layer, and its product with a matrix."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.product = nn.Linear(WIDTH, WIDTH), product

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        return self.product(matrix, self.lin(x)).relu()


def rows_in_blocks(model: nn.Module) -> list[str]:
    return [row.slot for row in gact_graph.report(model).layers if row.way == "blocks"]


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    parameters = [*model.parameters()]
    gradient = torch.randn(out.shape, generator=seeded(2), dtype=out.dtype)
    return [*torch.autograd.grad(out, parameters, gradient)]


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    kept: dict[str, Any] = {"bits": 32, "level": "lossless", "blocks": "auto", "min_bytes": 0}
    return gact_graph.wrap(copy.deepcopy(model), **(kept | settings))


def assert_alike(ours: Any, expected: Any) -> None:
    """Compare within the rounding of sums in two orders."""
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda a, x: a @ x,
    "matmul": torch.matmul,
    "mm": lambda a, x: a.mm(x),
    "sparse.mm": torch.sparse.mm,
    "mean": lambda a, x: torch.sparse.mm(a, x, "mean"),
    "spmm": lambda a, x: spmm(a, x, "sum"),
}


@pytest.mark.parametrize("form", FORMS)
def test_is_that_of_pytorch(form: str) -> None:
    torch.manual_seed(0)
    model, a = Times(FORMS[form]), matrix()
    ours = wrapped(model)
    for _ in range(2):
        out, expected = ours(features(), a), model(features(), a)
        assert_alike(out, expected)
        assert_alike(gradients(ours, out), gradients(model, expected))
        assert len(rows_in_blocks(ours)) == 1


@pytest.mark.parametrize("mean", [False, True])
def test_is_exact_in_float64_and_can_be_differentiated_twice(mean: bool) -> None:
    a, x = matrix(torch.float64), features(torch.float64)
    reduce = ["mean"] if mean else []
    found = sparse_product(torch.sparse.mm, (a, x, *reduce), {}, Orders())
    assert found is not None
    dense = a.to_dense()
    counts = (dense != 0).sum(1, keepdim=True).clamp(min=1)
    expected = dense @ x / (counts if mean else 1)
    torch.testing.assert_close(found.run(), expected, rtol=1e-12, atol=1e-12)

    def function(x: Tensor) -> Tensor:
        found = sparse_product(torch.sparse.mm, (a, x, *reduce), {}, Orders())
        assert found is not None
        return found.run()

    small = torch.randn(COLUMNS, 1, generator=seeded(3), dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(function, small, fast_mode=True)
    torch.autograd.gradgradcheck(function, small, fast_mode=True)


def _with_gradient(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return a.clone().requires_grad_(), x


def _not_contiguous(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return a, torch.cat([x, x], 1)[:, ::2]


def _coo(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return a.to_sparse_coo(), x


def _vector(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return a, x[:, 0].contiguous()


def _empty(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(ROWS, COLUMNS).to_sparse_csr(), x


def _integer(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return a, x.detach().long()


@pytest.mark.parametrize(
    "change", [_with_gradient, _not_contiguous, _coo, _vector, _empty, _integer]
)
def test_of_other_operands_is_left_to_pytorch(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    assert sparse_product(torch.matmul, (matrix(), features()), {}, Orders()) is not None
    operands = change(matrix(), features())
    assert sparse_product(torch.matmul, operands, {}, Orders()) is None


@pytest.mark.parametrize("reduce", ["amax", "sum"])
def test_with_other_arguments_is_left_to_pytorch(reduce: str) -> None:
    operands = matrix(), features(), reduce
    assert sparse_product(torch.sparse.mm, operands, {}, Orders()) is None
    assert sparse_product(torch.matmul, operands[:2], {"out": None}, Orders()) is None
    assert sparse_product(torch.add, operands[:2], {}, Orders()) is None


@pytest.mark.parametrize("wrong", ["column", "rows"])
def test_of_an_invalid_matrix_is_left_to_pytorch(wrong: str) -> None:
    a = matrix()
    crow, col = a.crow_indices().clone(), a.col_indices().clone()
    if wrong == "column":
        col[7] = COLUMNS
    else:
        crow[5] = crow[3] - 1
    invalid = torch.sparse_csr_tensor(
        crow, col, a.values(), (ROWS, COLUMNS), check_invariants=False
    )
    assert sparse_product(torch.matmul, (invalid, features()), {}, Orders()) is None


def test_entries_are_sorted_once_and_again_if_they_change() -> None:
    orders, a, x = Orders(), matrix(), features()

    def order(a: Tensor) -> object:
        orders.next_forward()
        found = sparse_product(torch.matmul, (a, x), {}, orders)
        assert found is not None
        return found.order

    first = order(a)
    assert order(a) is first
    assert order(a.clone()) is first
    a.values().mul_(2)
    assert order(a) is first
    a.col_indices().numpy()[:2] = a.col_indices().numpy()[1::-1]
    assert order(a) is not first


def test_values_are_those_of_the_present_step() -> None:
    model, a = Times(torch.matmul), matrix()
    ours = wrapped(model)
    for _ in range(3):
        a.values().mul_(1.5)
        assert_alike(ours(features(), a), model(features(), a))


def test_of_a_layer_reads_rows_before_they_are_multiplied() -> None:
    """GCN with a matrix, whose product with the weight needs no memory."""
    torch.manual_seed(0)
    nodes = 3000
    edges = torch.randint(nodes, (2, 9000), generator=seeded(4))
    a = to_torch_csr_tensor(edges, size=(nodes, nodes))
    x = torch.randn(nodes, WIDTH, generator=seeded(5))
    for layer in (GCNConv(WIDTH, 64), SAGEConv(WIDTH, 64), GCN2Conv(WIDTH, 0.1, normalize=False)):

        def call(model: nn.Module, layer: nn.Module = layer) -> Tensor:
            extra = (x,) if isinstance(layer, GCN2Conv) else ()
            out: Tensor = model(x, *extra, a)
            return out

        ours = wrapped(layer)
        for _ in range(2):
            out, expected = call(ours), call(layer)
            assert_alike(out, expected)
            assert_alike(gradients(ours, out), gradients(layer, expected))
            assert len(rows_in_blocks(ours)) == 1


@pytest.mark.parametrize("settings", [{"blocks": False}, {"min_bytes": 1 << 30}])
def test_runs_as_in_pytorch_where_blocks_do(settings: dict[str, Any]) -> None:
    model = Times(torch.matmul)
    ours = wrapped(model, **settings)
    out = ours(features(), matrix())
    assert torch.equal(out, model(features(), matrix()))
    assert not rows_in_blocks(ours)


def test_in_a_layer_that_runs_again_is_the_same_in_backward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, a: Tensor) -> Tensor:
            for conv in self.convs:
                x = conv(x, a).relu()
            return x

    torch.manual_seed(0)
    nodes = 3000
    a = to_torch_csr_tensor(torch.randint(nodes, (2, 9000)), size=(nodes, nodes))
    x = torch.randn(nodes, WIDTH)
    model = Net()
    ours = wrapped(model, level="CB2", bits=16)
    out, expected = ours(x, a), model(x, a)
    assert_alike(out, expected)
    for own, stock in zip(gradients(ours, out), gradients(model, expected), strict=True):
        torch.testing.assert_close(own, stock, rtol=1e-3, atol=1e-2)


def test_in_a_checkpoint_saves_the_same_tensors_again() -> None:
    model = Times(lambda a, x: checkpoint(torch.matmul, a, x, use_reentrant=False))
    ours = wrapped(model)
    out, expected = ours(features(), matrix()), model(features(), matrix())
    assert_alike(gradients(ours, out), gradients(model, expected))


def test_counts_the_matrix_as_pytorch_does() -> None:
    class Made(nn.Module):
        """Makes its matrix in forward."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return matrix() @ self.lin(x)

    def raw(**settings: Any) -> int:
        model = wrapped(Made(), **settings)
        model(features()).sum().backward()
        return gact_graph.report(model).raw_bytes

    assert raw() == raw(blocks=False)

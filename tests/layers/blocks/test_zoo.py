"""Every conv of PyG in blocks, computed again, and both: outputs and gradients are stock's."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from samples import distance, gradients, make, one_thread  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import WITH_TORCH_SPARSE
from zoo import AROUND, CONVS, FORMATS, NODES, WIDTH, Net

import gact_graph

# Sums over edges come in another order: the relative L2 distance of outputs, and of all gradients
# together. The largest measured was 2.3e-7.
BOUND = 1e-6

STOCK = {
    "ARMAConv": "does not have its nodes in the first dimension of x",
    "SAGEConv lstm": "reads values of tensors in Python",
    "SAGEConv median": "makes a tensor whose size depends on values",
    "MeshCNNConv": "cannot be traced",
    # Of a sorted EdgeIndex PyG makes a sparse matrix here.
    "GraphConv": "multiplies by a sparse matrix",
    "GraphConv bipartite": "multiplies by a sparse matrix",
}
NOT_AGAIN = {"SuperGATConv": "leaves a tensor that requires a gradient in its attribute att_"}

CASES = [
    # Every conv with one kind of adjacency and those that run as stock with all; a few others.
    pytest.param(name, form, marks=pytest.mark.long if is_long else ())
    for number, (name, case) in enumerate(CONVS.items())
    for form in case.formats
    for is_long in [form != case.formats[0] and name not in STOCK and number % 6 > 0]
]


def _still(model: nn.Module) -> nn.Module:
    """Attention dropout off: in blocks it draws other numbers."""
    for module in model.conv.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def _step(name: str, form: str, **options: Any) -> tuple[list[Tensor], nn.Module]:
    around = [*AROUND][zlib.crc32(f"{name}{form}".encode()) % len(AROUND)]
    model = _still(make(lambda: Net(CONVS[name], around)))
    if options:
        gact_graph.wrap(model, bits=32, adaptive=False, min_bytes=0, **options)
    x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(0)
    out = model(x, FORMATS[form]())
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return [out.detach(), *gradients(model), *([] if x.grad is None else [x.grad])], model


# PyTorch warns of these once a process, so it depends on the tests that ran before.
@pytest.mark.filterwarnings("ignore:Sparse (invariant|CS[CR]) .*:UserWarning")
@pytest.mark.parametrize(("name", "form"), CASES)
def test_as_stock(name: str, form: str) -> None:
    if form == "sparse" and not WITH_TORCH_SPARSE:
        pytest.skip("torch-sparse is not installed")
    [expected, *stock], model = _step(name, form)
    layers = [m for m in model.modules() if isinstance(m, MessagePassing)]
    for level, blocks in (("lossless", 128), ("CB2", False), ("CB2", 128)):
        options = {"level": level, "blocks": blocks}
        [out, *got], model = _step(name, form, **options)
        assert distance([out], [expected]) < BOUND, options
        assert distance(got, stock) < BOUND, options
        rows = gact_graph.report(model).layers
        cut = [row for row in rows if "/" in row.slot]
        again = [row for row in rows if "/" not in row.slot]
        if blocks and layers:
            assert cut or name == "SGConv cached"  # it has propagated before
            for row in cut:
                if row.reason is None:
                    # A product with a sparse matrix is one sum.
                    assert row.blocks > 2 or "message_and_aggregate" in row.slot, row
                elif form in ("csr", "sparse"):
                    assert "sparse matrix" in row.reason, row
                else:
                    assert row.reason.startswith(STOCK[name]), row
        if level != "lossless" and layers:
            assert again
            for row in again:
                assert row.reason is None or row.reason.startswith(NOT_AGAIN[name]), row

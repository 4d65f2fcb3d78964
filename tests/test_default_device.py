"""``torch.set_default_device``: tensors that the library creates name their own device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import simt
import torch
from samples import GraphNet, equal, graph, make, one_thread, train_step  # noqa: F401
from torch.utils._device import _device_constructors

import gact_graph
from gact_graph.ops import cpu, cuda, cuda_edges

X, EDGES = graph()
ROOT = Path(gact_graph.__file__).parent
WAYS = {
    "lossless": {"level": "lossless"},
    "lossless in blocks": {"level": "lossless", "blocks": 64},
    "L1": {"bits": 4},
    "CB2": {"level": "CB2", "bits": 4, "blocks": 64},
}


@pytest.mark.parametrize("kind", ["gcn", "gat", "gin"])
@pytest.mark.parametrize("way", WAYS)
def test_training_on_another_device_than_the_default(way: str, kind: str) -> None:
    """``meta`` computes nothing, so a tensor created there would be missed."""
    stock = make(lambda: GraphNet(kind))
    plain = gact_graph.wrap(make(lambda: GraphNet(kind)), min_bytes=0, **WAYS[way])
    elsewhere = gact_graph.wrap(make(lambda: GraphNet(kind)), min_bytes=0, **WAYS[way])
    for step in range(4):  # the adaptive bits are measured among them
        expected = train_step(plain, X, EDGES, seed=step)
        with torch.device("meta"):
            stock(X, EDGES)  # runs there, so the wrapped model has to
            gradient = _train_step(elsewhere, seed=step)
        assert equal(gradient, expected)


def _train_step(model: torch.nn.Module, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(X, EDGES)
    y = torch.arange(len(out), device="cpu") % 5
    torch.nn.functional.cross_entropy(out, y).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_the_cpu_kernels_are_built_and_serve() -> None:
    cpu.load.clear()
    with torch.device("meta"):
        assert cpu.load() is not None


def test_the_trials_of_cuda_kernels_compare_on_the_cpu() -> None:
    with torch.device("meta"):
        cuda.verify(simt.KERNELS, torch.device("cpu"))
        cuda_edges.verify(simt.EDGE_KERNELS, torch.device("cpu"))
        x = torch.full((100,), 2.0, device="cpu")
        words, matched = simt.KERNELS.pack_pair(x, 1.0, 2.0)
        assert matched
        assert torch.equal(simt.KERNELS.unpack_bits(words, [100], 1.0, 2.0, x.dtype), x)


def test_each_new_tensor_names_its_device() -> None:
    """Also where no test comes by."""
    constructors = {function.__name__ for function in _device_constructors()}
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in constructors
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert not unnamed

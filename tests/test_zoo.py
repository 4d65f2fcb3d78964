"""Every conv of PyG: gradients at ``lossless`` and at 32 bits are stock's, and near them at 8."""

from __future__ import annotations

import dataclasses
import os
import zlib
from typing import Any

import pytest
import torch
import torch_geometric.nn.conv
from quantizer_samples import DEVICES
from samples import distance, equal, gradients, make, one_thread  # noqa: F401
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch_geometric.typing import WITH_TORCH_SCATTER, WITH_TORCH_SPARSE
from zoo import AROUND, BOUND, CONVS, FORMATS, LEFT_OUT, NODES, WIDTH, Net

import gact_graph

CASES = [
    # Every conv with a tensor of edges, and a few with each other kind of adjacency.
    pytest.param(name, form, marks=pytest.mark.long if form != "tensor" and number % 6 else ())
    for number, (name, case) in enumerate(CONVS.items())
    for form in case.formats
]

# GMMConv divides by squared widths that start near zero, which blows up the noise on exp.
BOUNDS = {"GMMConv": 0.4}


def test_the_zoo_is_complete():
    built = {name.split()[0] for name in CONVS}
    assert built | {*LEFT_OUT} == {*torch_geometric.nn.conv.__all__}
    assert len(built) >= 45


def test_packages_of_the_zoo_are_installed():
    """CI runs the zoo once more with torch-scatter and torch-sparse, and means it."""
    if os.environ.get("GACT_GRAPH_ZOO") == "scatter":
        assert WITH_TORCH_SCATTER and WITH_TORCH_SPARSE


def _inputs(form: str, with_gradient: bool) -> tuple[Tensor, Any]:
    x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(with_gradient), FORMATS[form]()


def _train(model: nn.Module, x: Tensor, adjacency: Any, steps: int) -> list[list[Tensor]]:
    """The gradients of each step, with an update after it."""
    steps_gradients = []
    for step in range(steps):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(step)
        out = model(x, adjacency)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        steps_gradients.append(gradients(model) + ([] if x.grad is None else [x.grad.clone()]))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return steps_gradients


@pytest.mark.parametrize(("name", "form"), CASES)
def test_gradients(name: str, form: str) -> None:
    if form == "sparse" and not WITH_TORCH_SPARSE:
        pytest.skip("torch-sparse is not installed")
    number = zlib.crc32(f"{name}{form}".encode())
    around = [*AROUND][number % len(AROUND)]
    with_gradient = bool(number // 7 % 2)

    def run(steps: int = 2, **options: Any) -> list[list[Tensor]]:
        model = make(lambda: Net(CONVS[name], around))
        if options:
            gact_graph.wrap(model, min_bytes=0, **options)
        return _train(model, *_inputs(form, with_gradient), steps)

    stock = run()
    assert all(g.isfinite().all() for g in stock[0])
    for options in (
        {"level": "lossless", "bits": 32},
        {"level": "L1", "bits": 32, "blocks": False},
    ):
        assert all(map(equal, run(**options), stock)), options
    [coarse] = run(steps=1, level="L1", bits=8, blocks=False)
    assert distance(coarse, stock[0]) < BOUNDS.get(name, BOUND)


def _on(value: Any, device: str) -> Any:
    """The same with the tensors inside it on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", CONVS)
def test_lossless_on_a_device(name: str, device: str) -> None:
    """As near to stock as stock to itself: on CUDA sums by atomics come in another order."""
    case, form = CONVS[name], CONVS[name].formats[0]
    if form == "sparse":
        pytest.skip("torch-sparse's matrices stay on the CPU here")
    parts = {part: getattr(case, part) for part in ("before", "extra", "named")}
    moved = dataclasses.replace(case, **_on(parts, device))

    def run(**options: Any) -> list[Tensor]:
        model = make(lambda: Net(case, "relu")).to(device)
        model.case = moved
        if options:
            gact_graph.wrap(model, min_bytes=0, **options)
        x, adjacency = _inputs(form, with_gradient=True)
        torch.manual_seed(0)
        out = model(x.to(device), adjacency.to(device))
        out.backward(torch.ones_like(out))
        return gradients(model)

    try:
        stock, again = run(), run()
    except RuntimeError as error:
        pytest.skip(f"stock does not run there: {error}")
    lossless = run(level="lossless", bits=32)
    assert equal(lossless, stock) or distance(lossless, stock) <= max(
        1e-5, 10 * distance(again, stock)
    )

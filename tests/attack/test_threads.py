"""Threads: models of their own are right side by side, and one model is right or says it cannot."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from beside import small_storages_count
from small_net import WAYS, Net, parts_of
from torch import Tensor, nn

import gact_graph

STEPS = 15


class Plain(Net):
    """Without dropout, whose random numbers all threads share."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.gat(self.gcn(x, edges).relu(), edges)


def _model(options: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    model = Plain().double()
    return (
        model if options is None else gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
    )


def _graph(number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    x = torch.randn(20 + number % 7, 8, generator=made, dtype=torch.float64)
    return x, torch.randint(20, (2, 70 + number % 5), generator=made)


def _gradients(model: nn.Module, number: int) -> list[Tensor]:
    out = model(*_graph(number)).square().sum()
    gradients = torch.autograd.grad(out, [*model.parameters()], allow_unused=True)
    return [g for g in gradients if g is not None]


def _on_threads(work: Any, count: int) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None] * count
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def _all_close(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-9) for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_two_models_on_two_threads(name: str) -> None:
    expected = [_gradients(_model(None), number) for number in range(2 * STEPS)]
    with small_storages_count():
        models = [_model(WAYS[name]) for _ in range(2)]

        def work(thread: int) -> None:
            for number in range(thread * STEPS, (thread + 1) * STEPS):
                assert _all_close(_gradients(models[thread], number), expected[number])

        assert _on_threads(work, 2) == [None, None]


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_one_model_on_two_threads(name: str) -> None:
    """Right, or a RuntimeError at once; and the model is whole afterwards."""
    expected = [_gradients(_model(None), number) for number in range(2 * STEPS)]
    with small_storages_count():
        model = _model(WAYS[name])
        _gradients(model, 0)
        parts = parts_of(model)

        refused: list[str] = []

        def work(thread: int) -> None:
            for number in range(thread * STEPS, (thread + 1) * STEPS):
                try:
                    got = _gradients(model, number)
                except RuntimeError as error:
                    refused.append(str(error))
                else:
                    assert _all_close(got, expected[number])

        assert _on_threads(work, 2) == [None, None]
        assert all("thread" in error for error in refused)
        assert parts_of(model) == parts
        assert _all_close(_gradients(model, 0), expected[0])

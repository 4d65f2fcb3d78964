"""An operator that computes otherwise within one operation, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch

from gact_graph.capture.replaced import replaced
from gact_graph.support.torch_private import DispatchMode

ADD = torch.ops.aten.add.Tensor


def less(x: Tensor, other: Tensor) -> Tensor:
    return x - other


def test_the_operator_computes_otherwise_and_autograd_sees_the_operation() -> None:
    x = torch.tensor([5.0], requires_grad=True)
    got = replaced(ADD, less, lambda: (x + 3) * 2)
    assert got.item() == 4
    got.backward()
    assert x.grad is not None and x.grad.item() == 2
    assert (x + 3).item() == 8


def test_an_operator_with_options_stays() -> None:
    assert replaced(ADD, less, lambda: torch.add(torch.ones(1), torch.ones(1), alpha=3)).item() == 4


def test_after_an_error_in_the_operation() -> None:
    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        replaced(ADD, less, lambda: torch.ones(2) + torch.ones(3))
    assert (x + x).item() == 2


@pytest.mark.parametrize("edge", ["__enter__", "__exit__"])
def test_a_signal_at_an_edge_of_the_mode(edge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the mode on torch's stack, where the mode must change nothing."""
    enter, x = DispatchMode.__enter__, torch.ones(1)

    def interrupted(mode: DispatchMode, *_: Any) -> None:
        if edge == "__enter__":
            enter(mode)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DispatchMode, edge, interrupted)
        with pytest.raises(KeyboardInterrupt):
            replaced(ADD, less, lambda: x + x)
    (left,) = _python_dispatch._get_current_dispatch_mode_stack()
    try:
        assert (x + x).item() == 2
    finally:
        left.__exit__(None, None, None)
    assert not _python_dispatch._get_current_dispatch_mode_stack()

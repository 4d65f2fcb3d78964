"""Equal content is found without comparing tensors, and on a GPU without waiting for each."""

from __future__ import annotations

import pytest
import torch
from samples import GraphNet, equal, graph, make, one_thread, seeded, train_step  # noqa: F401
from seen import Largest
from torch import Tensor
from waits import Waits

import gact_graph
from gact_graph.ops.bernoulli import draws_as_torch
from gact_graph.support import content
from gact_graph.support.content import checksum, mark_of


def _hash(x: Tensor) -> int:
    return int(checksum(x))


@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_checksum_tells_edits_apart(count: int) -> None:
    edge_index = torch.randint(2**31, (2, count), generator=seeded(3))
    expected = _hash(edge_index)
    assert _hash(edge_index.clone()) == expected
    assert _hash(edge_index.t().contiguous().t()) == expected
    assert _hash(edge_index.flip(0)) != expected
    for edge in {0, count // 2, count - 1}:
        for row in (0, 1):
            for by in (1, 1 << 40):
                other = edge_index.clone()
                other[row, edge] += by
                assert _hash(other) != expected
    if count > 1:
        assert _hash(edge_index.flip(1)) != expected
        assert _hash(edge_index.roll(1 << 17, 1)) != expected


def test_checksum_stays_the_same_after_many_others() -> None:
    x = torch.randint(2**31, (2, 1000), generator=seeded(3))
    expected = _hash(x)
    for power in range(18):
        for rows in (1, 3, 5):
            _hash(torch.zeros(rows, 1 << power, dtype=torch.int64))
    assert _hash(x) == expected


def test_no_more_factors_than_the_graph_needs() -> None:
    content._factors.cache_clear()
    for count, most in ((0, 2 * 2), (50, 2 * 64), (3_000_000, 2 << 14)):
        edge_index = torch.zeros(2, count, dtype=torch.int64)
        with Largest() as largest:
            checksum(edge_index)
        assert largest.numel <= most


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as those of a device that has to be waited for."""
    draws_as_torch()  # its first call compares tensors
    monkeypatch.setattr(content, "on_host", lambda tensor: False)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool],
    ids=str,
)
def test_a_mark_tells_any_change_on_a_gpu(gpu: None, dtype: torch.dtype) -> None:
    x = torch.randint(2, (1000,), generator=seeded(0)).to(dtype)
    marks = {mark_of(x).item(), mark_of(x.clone()).item()}
    assert len(marks) == 1
    for first in range(0, 1000, 100):
        other = x.clone()
        # Two numbers that differ in a sign or an exponent alone.
        other[first] = not bool(other[first])
        other[first + 50] = not bool(other[first + 50])
        marks.add(mark_of(other).item())
        marks.add(mark_of(other.roll(1)).item())
    if dtype.is_floating_point:
        for first in range(0, 1000, 100):
            other = x.clone() + 1
            other[first : first + 2] *= -1
            marks.add(mark_of(other).item())
    assert len(marks) == (31 if dtype.is_floating_point else 21)


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_a_gpu_is_waited_for_once_a_constant(
    gpu: None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers of a GCN save the same weights, and those of a GAT the same edges."""
    monkeypatch.setattr("gact_graph.capture.recipes.has_other_modes", lambda: False)  # that waits
    x, edges = graph()
    model = gact_graph.wrap(make(lambda: GraphNet(kind)), level="lossless", min_bytes=0)
    expected = train_step(make(lambda: GraphNet(kind)), x, edges)
    with Waits() as waits:
        gradients = train_step(model, x, edges)
    assert equal(gradients, expected)
    # A GAT projects x again, and compares it with x in forward.
    assert waits.seen and waits.seen.count("equal") == (1 if kind == "gat" else 0)
    found = gact_graph.report(model).stored_bytes
    monkeypatch.undo()
    train_step(model, x, edges)
    assert gact_graph.report(model).stored_bytes == found  # shared as on the CPU

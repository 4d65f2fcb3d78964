"""The CUDA kernels for edges, run on the CPU: how they share out work, and who gets them.

What they compute is tested with the other backends, in test_weighted_sum.py and test_attention.py.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import simt
import torch
from fake_cuda import FakeCuda, fixture  # noqa: F401
from samples import seeded
from torch import Tensor

from gact_graph.ops import cuda_edges, cuda_sums, weighted_sum
from gact_graph.ops.cuda_attention import EdgeKernels
from gact_graph.ops.cuda_sums import Segments, columns_of_lane
from gact_graph.ops.kernels.nvrtc import Kernel
from gact_graph.ops.reference import attention as attention_reference
from gact_graph.ops.reference import dot_attention as dot_reference
from gact_graph.ops.reference import leaky_attention as leaky_reference
from gact_graph.ops.reference import weighted_sum as weighted_reference

_REFERENCES = (attention_reference, leaky_reference, dot_reference, weighted_reference)
reference = SimpleNamespace(**{k: f for module in _REFERENCES for k, f in vars(module).items()})


class Graph:
    """Rows of edges, one of them with thousands; ``width`` columns in ``heads``."""

    def __init__(
        self, width: int, heads: int, edges: int = 4000, dtype: torch.dtype = torch.float32
    ) -> None:
        generator, self.heads, nodes, rows = seeded(width), heads, 40, 30
        owners = torch.randint(rows // 3, (edges,), generator=generator) * 3
        owners[: edges * 3 // 4] = 12
        self.starts = torch.zeros(rows + 1, dtype=torch.int64)
        self.starts[1:] = torch.bincount(owners, minlength=rows).cumsum(0)
        self.places = torch.randint(nodes, (edges,), generator=generator, dtype=torch.int32)
        self.weight_places = torch.randperm(edges, generator=generator).int()
        self.x = torch.randn(nodes, width, generator=generator, dtype=dtype)
        self.gradient = torch.randn(rows, width, generator=generator, dtype=dtype)
        self.weight = torch.randn(edges, heads, generator=generator, dtype=dtype)

    def run(self, kernels: Any) -> list[Tensor]:
        """A sum, and both gradients of one by source."""
        out, of_x = torch.empty_like(self.gradient), torch.empty_like(self.gradient)
        of_weight = torch.empty_like(self.weight)
        edges = self.places, self.weight, self.weight_places, self.starts
        kernels.weighted_sum(out, self.x, *edges)
        kernels.weighted_sum_backward(of_x, of_weight, self.x, self.gradient, *edges)
        return [out, of_x, of_weight]

    def attend(self, kernels: Any) -> list[Tensor]:
        """The weights that each kind of attention computes, and all their gradients."""
        heads, each, edges = self.heads, self.x.size(1) // self.heads, self.weight
        source, destination = (t[:, :heads].contiguous() for t in (self.x, self.gradient))
        att = self.x[0].view(heads, each).contiguous()
        where, settings = (self.places, self.weight_places, self.starts), (0.2, 0.3, 7)
        rows = self.x, self.gradient, att
        weight, leaky, dot, back, of_score = (torch.empty_like(edges) for _ in range(5))
        of_destination, of_rows, of_own = (
            torch.empty_like(t) for t in (destination, self.gradient, self.gradient)
        )
        of_att, by = torch.empty_like(att), edges.clone()
        kernels.attention(weight, source, destination, edges, *where, *settings)
        arguments = edges, source, destination, edges, *where, *settings
        kernels.attention_backward(back, of_destination, *arguments)
        kernels.leaky_attention(leaky, *rows, *where, *settings)
        kernels.leaky_attention_backward(of_score, of_rows, of_att, edges, *rows, *where, *settings)
        own = self.gradient, self.x, att
        kernels.leaky_attention_source(of_own, of_score, *own, *where, 0.2)
        kernels.dot_attention(dot, self.x, self.gradient, edges, *where, 0.4)
        kernels.dot_attention_backward(by, dot, *where[1:], 0.4)
        kernels.drop_weights(dot, 0.3, 7)
        actual = [weight, back, of_destination, leaky, of_score, of_rows, of_att, of_own, dot, by]
        totals = torch.empty_like(self.gradient)
        kernels.segment_sum(totals, self.x, self.places, self.starts)
        return [*actual, totals]


@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_the_number_of_warps_changes_no_bit(blocks: int) -> None:
    graph = Graph(24, 3)
    expected = graph.run(simt.EDGE_KERNELS) + graph.attend(simt.EDGE_KERNELS)
    kernels = EdgeKernels(functools.partial(simt.launch, most_blocks=blocks))
    assert all(map(torch.equal, graph.run(kernels) + graph.attend(kernels), expected))


@pytest.mark.parametrize("width", [24, 192])
def test_a_graph_without_nodes_launches_nothing(width: int) -> None:
    def launch(kernel: Kernel, *_: Any) -> None:
        raise AssertionError(kernel)

    graph = Graph(width, 3, 0)
    graph.starts, graph.gradient = graph.starts[:1], graph.gradient[:0]
    graph.run(EdgeKernels(launch))


def test_the_gradient_of_weights_is_zero_where_rows_have_no_columns() -> None:
    graph = Graph(0, 3, 300)
    of_x, of_weight = torch.empty_like(graph.gradient), torch.full_like(graph.weight, math.nan)
    rows = graph.x, graph.gradient, graph.places, graph.weight, graph.weight_places, graph.starts
    EdgeKernels(_refuse).weighted_sum_backward(of_x, of_weight, *rows)
    assert not of_weight.any()


@pytest.mark.parametrize("most", [1, 2, 7])
def test_a_large_graph_has_longer_segments(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(24, 3)
    expected = [t.double() for t in (*graph.run(reference), *graph.attend(reference))]
    monkeypatch.setattr(cuda_sums, "_MOST_SEGMENTS", most)  # else of 8 million edges
    assert Segments(graph.starts, 4000).count <= most
    for actual, wanted in zip(
        (*graph.run(simt.EDGE_KERNELS), *graph.attend(simt.EDGE_KERNELS)), expected, strict=True
    ):
        # Sums of up to 4000 terms in float32, in two orders.
        assert torch.allclose(actual.double(), wanted, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_of_heads(heads: int, dtype: torch.dtype) -> None:
    graph = Graph(heads * 3, heads, 700, dtype)
    wide = Graph(heads * 3, heads, 700, torch.float64)
    for name in ("x", "gradient", "weight"):
        setattr(wide, name, getattr(graph, name).double())
    actual = graph.run(simt.EDGE_KERNELS) + graph.attend(simt.EDGE_KERNELS)
    for result, wanted in zip(actual, wide.run(reference) + wide.attend(reference), strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 1e-11
        assert torch.allclose(result.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_rows_that_begin_anywhere(offset: int) -> None:
    """Vectors are loaded from multiples of their size alone, or a GPU would stop."""
    graph = Graph(8, 2, 300)
    expected = graph.run(simt.EDGE_KERNELS)
    for name in ("x", "gradient"):
        x = getattr(graph, name)
        whole = torch.zeros(x.numel() + offset)
        whole[offset:] = x.flatten()
        setattr(graph, name, whole[offset:].view_as(x))
    assert columns_of_lane(4, 2, graph.x) == {1: 1, 2: 2, 3: 1, 4: 4}[offset]
    for actual, wanted in zip(graph.run(simt.EDGE_KERNELS), expected, strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("each", "heads", "dtype", "columns"),
    [
        (64, 4, torch.float32, 4),
        (64, 3, torch.float32, 2),  # by 4, the second warp of a row would be half idle
        (64, 1, torch.float32, 4),  # two edges at a time
        (5, 7, torch.float32, 1),
        (6, 2, torch.float32, 2),
        (64, 4, torch.float64, 2),
        (1, 1, torch.float32, 1),
        (0, 3, torch.float32, 4),
    ],
)
def test_columns_of_a_lane(each: int, heads: int, dtype: torch.dtype, columns: int) -> None:
    assert columns_of_lane(each, heads, torch.empty(4, dtype=dtype)) == columns


def test_a_second_kernel_only_where_rows_are_cut_and_none_for_nothing() -> None:
    names: list[str] = []

    def launch(kernel: Kernel, *args: Any) -> None:
        names.append(kernel.name)
        simt.launch(kernel, *args)

    kernels = EdgeKernels(launch)
    for edges, expected in ((0, 1), (200, 1), (4000, 2)):
        names.clear()
        graph = Graph(8, 2, edges)
        out = torch.full_like(graph.gradient, torch.nan)
        kernels.weighted_sum(out, graph.x, graph.places, graph.weight, None, graph.starts)
        assert len(names) == expected and not out[1].any()
    names.clear()
    none = torch.empty(0, 8), torch.empty(5, 8), torch.empty(0, dtype=torch.int64)
    kernels.weighted_sum(*none, torch.empty(0, 2), None, torch.zeros(1, dtype=torch.int64))
    narrow = torch.empty(5, 0), torch.ones(3, dtype=torch.int64), torch.tensor([0, 3])
    assert not kernels.weighted_sum_weights(torch.empty(1, 0), *narrow, 2).any()
    assert not names


_CUDA_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Operators:
    """The operators, as the dispatcher calls them for CUDA tensors."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            return getattr(torch.ops.gact_graph, name).default.redispatch(_CUDA_KEY, *args)

        return call


def _use_operators(graph: Graph, backend: Any) -> None:
    for run in (graph.run, graph.attend):
        assert all(map(torch.equal, run(Operators()), run(backend)))
    arguments = graph.gradient, graph.x, graph.places, graph.starts, 2
    actual = Operators().weighted_sum_weights(*arguments)
    assert torch.equal(actual, backend.weighted_sum_weights(*arguments))


def test_operators_of_cuda_tensors_launch_these_kernels(fake_cuda: FakeCuda) -> None:
    assert cuda_edges.load(torch.device("cpu")) is not None
    fake_cuda.log.clear()
    _use_operators(Graph(8, 2, 500), simt.EDGE_KERNELS)
    assert fake_cuda.launches >= 12


def test_without_kernels_operators_of_cuda_tensors_are_references(fake_cuda: FakeCuda) -> None:
    fake_cuda.run = _refuse
    with pytest.warns(RuntimeWarning, match="works with slower pure-torch code"):
        _use_operators(Graph(8, 2, 500), reference)


def test_without_kernels_messages_are_made(fake_cuda: FakeCuda) -> None:
    fake_cuda.run = _refuse
    with pytest.warns(RuntimeWarning, match="works with slower pure-torch code"):
        assert weighted_sum.makes_messages(torch.device("cuda", 0))


def test_operators_of_cuda_tensors_check_their_arguments(fake_cuda: FakeCuda) -> None:
    assert cuda_edges.load(torch.device("cpu")) is not None
    fake_cuda.run, graph = _refuse, Graph(8, 2, 500)
    edges = graph.x, graph.places, graph.weight, graph.weight_places, graph.starts
    with pytest.raises(ValueError, match=r"out of \[30, 8\], contiguous \(got \[29, 8\]\)"):
        Operators().weighted_sum(graph.gradient[1:], *edges)


def _refuse(*args: object) -> None:
    raise AssertionError("a kernel was launched")

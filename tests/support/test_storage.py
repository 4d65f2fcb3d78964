"""Identity of storages, spans and layouts, and the walk through what a user hands over."""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data

from gact_graph.support.storage import (
    is_plain,
    key_of,
    parts_of,
    span_of,
    tensors_held_by,
    tensors_in,
    version_of,
    whole_of,
)


@st.composite
def strided(draw):
    """A tensor with different elements, and any mixture of views upon it."""
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["permute", "slice", "expand", "unsqueeze", "select"]))
        if kind == "unsqueeze" and tensor.dim() < 5:
            tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
        elif tensor.dim() == 0:
            continue
        elif kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        else:
            dim = draw(st.integers(0, tensor.dim() - 1))
            size = tensor.shape[dim]
            if kind == "slice":
                start = draw(st.integers(0, size))
                step = draw(st.integers(1, 3))
                tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
            elif kind == "expand" and size == 1:
                sizes = [-1] * tensor.dim()
                sizes[dim] = draw(st.integers(1, 4))
                tensor = tensor.expand(sizes)
            elif kind == "select" and size:
                tensor = tensor.select(dim, draw(st.integers(0, size - 1)))
    return tensor


class TestSpans:
    @settings(deadline=None, max_examples=300)
    @given(strided())
    def test_restore_gives_the_tensor_back(self, tensor):
        span = span_of(tensor)
        if span is None:  # expanded with holes
            assert 0 in tensor.stride()
            return
        flat, layout = span
        back = layout.restore(flat.clone())
        assert back.shape == tensor.shape
        assert back.stride() == tensor.stride()
        assert torch.equal(back, tensor)

    @settings(deadline=None, max_examples=300)
    @given(strided())
    def test_holds_each_element_once(self, tensor):
        span = span_of(tensor)
        if span is not None:
            flat, _ = span
            assert flat.dim() == 1
            assert sorted(flat.tolist()) == sorted(set(tensor.flatten().tolist()))

    @settings(deadline=None, max_examples=200)
    @given(strided())
    def test_a_dense_span_is_a_view(self, tensor):
        span = span_of(tensor)
        if span is not None and span[1].dense:
            assert key_of(span[0]) == key_of(tensor)
            assert span[0].storage_offset() == tensor.storage_offset()

    @settings(deadline=None, max_examples=100)
    @given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
    def test_permutations_of_a_tensor_share_the_span(self, order, shape):
        base = torch.randn(shape)
        (one, first), (two, second) = span_of(base), span_of(base.permute(order))
        assert first.dense and second.dense
        assert torch.equal(one, two)

    def test_overlapping_windows_have_none(self):
        assert span_of(torch.arange(20.0).unfold(0, 6, 2)) is None
        assert span_of(torch.arange(20.0).as_strided((3, 3), (1, 1))) is None

    def test_windows_that_do_not_overlap_have_one(self):
        flat, layout = span_of(torch.arange(20.0).unfold(0, 5, 5))
        assert layout.dense and flat.tolist() == [*range(20)]

    def test_gaps_are_left_out(self):
        flat, layout = span_of(torch.arange(20.0).view(4, 5)[:, 1:3])
        assert not layout.dense
        assert flat.tolist() == [1, 2, 6, 7, 11, 12, 16, 17]


class TestIdentity:
    def test_views_share_it(self):
        base = torch.randn(4, 6)
        assert key_of(base) == key_of(base.t()) == key_of(base[2:]) == key_of(base.detach())
        assert key_of(base) != key_of(base.clone())

    def test_a_reused_address_is_another_storage(self):
        memory, keys = bytearray(400), []
        for _ in range(50):  # each is gone before the next takes its place
            tensor = torch.frombuffer(memory, dtype=torch.float32)
            assert tensor.data_ptr() == torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            assert key_of(tensor) not in keys
            keys.append(key_of(tensor))
            del tensor
        assert all(key.expired() for key in keys)

    def test_version(self):
        tensor = torch.zeros(3)
        before = version_of(tensor)
        tensor[:1].add_(1)
        assert version_of(tensor) == before + 1
        with torch.inference_mode():
            assert version_of(torch.zeros(3)) is None

    def test_plain(self):
        assert is_plain(torch.zeros(2)) and is_plain(nn.Parameter(torch.zeros(2)))
        assert not is_plain(torch.eye(2).to_sparse())
        assert not is_plain(EdgeIndex([[0, 1], [1, 0]]))


class TestParts:
    @pytest.mark.filterwarnings("ignore:Sparse")
    def test_of_sparse_tensors(self):
        eye = torch.eye(4)
        coo = eye.to_sparse()
        assert {t.shape for t in parts_of(coo)} == {(2, 4), (4,)}
        for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
            sparse = eye.to_sparse(layout=layout, blocksize=blocks)
            numbers = [5, 4, 4] if blocks is None else [3, 2, 8]
            assert [t.numel() for t in parts_of(sparse)] == numbers
            assert parts_of(sparse)[2].data_ptr() == sparse.values().data_ptr()

    def test_of_a_coo_tensor_that_is_not_coalesced(self):
        sparse = torch.sparse_coo_tensor(
            [[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True
        )
        assert parts_of(sparse) == []


@dataclasses.dataclass
class Holder:
    x: torch.Tensor
    more: object = None


@dataclasses.dataclass
class Slots:
    __slots__ = ("unset", "x")
    x: torch.Tensor


class SlotsChild(Slots):
    __slots__ = "y"


class _PrivateSlot:
    __slots__ = ("__x",)

    def __init__(self, x):
        self.__x = x


def found(value):
    return {t.data_ptr() for t in tensors_in(value)}


class TestWalk:
    def test_nested_containers(self):
        a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
        value = {"a": [a, (b, 3, "b")], 7: Holder(c, {"n": None})}
        assert found(value) == {t.data_ptr() for t in (a, b, c)}

    def test_pyg_data(self):
        x, edge_index = torch.randn(4, 2), torch.tensor([[0, 1], [1, 0]])
        data = Data(x=x, edge_index=edge_index)
        assert found((data,)) == {x.data_ptr(), edge_index.data_ptr()}
        batch = Batch.from_data_list([data, data])
        assert {batch.x.data_ptr(), batch.batch.data_ptr(), batch.ptr.data_ptr()} <= found(batch)

    def test_slots(self):
        child = SlotsChild(torch.ones(1))
        child.y = torch.ones(2)
        assert found(child) == {child.x.data_ptr(), child.y.data_ptr()}
        assert found(_PrivateSlot(child.x)) == {child.x.data_ptr()}

    def test_edge_index_and_its_cache(self):
        edges = EdgeIndex([[0, 0, 1], [1, 2, 0]], sort_order="row", sparse_size=(3, 3))
        edges.get_csr()
        assert edges.as_tensor().data_ptr() in found(edges)
        assert len(found(edges)) > 1

    def test_a_long_list_of_linked_objects(self):
        tensors, last = [torch.ones(1) for _ in range(3000)], None
        for tensor in tensors:
            last = [tensor, last]
        assert [id(t) for t in tensors_in(last)] == [id(t) for t in reversed(tensors)]

    def test_cycles_end(self):
        value = Holder(torch.ones(1))
        value.more = [value, {"again": value}]
        assert found(value) == {value.x.data_ptr()}

    def test_functions_modules_and_classes_are_not_entered(self):
        def function():
            pass

        function.x = torch.ones(1)
        assert found([function, nn.Linear(2, 2), Holder, torch, functools, "abc", 1.5]) == set()

    def test_held_by_a_module(self):
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        net[0].cache = (torch.ones(1), {"b": torch.ones(2)})
        net[1].data = Holder(torch.ones(9))  # the user's own object: not searched
        held = {t.data_ptr() for t in tensors_held_by(net)}
        assert {p.data_ptr() for p in [*net.parameters(), *net.buffers()]} <= held
        assert {net[0].cache[0].data_ptr(), net[0].cache[1]["b"].data_ptr()} <= held
        assert net[1].data.x.data_ptr() not in held


def test_a_view_is_restored_over_its_whole_storage():
    whole = torch.arange(60.0)
    for view in (whole[7:], whole[3:51].view(6, 8).t(), whole[5::4]):
        flat, layout = whole_of(view)
        assert torch.equal(flat, whole)
        restored = layout.restore(flat.clone())
        assert torch.equal(restored, view) and restored.stride() == view.stride()

"""Every build of the bit kernels, and the reference, against bits that Python puts together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import simt
import torch
from cpu_builds import BUILDS, build
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_errors import VALUE_ERROR, of_kernels
from quantizer_samples import DTYPES, same_bytes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gact_graph.ops.bitmask import pack_bits, pack_pair, unpack_bits
from gact_graph.ops.reference import bitmask as reference

SIZES = (0, 1, 8, 63, 64, 65, 127, 128, 129, 1000, 40_000)  # the last: more than a thread's slice
SPECIAL = (0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 0.25, -0.25, 1e-7)
NARROW = (torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# torch can make and convert these, and do little else with them.
BARE = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
NUMBERS = {0: lambda x, t: x != 0, 1: lambda x, t: x > t, 2: lambda x, t: ~(x <= t)}


@pytest.fixture(scope="module", params=["reference", *BUILDS, "cuda-source"])
def backend(request: pytest.FixtureRequest) -> Any:
    """The reference, or a build of the kernels that this processor can run."""
    if request.param == "reference":
        return reference
    if request.param == "cuda-source":
        return simt.KERNELS
    return build(request.param)


def _words(passed: Tensor) -> list[int]:
    bits = passed.reshape(-1).tolist()
    words = []
    for start in range(0, len(bits), 64):
        word = sum(1 << i for i, bit in enumerate(bits[start : start + 64]) if bit)
        words.append(word - (1 << 64) if word >> 63 else word)
    return words


def _sample(size: int, dtype: torch.dtype) -> Tensor:
    """Specials in front and, where there is room, at both ends of a word."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    for start in (0, 60, size - len(SPECIAL)):
        part = x[max(start, 0) : start + len(SPECIAL)]
        part.copy_(torch.tensor(SPECIAL, dtype=torch.float64)[: len(part)])
    return x.to(dtype)


@pytest.mark.parametrize(("number", "dtype", "size"), grid(NUMBERS, DTYPES, SIZES), ids=str)
def test_each_test_of_each_dtype(number: int, dtype: torch.dtype, size: int, backend: Any) -> None:
    x = _sample(size, dtype)
    before = x.clone()
    for threshold in (0.0, -0.0, 0.25, math.inf, -math.inf, math.nan):
        words = backend.pack_bits(x, number, threshold)
        assert words.dtype == torch.int64 and words.shape == (-(-size // 64),)
        assert words.tolist() == _words(NUMBERS[number](x, threshold)), threshold
    assert same_bytes(x, before)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *BARE], ids=str)
def test_nonzero_of_every_other_dtype(dtype: torch.dtype, backend: Any) -> None:
    plain = torch.arange(200) % 5 % 3
    assert backend.pack_bits(plain.to(dtype), 0, 0.0).tolist() == _words(plain != 0)


def test_a_bool_of_another_byte_than_one_is_set(backend: Any) -> None:
    """A view of bytes, or memory that another library wrote, may hold such."""
    raw = (torch.arange(330) % 256).to(torch.uint8)
    words = backend.pack_bits(raw.view(torch.bool), 0, 0.0)
    assert words.tolist() == _words(raw != 0)


@pytest.mark.parametrize(
    ("threshold", "dtype"), grid([0.1, 0.3, 1 / 3, 0.7, -0.1], DTYPES), ids=str
)
def test_the_side_is_that_of_backward(threshold: float, dtype: torch.dtype, backend: Any) -> None:
    """Also where the threshold is no number of the dtype and elements are its rounded value."""
    near = torch.tensor(threshold, dtype=dtype)
    x = torch.cat([near.expand(70), near * 0.99 + torch.zeros(70, dtype=dtype), near.neg()[None]])
    gradient = torch.ops.aten.threshold_backward(torch.ones_like(x), x, threshold)
    assert backend.pack_bits(x, 2, threshold).tolist() == _words(gradient != 0)


@pytest.mark.parametrize(("dtype", "size"), grid([*DTYPES, torch.float8_e5m2], SIZES), ids=str)
def test_pairs(dtype: torch.dtype, size: int, backend: Any) -> None:
    mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) > 0.3
    high = torch.tensor(1 / 0.9, dtype=dtype).double().item()
    # Two values, and two whose bits differ where the numbers are equal or compare with nothing.
    for low, other in ((0.0, high), (high, 0.0), (0.0, -0.0), (math.inf, -math.inf)):
        x = torch.tensor([low, other], dtype=torch.float64)[mask.long()].to(dtype)
        words, matched = backend.pack_pair(x, low, other)
        assert matched.dtype == torch.bool and matched.shape == ()
        assert matched.item() is True
        assert words.tolist() == _words(mask), (low, other)


@pytest.mark.parametrize(
    ("third", "dtype", "size"),
    grid([-0.0, 0.5, math.nan, math.inf], DTYPES, [s for s in SIZES if s]),
    ids=str,
)
def test_a_third_value_anywhere_is_no_pair(
    third: float, dtype: torch.dtype, size: int, backend: Any
) -> None:
    for place in {0, size // 2, size - 1}:
        x = torch.zeros(size, dtype=dtype)
        x[1::3] = 1.25
        assert backend.pack_pair(x, 0.0, 1.25)[1]
        x[place] = third
        assert not backend.pack_pair(x, 0.0, 1.25)[1], place


@pytest.mark.parametrize(
    ("dtype", "size"), grid([torch.bool, *DTYPES, *INTEGERS, *BARE], SIZES), ids=str
)
def test_unpack_to_every_dtype(dtype: torch.dtype, size: int, backend: Any) -> None:
    mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) > 0.5
    words = torch.tensor(_words(mask), dtype=torch.int64)
    for low, high in ((0.0, 1.0), (3.0, 0.0)):
        x = backend.unpack_bits(words, [size], low, high, dtype)
        assert x.dtype == dtype and x.shape == (size,) and x.is_contiguous()
        # As numbers, since torch compares not all of these.
        values = torch.tensor([low, high], dtype=torch.float64).to(dtype).double()
        assert torch.equal(x.double(), torch.where(mask, values[1], values[0]))


@pytest.mark.parametrize(
    ("pair", "dtype"),
    grid([(-0.0, math.nan), (math.inf, -math.inf), (0.1, 1e9)], DTYPES),
    ids=str,
)
def test_unpacked_values_keep_their_bits(
    pair: tuple[float, float], dtype: torch.dtype, backend: Any
) -> None:
    mask = torch.arange(150) % 7 < 3
    words = torch.tensor(_words(mask), dtype=torch.int64)
    low, high = torch.tensor(pair, dtype=torch.float64).to(dtype)
    x = backend.unpack_bits(words, [5, 30], *pair, dtype)
    assert same_bytes(x, torch.where(mask, high, low).view(5, 30))


def test_a_tensor_above_the_size_of_a_slice_has_no_seam() -> None:
    """The reference works on 2**22 elements at a time."""
    size = 1 << 22
    x = (torch.arange(size + 1000) * 7919) % 1013 > 500
    words = reference.pack_bits(x, 0, 0.0)
    parts = [reference.pack_bits(part, 0, 0.0) for part in (x[:size], x[size:])]
    assert torch.equal(words, torch.cat(parts))
    assert torch.equal(reference.unpack_bits(words, [len(x)], 0.0, 1.0, torch.bool), x)


@pytest.mark.parametrize("name", BUILDS)
def test_threads_do_not_change_the_bytes(name: str) -> None:
    backend = build(name)
    x = _sample(300_001, torch.float32)
    noise = torch.where(x > 0, 1.25, 0.0)
    threads = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            words = backend.pack_bits(x, 1, 0.0)
            assert words.tolist() == _words(x > 0)
            assert torch.equal(backend.pack_pair(noise, 0.0, 1.25)[0], words)
            assert torch.equal(backend.unpack_bits(words, [300_001], 0.0, 1.25, x.dtype), noise)
    finally:
        torch.set_num_threads(threads)


def test_words_that_do_not_fit_are_refused(backend: Any) -> None:
    words = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(VALUE_ERROR, match=r"Expected words of \[3\], contiguous \(got \[2\]\)"):
        backend.unpack_bits(words, [129], 0.0, 1.0, torch.float32)
    with pytest.raises(VALUE_ERROR, match=r"Expected words of \[1\], contiguous \(got \[2\]\)"):
        backend.unpack_bits(words, [64], 0.0, 1.0, torch.float32)


@st.composite
def _strided(draw: st.DrawFn) -> Tensor:
    """A tensor of few elements whose strides may have gaps, be permuted, or be zero."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    dtype = draw(st.sampled_from([*DTYPES, torch.bool, torch.int32]))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    # The sizes with gaps, and so the source of a slice.
    seed = draw(st.integers(0, 2**31))
    wide = [n * step for n, step in zip(shape, steps, strict=True)]
    x = torch.randn(wide, generator=torch.Generator().manual_seed(seed))
    x = (x * (x.abs() > 0.4)).to(dtype)
    x = x[tuple(slice(None, None, step) for step in steps)]
    x = x.permute(draw(st.permutations(range(x.dim()))))
    return x[..., None].expand(*x.shape, draw(st.integers(0, 40)))


@settings(deadline=None, max_examples=150)
@given(x=_strided(), threshold=st.sampled_from([0.0, 0.5, -0.5]))
def test_any_shape_strides_and_dtype(x: Tensor, threshold: float) -> None:
    before = x.clone()
    assert pack_bits(x).tolist() == _words(x != 0)
    if x.dtype in DTYPES:
        assert pack_bits(x, "above", threshold).tolist() == _words(x > threshold)
        assert pack_bits(x, "not_at_most", threshold).tolist() == _words(~(x <= threshold))
        noise = torch.where(x > threshold, 2.0, -1.0).to(x.dtype)
        words, matched = pack_pair(noise, -1, 2)
        assert matched is True and words.tolist() == _words(x > threshold)
        back = unpack_bits(words, x.shape, -1, 2, x.dtype)
        assert back.is_contiguous() and same_bytes(back, noise.contiguous())
    assert same_bytes(x, before)


def test_words_with_gaps_between_them() -> None:
    mask = torch.arange(128) % 3 == 0
    gaps = torch.tensor(_words(mask), dtype=torch.int64).repeat_interleave(2)[::2]
    assert torch.equal(unpack_bits(gaps, (128,), 0, 1, torch.bool), mask)


def test_words_have_no_gradient() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for words in (pack_bits(x), pack_bits(x, "above"), pack_pair(x * 2, 0, 1)[0]):
        assert words.grad_fn is None and not words.requires_grad


@pytest.mark.parametrize(("size", "dtype"), grid([0, 100], [*DTYPES, torch.bool]), ids=str)
def test_opcheck(size: int, dtype: torch.dtype) -> None:
    x, ops = _sample(size, torch.float32).to(dtype), torch.ops.gact_graph
    for number in (0, 1, 2) if dtype.is_floating_point else (0,):
        torch.library.opcheck(ops.pack_bits.default, (x, number, 0.5))
    if dtype.is_floating_point:
        torch.library.opcheck(ops.pack_pair.default, (x, 0.0, 1.0))
    words = ops.pack_bits(x, 0, 0.0)
    torch.library.opcheck(ops.unpack_bits.default, (words, list(x.shape), 0.0, 1.0, dtype))


def test_meta_and_fake_tensors_have_the_shapes_of_real_ones() -> None:
    real = torch.randn(7, 100)
    with FakeTensorMode() as mode:
        for x in (mode.from_tensor(real), torch.empty(7, 100, device="meta")):
            words = pack_bits(x, "above")
            assert (words.shape, words.dtype, words.device) == ((11,), torch.int64, x.device)
            y = unpack_bits(words, x.shape, 0, 1, torch.float16)
            assert (y.shape, y.dtype, y.device) == (x.shape, torch.float16, x.device)


_FLOAT, _SPARSE = torch.ones(3), torch.eye(3).to_sparse()
_WORD = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pack_bits(torch.eye(3).to_sparse()), ValueError, "Expected x to be a strided"),
        (
            lambda: pack_pair(torch.eye(3).to_sparse(), 0, 1),
            ValueError,
            "Expected x to be a strided",
        ),
        (lambda: pack_bits(_FLOAT, "below"), ValueError, r"'not_at_most' \(got 'below'\)"),
        (lambda: pack_bits(_FLOAT, 1), ValueError, r"\(got 1\)"),
        (lambda: pack_bits(_FLOAT.to(torch.complex64)), ValueError, "Expected x to be real"),
        (lambda: pack_bits(_FLOAT.int(), "above"), ValueError, r"Expected x of float16, .*\(got"),
        (
            lambda: pack_bits(_FLOAT.to(torch.float8_e5m2), "not_at_most"),
            ValueError,
            r"Expected x of float16, .*\(got",
        ),
        (lambda: pack_pair(_FLOAT.int(), 0, 1), ValueError, "Expected x to be floating-point"),
        (
            lambda: unpack_bits(_WORD, [65], 0, 1, torch.bool),
            ValueError,
            r"Expected words of \[2\], contiguous \(got \[1\]\)",
        ),
        (lambda: unpack_bits(_WORD.int(), [64], 0, 1, torch.bool), ValueError, "Expected words of"),
        (
            lambda: unpack_bits(_WORD, [64], 0, 1, torch.complex64),
            ValueError,
            "Expected a real dtype",
        ),
    ],
)
def test_errors_name_the_argument(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(of_kernels(error), match=words):
        call()

"""The codecs by themselves: encode, decode, nbytes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from waits import Waits

from gact_graph.codecs import Kept, Request, encode
from gact_graph.codecs.drop import Dropped
from gact_graph.codecs.index import Narrowed
from gact_graph.codecs.mask import Masked, Signs
from gact_graph.codecs.quantize import Quantized, QuantizedWithSign
from gact_graph.codecs.reads import VALUES, Exact, Nothing, Reads, Side, Sign, Values
from gact_graph.support.storage import Layout

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def request(tensor: Tensor, bits: int = 4, reads: Reads = VALUES) -> Request:
    return Request(
        tensor=tensor,
        slot="a/mul.input",
        operation="mul",
        reads=reads,
        recipe=None,
        keep=lambda source: pytest.fail("nothing was gathered"),
        bits=bits,
        group_size=256,
        seed=1,
    )


def encoded(tensor: Tensor, bits: int = 4, reads: Reads = VALUES, quantize: bool = True):
    return encode(request(tensor, bits, reads), lossless=True, lossy=quantize)


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, NaN and -0 included."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.is_complex:
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    raw = kind[left.element_size()]
    return torch.equal(left.contiguous().view(raw), right.contiguous().view(raw))


@pytest.mark.parametrize(
    ("dtype", "bits", "codec"),
    [
        *((dtype, 4, "quantize") for dtype in FLOATS),
        (torch.float32, 16, "quantize"),
        (torch.float32, 32, "keep"),
        (torch.float64, 32, "keep"),
        (torch.float16, 15, "quantize"),
        (torch.float16, 16, "keep"),
        (torch.bfloat16, 16, "keep"),
        (torch.int64, 4, "index"),
        (torch.int32, 4, "index"),
        (torch.uint8, 4, "keep"),
        (torch.bool, 4, "mask"),
        (torch.complex64, 4, "keep"),
    ],
)
def test_the_codec_of_each_dtype_and_width(dtype, bits, codec):
    tensor = torch.arange(8) % 3
    assert encoded(tensor.to(dtype), bits).codec == codec


@pytest.mark.parametrize("tensor", [torch.arange(9), torch.ones(9, dtype=torch.bool)])
def test_without_exact_codecs_all_is_kept(tensor):
    assert encode(request(tensor), lossless=False, lossy=False).codec == "keep"


@st.composite
def spans(draw) -> Tensor:
    """Flat tensors of every dtype, of few and of many values."""
    dtype = draw(st.sampled_from((*FLOATS, torch.bool, torch.int64, torch.int32, torch.complex64)))
    count = draw(st.integers(0, 300))
    pool = draw(
        st.sampled_from(
            (
                [0.0, 1.25],
                [0.0, -0.0],
                [math.nan, 1.0],
                [3.0],
                [0.0, math.inf],
                [*range(-100, 100)],
                [0, 70_000, -5],
                [2**40, 1],
            )
        )
    )
    values = draw(st.lists(st.sampled_from(pool), min_size=count, max_size=count))
    if dtype in (torch.int64, torch.int32):
        values = [int(v) if math.isfinite(v) and abs(v) < 2**31 else 7 for v in values]
    return torch.tensor(values, dtype=torch.float64 if not dtype.is_complex else dtype).to(dtype)


@settings(deadline=None, max_examples=400)
@given(spans())
def test_without_quantization_every_span_comes_back_bit_by_bit(flat):
    before = flat.clone()
    form = encoded(flat, bits=32, quantize=False)
    assert same(form.decode(), before) and same(form.decode(), before)
    assert same(flat, before)
    assert form.exact
    if form.codec != "keep":
        assert form.nbytes < flat.nbytes + 8 or not flat.numel()


class TestMask:
    def test_one_bit_an_element(self):
        mask = torch.arange(1000) % 3 == 0
        form = encoded(mask)
        assert (form.codec, form.nbytes) == ("mask", 16 * 8)
        assert torch.equal(form.decode(), mask)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 1.0])
    def test_dropouts_noise(self, dtype, share):
        noise = (torch.rand(5000, generator=torch.Generator().manual_seed(0)) < share).to(dtype)
        form = encoded(noise / 0.7)
        assert (form.codec, form.nbytes) == ("mask", 79 * 8)
        assert same(form.decode(), noise / 0.7)

    @pytest.mark.parametrize("third", [0.5, -0.0, math.nan])
    def test_a_third_value_that_no_sample_shows(self, third):
        x = (torch.arange(10_000) % 2).float()
        x[4321] = third
        form = encoded(x, bits=32)
        assert form.codec == "keep"
        assert same(form.decode(), x)

    @pytest.mark.parametrize(
        ("side", "passes"),
        [
            (Side("above", (0.5,), 0.0, 1.0), lambda x: x > 0.5),
            (Side("not_at_most", (0.5,), 0.0, 1.0), lambda x: ~(x <= 0.5)),
            (Side("within", (-0.5, 0.5), math.nan, 0.0), lambda x: (x >= -0.5) & (x <= 0.5)),
            (Side("strictly_within", (-0.5, 0.5), -0.5, 0.0), lambda x: (x > -0.5) & (x < 0.5)),
            (Side("strictly_within", (-0.5, None), math.nan, 0.0), lambda x: x > -0.5),
            (Side("within", (None, 0.5), math.nan, 0.0), lambda x: x <= 0.5),
        ],
    )
    def test_sides(self, side, passes):
        x = torch.tensor([-1.0, -0.5, 0.0, 0.5, 0.75, math.inf, -math.inf, math.nan])
        form = encoded(x, reads=side)
        assert isinstance(form, Masked) and not form.exact
        decoded = form.decode()
        assert torch.equal(passes(decoded), passes(x))

    def test_signs(self):
        x = torch.tensor([-2.0, -0.0, 0.0, 3.0, math.nan, -math.inf])
        form = encoded(x, reads=Sign())
        assert isinstance(form, Signs) and form.nbytes == 16
        assert form.decode().tolist() == x.sgn().nan_to_num().tolist()


class TestIndex:
    @pytest.mark.parametrize(
        ("least", "most", "size"),
        [
            (0, 255, 1),
            (-128, 127, 1),
            (0, 256, 2),
            (-129, 0, 2),
            (0, 2**15, 4),
            (-(2**31), 2**31 - 1, 4),
        ],
    )
    def test_the_narrowest_type(self, least, most, size):
        x = torch.tensor([least, 0, most, 5] * 10)
        form = encoded(x)
        assert isinstance(form, Narrowed)
        assert (form.nbytes, form.codec) == (40 * size, "index")
        assert torch.equal(form.decode(), x) and form.decode().dtype == torch.int64

    def test_an_index_of_64_bits_is_kept(self):
        assert encoded(torch.tensor([0, 2**31])).codec == "keep"

    def test_a_device_is_waited_for_once(self):
        """For the range, and for the comparison."""
        x = torch.arange(-3, 1000)
        with Waits() as waits:
            mark = encoded(x).fingerprint()
        assert waits.seen == ["tolist"]
        assert mark == encoded(x.clone()).fingerprint() != encoded(x + 1).fingerprint()

    def test_equal_ones_are_known(self):
        x = torch.arange(1000) * 7 % 300
        first, second = encoded(x), encoded(x.clone())
        assert first.fingerprint() == second.fingerprint() and first.equals(second)
        other = x.clone()
        other[501] += 1  # between the samples
        three = encoded(other)
        assert first.fingerprint() == three.fingerprint() and not first.equals(three)


class TestDrop:
    def test_holds_nothing_and_has_the_shape(self):
        form = encoded(torch.randn(600), reads=Nothing())
        assert isinstance(form, Dropped)
        assert (form.codec, form.nbytes, form.exact) == ("drop", 0, False)
        back = form.restore(Layout(torch.Size([30, 20]), (20, 1), dense=True))
        assert back.shape == (30, 20) and back.isnan().all()


class TestQuantize:
    def test_round_trip(self):
        x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
        form = encoded(x, bits=8)
        assert isinstance(form, Quantized)
        assert (form.codec, form.bits) == ("quantize", 8)
        # 79 tiles of 64 codes of 8 bits, 20 groups of two bfloat16.
        assert form.nbytes == 79 * 64 + 20 * 4
        # One step is at most 8 / 255 of the range, rounded up to bfloat16.
        assert (form.decode() - x).abs().max() < 8 / 255 * 1.02
        assert torch.equal(form.decode(), form.decode())

    def test_the_seed_decides(self):
        x = torch.randn(5000)
        first, same, other = (
            encode(dataclasses.replace(request(x, 2), seed=seed), True, True).decode()
            for seed in (1, 1, 2)
        )
        assert torch.equal(first, same) and not torch.equal(first, other)

    def test_compared_tensors_are_kept(self):
        assert encoded(torch.randn(5000), reads=Exact()).codec == "keep"

    def test_the_least_bits_win(self):
        assert encoded(torch.randn(5000), bits=2, reads=Values(least_bits=16)).bits == 16

    def test_the_sign_may_be_exact(self):
        x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
        x[:5] = torch.tensor([0.0, 1e-30, -1e-30, 1e-3, -1e-3])
        form = encoded(x, bits=2, reads=Values(sign=True))
        assert isinstance(form, QuantizedWithSign)
        assert form.nbytes == 79 * 16 + 20 * 4 + 79 * 8
        assert torch.equal(form.decode() > 0, x > 0)
        plain = encoded(x, bits=2).decode()
        assert not torch.equal(plain > 0, x > 0)
        kept = (plain > 0) == (x > 0)
        assert torch.equal(form.decode()[kept], plain[kept])


class TestKeep:
    def test_is_a_reference(self):
        x = torch.randn(100, requires_grad=True)
        kept = Kept(x, "s")
        assert kept.decode().data_ptr() == x.data_ptr()
        assert not kept.decode().requires_grad
        assert (kept.codec, kept.bits, kept.nbytes) == ("keep", None, 400)

    def test_counts_the_whole_storage_and_sparse_parts(self):
        assert Kept(torch.zeros(100)[:10], "s").nbytes == 400
        assert Kept(torch.eye(4).to_sparse(), "s").nbytes == 2 * 4 * 8 + 4 * 4

    def test_an_in_place_change_raises_as_autograd_does(self):
        x = torch.zeros(3, 2)
        kept = Kept(x, "convs.0/mul.input")
        x[0, 0] = 1
        words = (
            r"one of the variables needed for gradient computation has been modified by an "
            r"inplace operation: \[torch.FloatTensor \[3, 2\]\], saved at convs.0/mul.input, is at "
            r"version 1; expected version 0"
        )
        with pytest.raises(RuntimeError, match=words):
            kept.decode()

    def test_inference_tensors_have_no_version(self):
        with torch.inference_mode():
            x = torch.zeros(3)
        assert torch.equal(Kept(x, "s").decode(), x)

    def test_one_that_was_changed_has_no_twin(self):
        x = torch.rand(100)
        first, second = Kept(x.clone(), "a"), Kept(x.clone(), "b")
        assert first.fingerprint() == second.fingerprint() and first.equals(second)
        second.tensor.mul_(1)
        assert not first.equals(second)

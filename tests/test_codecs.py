"""The codecs by themselves: encode, decode, nbytes."""

import pytest
import torch

from gact_graph.codecs import CODECS, Keep, Kept, Request, codec_for
from gact_graph.codecs.quantize import Quantize, Quantized


def request(tensor, bits=4):
    return Request(tensor=tensor, slot="a/mul.input", bits=bits, group_size=256, seed=1)


@pytest.mark.parametrize(
    ("dtype", "bits", "codec"),
    [
        (torch.float32, 4, Quantize),
        (torch.float32, 16, Quantize),
        (torch.float32, 32, Keep),
        (torch.float64, 16, Quantize),
        (torch.float64, 32, Keep),
        (torch.float16, 15, Quantize),
        (torch.float16, 16, Keep),
        (torch.bfloat16, 16, Keep),
        (torch.int64, 4, Keep),
        (torch.bool, 4, Keep),
        (torch.complex64, 4, Keep),
    ],
)
def test_who_takes_what(dtype, bits, codec):
    assert type(codec_for(request(torch.zeros(8, dtype=dtype), bits))) is codec


def test_the_last_codec_takes_everything():
    assert CODECS[-1].accepts(request(torch.eye(2).to_sparse()))


class TestQuantize:
    def test_round_trip(self):
        x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
        encoded = Quantize().encode(request(x, bits=8))
        assert isinstance(encoded, Quantized)
        assert (encoded.codec, encoded.bits) == ("quantize", 8)
        # 79 tiles of 64 codes of 8 bits, 20 groups of two bfloat16.
        assert encoded.nbytes == 79 * 64 + 20 * 4
        # One step is at most 8 / 255 of the range, rounded up to bfloat16.
        assert (encoded.decode() - x).abs().max() < 8 / 255 * 1.02
        assert torch.equal(encoded.decode(), encoded.decode())

    def test_the_seed_decides(self):
        x = torch.randn(5000)
        same = [Quantize().encode(request(x, bits=2)).decode() for _ in range(2)]
        assert torch.equal(*same)


class TestKeep:
    def test_is_a_reference(self):
        x = torch.randn(100, requires_grad=True)
        kept = Keep().encode(request(x))
        assert kept.decode().data_ptr() == x.data_ptr()
        assert not kept.decode().requires_grad
        assert (kept.codec, kept.bits, kept.nbytes) == ("keep", None, 400)

    def test_counts_the_whole_storage_and_sparse_parts(self):
        assert Kept(torch.zeros(100)[:10], "s").nbytes == 400
        assert Kept(torch.eye(4).to_sparse(), "s").nbytes == 2 * 4 * 8 + 4 * 4

    def test_an_in_place_change_is_told_in_autograds_words(self):
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
